"""CommVQ on a small model: cost of calibration, errors against the papers' tables, perplexity on four kinds of text.

    python benchmarks/commvq_quality.py --model demo --books train.txt --held-out valid.txt --out FOLDER [--bits 1 2]

Calibrates each bit width from --books (or loads it from FOLDER when it is there) and prints: errors and iterations of
every layer; key errors of layer 0 for the (g, L, R) of Tables 9 and 10; value errors beside asymmetric quantisation
(Table 11); and perplexity in the loop on books, arithmetic, code and random key-value lines (Table 6). The last three
texts are made here, so they are far from what the codebooks saw.
"""

import argparse
import inspect
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvqjax as kvq
from kvqjax import decoder
from kvqjax.calibrate import commvq as calibration
from kvqjax.calibrate.commvq_em import EMSettings, fit_keys
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.codecs import Uniform
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.eval.perplexity import perplexity

CONSOLE = Console(width=130)


def tokens_of(model, text: str) -> np.ndarray:
    return np.asarray(model.tokenizer.encode(text, add_special_tokens=False), np.int32)


def batch_of(model, text: str, count: int, length: int) -> np.ndarray:
    """Calibration sequences spread over a text."""
    starts = np.linspace(0, len(text) - 12 * length, count, dtype=int)
    return np.stack([tokens_of(model, text[start : start + 12 * length])[:length] for start in starts])


