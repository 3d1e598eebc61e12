"""CommVQ on a small model: cost of calibration, errors against the papers' tables, perplexity on four kinds of text.

    python benchmarks/commvq_quality.py --out FOLDER [--books train.txt --held-out valid.txt] [--bits 1 2]

Calibrates each bit width from --books (or loads it from FOLDER when it is there; a killed calibration goes on after the
last layer it finished) and prints: errors, iterations and seconds of every layer; key errors of layer 0 for the
(g, L, R) of Tables 9 and 10; value errors beside asymmetric quantisation (Table 11); and perplexity in the loop on
books, arithmetic, code and random key-value lines (Table 6). Where the texts come from: --books and --held-out are any
UTF-8 files, by default sentences made by kvqjax.eval.synthetic with two seeds; code is the source of three modules of
this Python's standard library; arithmetic and key-value lines are made here. FOLDER/commvq_quality.json has it all.
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
from kvqjax.calibrate import commvq as calibration
from kvqjax.calibrate.commvq_em import EMSettings, fit_keys
from kvqjax.calibrate.commvq_values import ValueSettings
from kvqjax.codecs import Uniform
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.eval.corpora import read_text
from kvqjax.eval.measure_perplexity import perplexity
from kvqjax.model import decoder

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
    """The artifact of one bit width, calibrated now or before; its `about` has [wall, CPU] seconds of every layer."""
    path, log = folder / f"commvq{bits}", folder / f"commvq{bits}.seconds.json"
    if not path.exists():
        spent = json.loads(log.read_text()) if log.exists() else []
        clock = lambda: np.asarray([time.perf_counter(), time.process_time()])  # noqa: E731
        mark = clock()

        def advance(done, total):
            nonlocal mark
            if done * model.config.num_layers % total == 0:  # a layer is done
                spent.append((clock() - mark).tolist())
                log.write_text(json.dumps(spent))
                mark = clock()

        options = {"recipe": recipe, "advance": advance, "note": lambda text: print(text, flush=True)}
        method, state = kvq.parse(f"commvq:bits={bits}"), folder / f"commvq{bits}.npz"
        artifact = calibration.calibrate(model, method, batch, state=state, **options)
        artifact.about["seconds"] = spent
        artifact.save(path)
    return kvq.load_artifact(path)


def calibration_rows(artifacts) -> list[dict]:
    rows = []
    for bits, artifact in artifacts.items():
        for index, layer in enumerate(artifact.about["layers"]):
            errors, steps = zip(*layer["keys"], strict=True)
            losses = layer["values"]
            row = {"bits": bits, "layer": index, "key error by round": " ".join(f"{e:.3g}" for e in errors)}
            row |= {"iterations": " ".join(str(int(s)) for s in steps)}
            row |= {"value loss, first and last tenth": f"{losses[0][0]:.3f} {losses[-1][0]:.3f}"}
            wall, cpu = artifact.about["seconds"][index]
            rows.append(row | {"value error": losses[-1][1], "wall s": wall, "CPU s": cpu})
    return rows


def layer_zero(model, ids) -> tuple[jax.Array, jax.Array]:
    """Keys before RoPE and values of layer 0, [N, W] each."""
    h = decoder.embed(model.params, jnp.asarray(ids)[None])
    found = decoder.project(decoder.layer(model.params, 0), h, jnp.arange(len(ids))[None], model.config)
    return tuple(x[0].reshape(len(ids), -1) for x in (found.k, found.v))


def error_of(codec, constants, x) -> float:
    run = jax.jit(lambda x: codec.decode(constants, codec.encode(constants, x)))
    blocks = x[: len(x) // 128 * 128].reshape(-1, 128, x.shape[1])
    return float(np.mean([float(((run(block) - block) ** 2).mean()) for block in blocks]))


def key_rows(model, batch, held_out) -> list[dict]:
    """Held-out errors of layer 0 for the settings of Tables 9 and 10, as far as the head has pairs."""
    k, unseen = layer_zero(model, batch.reshape(-1)[:2048])[0], layer_zero(model, held_out[:1024])[0]
    pairs, rows = model.config.head_dim // 2, []
    for rounds in (1, 8):
        for group, levels in ((8, 2), (16, 4), (32, 16), (64, 64)):
            if group <= pairs:
                spec = CommVQKeys(head_dim=2 * pairs, rounds=rounds, levels=levels, group=group)
                book = fit_keys(jax.random.key(0), k, spec, EMSettings())
                error = error_of(spec.build(k.shape[1]), {"codebook": book}, unseen)
                bits = rounds * float(np.log2(levels)) / group
                rows.append({"g": group, "L": levels, "R": rounds, "bits": bits, "error": error})
    return [row | {"mean square": float((unseen**2).mean())} for row in rows]


def value_rows(model, artifacts, held_out) -> list[dict]:
    """Held-out errors of layer 0 beside asymmetric quantisation with one group a head."""
    unseen, rows = layer_zero(model, held_out[:1024])[1], []
    for bits, artifact in artifacts.items():
        constants = {name: x[0] for name, x in artifact.constants[0]["v"].items()}
        learnt = error_of(artifact.method.layer.value().build(unseen.shape[1]), constants, unseen)
        plain = Uniform(bits=bits, along="channels", group=model.config.head_dim).build(unseen.shape[1])
        row = {"bits": bits, "CommVQ": learnt, "asymmetric": error_of(plain, {}, unseen)}
        rows.append(row | {"mean square": float((unseen**2).mean())})
    return rows


def shift_rows(model, artifacts, texts: dict[str, str], tokens: int) -> list[dict]:
    """In the loop, chunks of 32, windows of 512."""
    rows = []
    for name, text in texts.items():
        ids = tokens_of(model, text[: 12 * tokens])
        methods = {a.method: model.with_artifact(a) for a in artifacts.values()}
        methods |= {kvq.kivi(bits=bits): model for bits in artifacts if bits > 1}
        for method, own in methods.items():
            found = perplexity(own, ids, method, chunk=32, window=512, tokens=tokens)
            chosen = ("cache", "tokens", "ppl_exact", "ppl", "kld", "top1", "bits_method")
            rows.append({"text": name} | {key: found[key] for key in chosen})
    return rows


def show(title: str, rows: list[dict]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--books", default="synthetic", help="text to calibrate on")
    parser.add_argument("--held-out", default="synthetic", help="text of the same kind to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the artifacts and the record")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    for name, default in (("sequences", 32), ("length", 512), ("key-tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default, help="size of the calibration")
    parser.add_argument("--steps", type=int, default=ValueSettings().steps, help="training steps of a value encoder")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each text for the perplexity")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = kvq.load(options.model)
    text, _ = read_text(options.books, options.sequences * options.length, 0)
    batch = batch_of(model, text, options.sequences, options.length)
    recipe = calibration.Recipe(values=ValueSettings(steps=options.steps), key_tokens=options.key_tokens)
    books, _ = read_text(options.held_out, 2 * options.tokens, 1)
    held_out = tokens_of(model, books[: 12 * max(options.tokens, 1024)])
    artifacts = {bits: ready(model, bits, batch, options.out, recipe) for bits in options.bits}
    texts = {"books": books} | shifted_texts(12 * options.tokens)
    found = {
        "calibration": calibration_rows(artifacts),
        "values of layer 0, held out": value_rows(model, artifacts, held_out),
        "keys of layer 0, held out": key_rows(model, batch, held_out),
        "perplexity": shift_rows(model, artifacts, texts, options.tokens),
    }
    for title, rows in found.items():
        show(title, rows)
    about = {name: str(value) for name, value in vars(options).items() if name not in ("out", "books", "held_out")}
    about |= {"books": Path(options.books).name, "held_out": Path(options.held_out).name, "jax": jax.__version__}
    (options.out / "commvq_quality.json").write_text(json.dumps({"about": about} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
