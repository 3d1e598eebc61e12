"""How CommVQ's value encoder of one layer learns, from a transform coder and from random numbers.

    python -m benchmarks.commvq_training --learn TEXT.txt [--layer 10] [--bits 2] [--steps 200] [--rate 1e-3]

Printed are squared errors of the values and of the attention's outputs, over the signals' own mean squares, on text
that was not learnt, before and after training; and processor seconds. What is not said is as in the recipe of `kvqjax
calibrate`.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from benchmarks.tables import table
from kvqjax.calibrate import commvq_values as training
from kvqjax.calibrate import sequences
from kvqjax.calibrate.commvq_values import Activations, Training, ValueSettings
from kvqjax.calibrate.layerwise import of_model
from kvqjax.codecs.commvq_values import CommVQValues
from kvqjax.data.corpora import read

LEARNT, UNSEEN, LENGTH = 24, 4, 1024  # sequences that are learnt and that are scored, and their tokens
RANDOM_RATE = 1e-2  # learning rate from random numbers: at the released 1e-3 a few hundred steps change little


def random_start(key: jax.Array, v: jax.Array, spec: CommVQValues, settings: ValueSettings) -> Training:
    """As the released training begins: linear layers uniform in +-1/sqrt(inputs), a codebook of normal numbers."""
    of_encoder, of_codebook = jax.random.split(key)
    codebook = jax.random.normal(of_codebook, spec.shapes(v.shape[-1])["codebook"])
    params = training.random_encoder(of_encoder, spec, v.shape[-1]) | {"codebook": codebook}
    return training.start(key, v, spec, settings)._replace(params=params)


def activations(model: kvq.Model, text: str, layer: int) -> tuple[Activations, Activations]:
    """What one layer computes for the sequences that are learnt, and for those that are scored."""
    tokens = sequences(model, read(text, tokens=1 << 17), LEARNT + UNSEEN, LENGTH)
    data = of_model(model, kvq.parse("commvq"), tokens)
    h = data.h
    for index in range(layer):
        h = data.read(index, h)[2]
    v, q, k, o, sinks = data.read(layer, h)[1]
    return tuple(Activations(v[rows], q[rows], k[rows], o, sinks) for rows in (slice(LEARNT), slice(LEARNT, None)))


@functools.partial(jax.jit, static_argnames="spec")
def errors(constants: dict, data: Activations, spec: CommVQValues) -> jax.Array:
    """Squared errors of values and outputs through the codec, over the signals' own mean squares."""
    v, codec = data.v.astype(jnp.float32), spec.build(data.v.shape[-1])
    flat = v.reshape(-1, v.shape[-1])
    residual = codec.decode(constants, codec.encode(constants, flat)).reshape(v.shape) - v
    return jnp.stack(
        [jnp.mean(residual**2) / jnp.mean(v**2), training.output_error(data, residual) / training.output_energy(data)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--learn", required=True, help="a text")
    parser.add_argument("--layer", type=int, action="append")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="leave out the random start")
    usual = ValueSettings()
    for name in ("steps", "batch", "queries", "rate"):
        parser.add_argument(f"--{name}", type=type(getattr(usual, name)), default=getattr(usual, name))
    options = parser.parse_args()
    model, spec, rows = kvq.load(options.model), CommVQValues(bits=options.bits), []
    settings = {name: getattr(options, name) for name in ("steps", "batch", "queries")}
    for layer in options.layer or [model.config.num_layers // 3]:
        learnt, unseen = activations(model, options.learn, layer)
        for name, start, rate in (
            ("transform coder", training.start, options.rate),
            *([] if options.alone else [("random", random_start, RANDOM_RATE)]),
        ):
            chosen, key = ValueSettings(**settings, rate=rate), jax.random.key(0)
            begun = time.process_time()
            state = start(key, learnt.v, spec, chosen)
            errors_before = np.asarray(errors(training.constants(state), unseen, spec))
            state, _ = training.train(key, state, learnt, chosen, jnp.int32(chosen.steps))
            errors_after = np.asarray(errors(training.constants(state), unseen, spec))
            seconds = time.process_time() - begun
            rows.append([str(layer), name, *(f"{x:.4f}" for x in (*errors_before, *errors_after)), f"{seconds:.0f}"])
    head = ["layer", "begins as", "values", "outputs", "values, trained", "outputs, trained", "processor s"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
