"""Outliers in X U_k and what the weights alone tell of them (arXiv 2508.10395, Appendix B), on small models.

    python -m benchmarks.xquant_outliers [recall demo tests/assets_models/mha ...]

Per model, averaged over its layers: how much larger the first latent is than the next (mean size); the relative error
of K before RoPE at 2 bits, groups of 128 tokens, for K itself, for its latents per channel, per token, and with the
first one exact (Table B.1); and in how many layers the key channel of largest mean size is among the top 1, 2, 4, 8
entries of B_k^T's first row (Table B.2). Inputs: everyday sentences, or random symbols where the tokenizer knows
nothing else.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from kvqjax.calibrate.xquant import latent_maps, outlier_channels
from kvqjax.codecs import Uniform
from kvqjax.codecs.outlier_channel import OutlierChannels
from kvqjax.eval.synthetic import SYMBOLS, filler
from kvqjax.model import decoder

TOKENS, TOP = 512, (1, 2, 4, 8)


def layer_inputs(model, tokens) -> np.ndarray:
    """X of every layer, [L, T, E]."""
    config, length = model.config, tokens.shape[1]
    positions = jnp.arange(length)[None]
    mask = decoder.causal_mask(length, jnp.int32(2**30))[None]

    @jax.jit
    def step(h, number):
        weights = decoder.layer(model.params, number)
        projected = decoder.project(weights, h, positions, config)
        k = decoder.rotate(projected.k, positions, config)
        out = decoder.segment_attention(projected.q, k, projected.v, mask).out
        return decoder.finish(weights, h, out, config), projected.x[0]

    h, inputs = decoder.embed(model.params, tokens), []
    for number in range(config.num_layers):
        h, x = step(h, jnp.int32(number))
        inputs.append(np.asarray(x, np.float32))
    return np.stack(inputs)


def error(spec, vectors: np.ndarray, after: np.ndarray) -> float:
    """Relative error of `vectors @ after` once the vectors went through the codec."""
    codec = spec.build(vectors.shape[1])
    kept = np.asarray(codec.decode({}, codec.encode({}, jnp.asarray(vectors))))
    return float(np.linalg.norm((kept - vectors) @ after) / np.linalg.norm(vectors @ after))


def measure(name: str) -> dict[str, float]:
    model = kvqjax.load(name, dtype="f32")
    rng = np.random.default_rng(0)
    text = filler(rng, TOKENS) if model.config.vocab_size > 100 else "".join(rng.choice(list(SYMBOLS), TOKENS))
    tokens = jnp.asarray([model.tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]])
    channel, token = (Uniform(bits=2, along=along, group=128) for along in ("tokens", "channels"))
    rows = []
    for number, x in enumerate(layer_inputs(model, tokens)):
        weight = np.asarray(model.params["layers"]["k"][number], np.float32)
        maps, keys = latent_maps(weight), x @ weight
        latents, identity = x @ maps["down"], np.eye(keys.shape[1], dtype=np.float32)
        size = np.abs(latents).mean(0)
        largest = np.abs(keys).mean(0).argmax()
        row = {"first / next": size[0] / size[1:].max(), "K": error(channel, keys, identity)}
        row |= {"latents": error(channel, latents, maps["up"]), "per token": error(token, latents, maps["up"])}
        row["first exact"] = error(OutlierChannels(channels=(0,), inner=channel), latents, maps["up"])
        row |= {f"top {top}": float(largest in outlier_channels(weight, top)) for top in TOP}
        rows.append(row)
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def main() -> None:
    for number, name in enumerate(sys.argv[1:] or ["recall", "demo"]):
        row = measure(name)
        if number == 0:
            print("| model | " + " | ".join(row) + " |\n|---|" + "---|" * len(row))
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
