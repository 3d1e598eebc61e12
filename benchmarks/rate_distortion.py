"""How far every codec is from the rate-distortion limit: mean squared error at its stored bits, on Gaussian vectors and
on the bundled models' own keys (before RoPE) and values.

    python -m benchmarks.rate_distortion [--data TEXT.txt] [--out benchmarks/records/rate_distortion.json] [--plot-only]

The limit is that of a Gaussian source with the same covariance over the channels of a token, by reverse water-filling:
R(D) = sum_i max(0, log2(s_i / D) / 2) / W over the eigenvalues s_i. No source of this covariance needs more bits, so it
bounds every source from above; what is not Gaussian, or depends on other tokens, could be stored in fewer.
`gap` is the codec's bits less R at its error: 0.25 bits is what one scalar per value loses at high rates (1.53 dB).
Calibrated codecs learn from other vectors than those measured. Bits are codes, scales, minima and outliers.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import kvqjax
from benchmarks.calibrated import span_rows
from benchmarks.tables import table
from kvqjax.calibrate import kmeans
from kvqjax.calibrate import kvquant as passes
from kvqjax.calibrate.activations import activations
from kvqjax.calibrate.commvq_em import fit_keys
from kvqjax.codecs import Centred, CodecSpec, Uniform, bits_per_value
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.nuq import Nuq
from kvqjax.data.corpora import read_text
from kvqjax.eval.labels import Curve, curve_style, label_curves, new_figure

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "rate_distortion.json"
PLOT = ROOT / "docs" / "rate_distortion.png"
ROWS, LENGTH, SKIPPED, LAYER, WIDTH, HEAD = 16, 512, 4, 1, 128, 64
SOURCES = ("Gaussian", "demo keys", "demo values", "recall keys", "recall values", "qwen2 keys")


def specs() -> dict[str, tuple[CodecSpec, ...]]:
    """Codec family -> its members, by width."""
    return {
        "per channel, groups of 128 tokens": tuple(Uniform(bits=b, along="tokens", group=128) for b in (1, 2, 3, 4)),
        "per channel, groups of 32 tokens": tuple(Uniform(bits=b, along="tokens", group=32) for b in (1, 2, 3, 4)),
        "per token, groups of 128 channels": tuple(Uniform(bits=b, along="channels", group=128) for b in (1, 2, 3, 4)),
        "per token, groups of 32 channels": tuple(Uniform(bits=b, along="channels", group=32) for b in (1, 2, 3, 4)),
        "nuq per channel": tuple(Nuq(bits=b, per="channel") for b in (2, 3, 4)),
        "nuq per channel, 1 %": tuple(Nuq(bits=b, per="channel", outliers=0.01) for b in (2, 3, 4)),
        "nuq per token": tuple(Nuq(bits=b, per="token") for b in (2, 3, 4)),
        "HIGGS, pairs": tuple(Higgs(bits=b, dim=2) for b in (2, 3, 4)),
        "HIGGS, fours": (Higgs(bits=2, dim=4), Higgs(bits=3, dim=4)),
        "HIGGS, pairs, centred": tuple(Centred(inner=Higgs(bits=b, dim=2)) for b in (2, 3, 4)),
        "CommVQ keys": tuple(CommVQKeys(head_dim=HEAD, rounds=r) for r in (5, 11)),
    }


def vectors(name: str, data: str) -> tuple[np.ndarray, np.ndarray, dict]:
    """(learn, test) [N, WIDTH] float32 of one source, and where they are from."""
    if name == "Gaussian":
        draws = np.random.default_rng(0).normal(size=(2, 3968, WIDTH)).astype(np.float32)
        return draws[0], draws[1], {"name": "standard normal, seed 0"}
    shape, source = name.split()
    folder = shape if shape in ("demo", "recall") else ROOT / "tests" / "assets_models" / shape
    model = kvqjax.load(folder)
    about = {"name": "repeated spans of symbols", "layer": LAYER}
    if shape == "demo":
        text, source_about = read_text(data, 12_000, 0)
        ids = np.asarray(model.tokenizer(text)["input_ids"], np.int32)
        rows, about = (
            ids[: ROWS * LENGTH].reshape(ROWS, LENGTH),
            source_about | {"name": Path(data).name, "layer": LAYER},
        )
    else:
        rows = span_rows(model, ROWS, LENGTH, seed=0)
    cached = activations(model.params, jnp.asarray(rows), model.config, gradients=False)
    x = np.asarray(getattr(cached, source[0])[LAYER])[:, SKIPPED:]
    return *(half.reshape(-1, WIDTH)[:3968] for half in np.split(x, 2)), about


def _nuq_constants(spec: Nuq, learn) -> dict:
    """Thresholds and signposts of least squared error."""
    extremes = passes.observe(passes.empty_extremes(1, WIDTH, passes.rank(len(learn), spec.outliers)), learn[None])
    upper, lower = passes.thresholds(extremes, len(learn), spec.outliers)
    slots = spec.slot_count(WIDTH)
    tokens = (learn[None], learn[None], jnp.ones_like(learn)[None], jnp.ones_like(learn)[None])
    options = {"key_slots": slots, "value_slots": slots, "dtype": spec.dtype, "objective": "fisher_s2"}
    tally = passes.tally(tokens, {"upper": upper, "lower": lower}, **options)
    signposts = kmeans.weighted_kmeans(tally.k if spec.per == "channel" else tally.v, 2**spec.bits)[0]
    return {"upper": upper[0], "lower": lower[0], "signposts": signposts}


@functools.lru_cache(maxsize=1)
def _book(source: str, learn: bytes, rounds: int):
    """CommVQ's key codebook; rounds are nested, so the longest serves all."""
    spec = CommVQKeys(head_dim=HEAD, rounds=rounds)
    return fit_keys(jax.random.key(0), jnp.asarray(np.frombuffer(learn, np.float32).reshape(-1, WIDTH)), spec)