def shifted_texts(size: int) -> dict[str, str]:
    """Arithmetic, code and random key-value lines of at least `size` characters."""
    rng = np.random.default_rng(0)
    sums = [(int(a), int(b)) for a, b in rng.integers(10, 900, (size // 20, 2))]
    keys = ["".join(rng.choice(list("0123456789abcdef"), 12)) for _ in range(size // 12)]
    return {
        "arithmetic": "\n".join(f"If Tom has {a} apples and buys {b} more, he has {a + b} apples." for a, b in sums),
        "code": inspect.getsource(argparse) + inspect.getsource(json.decoder) + inspect.getsource(inspect),
        "key-value": "\n".join(f'"{a}": "{b}",' for a, b in zip(keys[::2], keys[1::2], strict=False)),
    }


def ready(model, bits: int, batch: np.ndarray, folder: Path, recipe: calibration.Recipe):
    """The artifact of one bit width, calibrated now or before, with the cost of doing so."""
    path = folder / f"commvq{bits}"
    if not path.exists():
        wall, cpu = time.perf_counter(), time.process_time()
        method = kvq.parse(f"commvq:bits={bits}")
        artifact = calibration.calibrate(
            model,
            method,
            batch,
            recipe=recipe,
            state=folder / f"commvq{bits}.npz",
            note=lambda text: print(text, flush=True),
        )
        artifact.about["seconds"] = [time.perf_counter() - wall, time.process_time() - cpu]
        artifact.save(path)
    return kvq.load_artifact(path)


def calibration_table(artifact) -> Table:
    wall, cpu = artifact.about["seconds"]
    table = Table(title=f"{artifact.method}: calibrated in {wall:.0f} s, {cpu:.0f} s of CPU time")
    for column in ("layer", "key error by round", "iterations", "value loss, first and last tenth", "value error"):
        table.add_column(column)
    for index, layer in enumerate(artifact.about["layers"]):
        errors, steps = zip(*layer["keys"], strict=True)
        losses = layer["values"]
        row = [" ".join(f"{e:.3g}" for e in errors), " ".join(str(int(s)) for s in steps)]
        table.add_row(str(index), *row, f"{losses[0][0]:.3f} {losses[-1][0]:.3f}", f"{losses[-1][1]:.4g}")
    return table


def layer_zero(model, ids) -> tuple[jax.Array, jax.Array]:
    """Keys before RoPE and values of layer 0, [N, W] each."""
    h = decoder.embed(model.params, jnp.asarray(ids)[None])
    found = decoder.project(decoder.layer(model.params, 0), h, jnp.arange(len(ids))[None], model.config)
    return tuple(x[0].reshape(len(ids), -1) for x in (found.k, found.v))


def error_of(codec, constants, x) -> float:
    run = jax.jit(lambda x: codec.decode(constants, codec.encode(constants, x)))
    blocks = x[: len(x) // 128 * 128].reshape(-1, 128, x.shape[1])
    return float(np.mean([float(((run(block) - block) ** 2).mean()) for block in blocks]))


def key_table(model, batch, held_out) -> Table:
    """Held-out errors of layer 0 for the settings of Tables 9 and 10, as far as the head has pairs."""
    k, unseen = layer_zero(model, batch.reshape(-1)[:8192])[0], layer_zero(model, held_out[:1024])[0]
    energy = float((unseen**2).mean())
    table = Table(title=f"keys of layer 0: held-out mean squared error (mean square {energy:.4g})")
    for column in ("g", "L", "R", "bits", "error"):
        table.add_column(column)
    pairs = model.config.head_dim // 2
    for rounds in (1, 8):
        for group, levels in ((8, 2), (16, 4), (32, 16), (64, 64)):
            if group <= pairs:
                spec = CommVQKeys(head_dim=2 * pairs, rounds=rounds, levels=levels, group=group)
                book = fit_keys(jax.random.key(0), k, spec, EMSettings())
                error = error_of(spec.build(k.shape[1]), {"codebook": book}, unseen)
                bits = rounds * np.log2(levels) / group
                table.add_row(str(group), str(levels), str(rounds), f"{bits:.3f}", f"{error:.4g}")
    return table


def value_table(model, artifacts, held_out) -> Table:
    unseen = layer_zero(model, held_out[:1024])[1]
    energy = float((unseen**2).mean())
    table = Table(title=f"values of layer 0: held-out mean squared error (mean square {energy:.4g})")
    for column in ("bits", "CommVQ", "asymmetric, one group a head"):
        table.add_column(column)
    for bits, artifact in artifacts.items():
        constants = {name: x[0] for name, x in artifact.constants[0]["v"].items()}
        learnt = error_of(artifact.method.layer.value().build(unseen.shape[1]), constants, unseen)
        plain = Uniform(bits=bits, along="channels", group=model.config.head_dim).build(unseen.shape[1])
        table.add_row(str(bits), f"{learnt:.4g}", f"{error_of(plain, {}, unseen):.4g}")
    return table


def shift_table(model, artifacts, texts: dict[str, str], tokens: int) -> Table:
    table = Table(title=f"perplexity, tokens through the cache in chunks of 32, windows of 512, {tokens} tokens")
    for column in ("text", "cache", "exact", "compressed", "KL, nats", "same top token", "stored bits"):
        table.add_column(column)
    for name, text in texts.items():
        ids = tokens_of(model, text[: 12 * tokens])
        methods = {str(a.method): (model.with_artifact(a), a.method) for a in artifacts.values()}
        methods |= {f"kivi:bits={bits}": (model, kvq.kivi(bits=bits)) for bits in artifacts}
        for label, (own, method) in methods.items():
            row = perplexity(own, ids, method, chunk=32, window=512, tokens=tokens)
            figures = (f"{row['ppl_exact']:.3f}", f"{row['ppl']:.3f}", f"{row['kld']:.4f}", f"{row['top1']:.3f}")
            table.add_row(name, label, *figures, f"{row['bits_stored']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--books", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--held-out", type=Path, required=True, help="text of the same kind to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the artifacts")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    for name, default in (("sequences", 32), ("length", 512), ("key-tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default, help="size of the calibration")
    parser.add_argument("--steps", type=int, default=ValueSettings().steps, help="training steps of a value encoder")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each text for the perplexity")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = kvq.load(options.model)
    batch = batch_of(model, options.books.read_text(encoding="utf-8"), options.sequences, options.length)
    recipe = calibration.Recipe(values=ValueSettings(steps=options.steps), key_tokens=options.key_tokens)
    books = options.held_out.read_text(encoding="utf-8")
    held_out = tokens_of(model, books[: 12 * max(options.tokens, 1024)])
    artifacts = {}
    for bits in options.bits:
        artifacts[bits] = ready(model, bits, batch, options.out, recipe)
        CONSOLE.print(calibration_table(artifacts[bits]))
    CONSOLE.print(value_table(model, artifacts, held_out))
    CONSOLE.print(key_table(model, batch, held_out))
    CONSOLE.print(shift_table(model, artifacts, {"books": books} | shifted_texts(12 * options.tokens), options.tokens))


if __name__ == "__main__":
    main()