def constants(spec: CodecSpec, source: str, learn: np.ndarray) -> dict:
    """What a codec needs, from the vectors it may learn from."""
    if isinstance(spec, Nuq):
        return _nuq_constants(spec, jnp.asarray(learn))
    if isinstance(spec, CommVQKeys):
        return {"codebook": _book(source, learn[::4].tobytes(), 11)[: spec.rounds]}
    return {"mean": jnp.asarray(learn.mean(0))} if isinstance(spec, Centred) else {}


@functools.partial(jax.jit, static_argnames="spec")
def error(spec: CodecSpec, fixed: dict, x) -> jax.Array:
    """Mean squared error per channel."""
    codec = spec.build(WIDTH)
    return ((codec.decode(fixed, codec.encode(fixed, x)) - x) ** 2).mean()


def rate(eigenvalues: np.ndarray, distortion: float) -> float:
    """Bits per channel that a Gaussian source needs at this mean squared error, by reverse water-filling."""
    low, high = 0.0, float(eigenvalues.max())
    if distortion >= eigenvalues.mean():
        return 0.0
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(eigenvalues, level).mean() < distortion else (low, level)
    return float(np.log2(np.maximum(eigenvalues / high, 1)).mean() / 2)


def measure(source: str, data: str) -> list[dict]:
    """Rows of one source."""
    learn, test, about = vectors(source, data)
    eigenvalues = np.maximum(np.linalg.eigvalsh(np.cov(test.T.astype(np.float64))), 1e-12)
    variance, rows = float(eigenvalues.mean()), []
    for family, members in specs().items():
        for spec in members:
            bits = bits_per_value(spec.build(WIDTH))
            mse = float(error(spec, constants(spec, source, learn), jnp.asarray(test)))
            needed = rate(eigenvalues, mse)
            row = {
                "source": source,
                "codec": family,
                "bits": round(bits, 4),
                "relative_mse": float(f"{mse / variance:.5g}"),
            }
            rows.append(row | {"limit_bits": round(needed, 4), "gap": round(bits - needed, 4), "data": about})
    return rows


def markdown(rows: list[dict]) -> str:
    """Gap in bits by codec and source, with the error beside it."""
    if not rows:
        return "Not run yet.\n"
    cells = {(r["codec"], r["bits"], r["source"]): f"{r['relative_mse']:.3g} ({r['gap']:+.2f})" for r in rows}
    lines = [
        [codec, f"{bits:.2f}", *(cells.get((codec, bits, source), "-") for source in SOURCES)]
        for codec, bits in dict.fromkeys((r["codec"], r["bits"]) for r in rows)
    ]
    about = (
        "Mean squared error over the channels' mean variance and, in brackets, stored bits above what a Gaussian source"
    )
    limit_text = "of the same covariance needs at that error (`benchmarks/rate_distortion.py`; layer 1, before RoPE).\n"
    return "\n".join(
        [about, limit_text, table(["codec", "bits", *SOURCES], lines), "![error against bits](rate_distortion.png)\n"]
    )


# The families of the picture, by their short names; the table has all.
CURVES = {
    "per channel, groups of 128 tokens": "a scale a channel",
    "per token, groups of 128 channels": "a scale a token",
    "nuq per channel": "non-uniform",
    "HIGGS, pairs": "HIGGS",
    "CommVQ keys": "CommVQ",
}


def plot(rows: list[dict], path: Path) -> None:
    """Relative error against bits, a panel a source: the limit as a dashed line, the codecs' curves above it."""
    figure = new_figure(6.4, 8.0)
    panels, labelled = figure.subplots(3, 2, sharex=True), []
    for panel, source in zip(panels.flat, SOURCES, strict=True):
        source_rows = [row for row in rows if row["source"] == source]
        limit = sorted((row["limit_bits"], row["relative_mse"]) for row in source_rows if row["limit_bits"] > 0)
        curves = [Curve("limit", *zip(*limit, strict=True), "#000000")]
        panel.plot(curves[0].x, curves[0].y, "k--", lw=1.5)
        for number, (family, name) in enumerate(CURVES.items()):
            points = [(row["bits"], row["relative_mse"]) for row in source_rows if row["codec"] == family]
            curves.append(Curve(name, *zip(*points, strict=True), curve_style(number)["color"]))
            panel.plot(curves[-1].x, curves[-1].y, lw=1.2, ms=4, **curve_style(number))
        panel.set_title(source, fontsize=10)
        panel.set(yscale="log", xlim=(0, 4.7), xticks=range(5))
        panel.grid(alpha=0.3)
        labelled.append((panel, curves))
    figure.supxlabel("bits stored per number", fontsize=10)
    figure.supylabel("mean squared error over the channels' mean variance", fontsize=10)
    figure.suptitle("How far codecs are from the rate-distortion limit", fontsize=11)
    label_curves(figure, labelled, size=8.0)
    figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="text for demo")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--plot-only", action="store_true", help="draw the picture from the record, run nothing")
    options = parser.parse_args()
    if options.plot_only:
        return plot(json.loads(RECORD.read_text(encoding="utf-8")), PLOT)
    rows = [row for source in track(SOURCES, description="sources") for row in measure(source, options.data)]
    options.out.write_text("[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    plot(rows, PLOT)
    print(markdown(rows))


if __name__ == "__main__":
    main()
