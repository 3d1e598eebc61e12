"""KVQuant's ablations on one model and text: which parts of the method lower the perplexity, with paired standard
errors.

    python benchmarks/kvquant_ablation.py --text valid.txt --other another.txt --out FOLDER [--windows 100]

Every row's losses are kept in FOLDER as soon as they are known, so that a run that was killed goes on there; the last
one writes FOLDER/kvquant_ablation.json. The texts are any UTF-8 files.

Mode: in the loop, chunk 1. Every token attends to all earlier ones as the cache would give them back and to itself
and the sinks exactly, computed for a whole window at once: with no window and one token encoded at a time this is
what decoding token by token computes (one layer of it is checked in tests/methods/test_kvquant_method.py). Each row is
the difference of the mean negative log-likelihood to the exact cache, in thousandths of a nat, and each comparison the
paired difference of two rows with its standard error over windows; a seed is which calibration sequences are drawn.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvqjax as kvq
from kvqjax.calibrate import kmeans
from kvqjax.calibrate.fisher import activations
from kvqjax.calibrate.kvquant import Recipe, calibrate
from kvqjax.codecs.nuq_table import fixed_signposts, look_up, nearest
from kvqjax.methods import kvquant
from kvqjax.model import decoder
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import merge, segment_attention

PAIRS = (  # (better, worse) as in the paper
    ("nuq3", "nuq3 unweighted", "Table 11: Fisher weights"),
    ("nuq3", "nuq3 F only", "Table 11: s^2"),
    ("nuq3", "nf3", "Table 11: nuq against nf"),
    ("nuq3", "int3", "Table 11: nuq against int"),
    ("nuq3 1%", "nuq3 matrix 1%", "Table 12: per vector against per matrix"),
    ("nuq3 matrix 1%", "nuq3", "Table 12: per matrix against none"),
    ("nuq3 1%", "nuq3", "Table 12: per vector against none"),
    ("nuq3 1% 8 slots", "nuq3 1%", "8 slots for a key token's outliers against the nominal number"),
    ("nuq3", "nuq3 post", "Table 10: before against after RoPE"),
    ("nuq2", "nuq2 no sinks", "Table 13: one sink, 2 bits"),
    ("nuq2 1%", "nuq2", "outliers, 2 bits"),
    ("nuq3 online", "nuq3", "Table 14: online against offline key thresholds"),
    ("nuq3 1% online", "nuq3 1%", "Table 14: the same with outliers"),
    ("nuq3 1%", "nuq3 1% transfer", "Table 21: calibrated on this against another text"),
)


@functools.partial(jax.jit, static_argnames=("codecs", "rope"))
def negative_log_likelihood(model, tokens, constants, sinks, *, codecs, rope: str):
    """Sum of each window's next-token losses, [B]. `codecs` = (keys, values): functions (constants, [T, W]) -> [T,
    W]."""
    config, length = model.config, tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    query, key = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    exact = (key == query) | ((key < sinks) & (key <= query))
    coded = (key < query) & ~exact
    masks = [jnp.broadcast_to(m[None], (tokens.shape[0], length, length)) for m in (exact, coded)]

    def through(codec, fixed, x):
        flat = x.reshape(*x.shape[:2], -1)
        return jax.lax.map(lambda row: codec(fixed, row), flat).reshape(x.shape).astype(x.dtype)

    def step(h, xs):
        index, fixed = xs
        weights = decoder.layer(model.params, index)
        projected = decoder.project(weights, h, positions, config)
        turned = rotate(projected.k, positions, config)
        k = through(codecs[0], fixed["k"], turned if rope == "post" else projected.k)
        k = k if rope == "post" else rotate(k, positions, config)
        v = through(codecs[1], fixed["v"], projected.v)
        pairs = ((turned, projected.v), (k, v))
        parts = [segment_attention(projected.q, *pair, mask) for pair, mask in zip(pairs, masks, strict=True)]
        return decoder.finish(weights, h, merge(*parts), config), None

    xs = (jnp.arange(config.num_layers), constants)
    h, _ = jax.lax.scan(step, decoder.embed(model.params, tokens), xs)
    logits = decoder.unembed(model.params, h[:, :-1], config)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).sum(-1)


@functools.cache
def round_trips(method, width: int):
    """Encode-then-decode of the method's keys and values."""

    def make(spec):
        codec = spec.build(width)
        return lambda fixed, x: codec.decode(fixed, codec.encode(fixed, x))

    return make(method.layer.key), make(method.layer.value)


@functools.cache
def online_keys(fraction: float, width: int, bits: int):
    """Keys with thresholds from the window itself, which no cache could have: the paper's online scales."""
    codec = kvquant(bits=bits, outliers=fraction).layer.key.build(width)

    def encode(fixed, x):
        quantiles = jnp.quantile(x, jnp.asarray([1 - fraction / 2, fraction / 2]), axis=0)
        fixed = fixed | {"upper": quantiles[0], "lower": quantiles[1]}
        return codec.decode(fixed, codec.encode(fixed, x))

    return encode


def matrix_keys(fixed, x):
    """Keys whose outliers are the layer's largest entries, whatever their channel, all kept exactly."""
    outside = (x > fixed["matrix"][0]) | (x < fixed["matrix"][1])
    centre, scale = (fixed["upper"] + fixed["lower"]) / 2, (fixed["upper"] - fixed["lower"]) / 2
    u = (x - centre[None]) / jnp.maximum(scale, 1e-9)[None]
    dense = look_up(nearest(u, fixed["signposts"]), fixed["signposts"]) * scale[None] + centre[None]
    return jnp.where(outside, x, dense)


def matrix_range(x, bounds):
    """Outlier mask of a layer's values, and each token's centre and half range without them."""
    outside = (x > bounds[0]) | (x < bounds[1])
    high = jnp.where(outside, -jnp.inf, x).max(-1, keepdims=True)
    low = jnp.where(outside, jnp.inf, x).min(-1, keepdims=True)
    return outside, (high + low) / 2, (high - low) / 2


def matrix_values(fixed, x):
    outside, centre, scale = matrix_range(x, fixed["matrix"])
    codes = nearest((x - centre) / jnp.maximum(scale, 1e-9), fixed["signposts"])
    return jnp.where(outside, x, look_up(codes, fixed["signposts"]) * scale + centre)


def matrix_constants(model, tokens, sinks: int, bits: int, fraction: float = 0.01):
    """Thresholds over each layer's whole matrix, channel ranges and signposts of what lies inside, on calibration
    text."""
    cached = [activations(model.params, jnp.asarray(row)[None], model.config) for row in tokens]
    merged = [jnp.concatenate([getattr(c, name)[:, 0, sinks:] for c in cached], 1) for name in cached[0]._fields]
    layers = []
    for k, v, k_fisher, v_fisher in zip(*merged, strict=True):
        entry = {}
        for name, x, fisher in (("k", k, k_fisher), ("v", v, v_fisher)):
            bounds = jnp.quantile(x.ravel(), jnp.asarray([1 - fraction / 2, fraction / 2]))
            outside, centre, scale = matrix_range(x, bounds)
            entry[name] = {"matrix": bounds}
            if name == "k":
                upper, lower = jnp.where(outside, -jnp.inf, x).max(0), jnp.where(outside, jnp.inf, x).min(0)
                entry[name] |= {"upper": upper, "lower": lower}
                centre, scale = (upper + lower)[None] / 2, (upper - lower)[None] / 2
            u = (x - centre) / jnp.maximum(scale, 1e-9)
            hist = kmeans.histogram(u.ravel(), (fisher * scale**2).ravel(), ~outside.ravel())
            entry[name]["signposts"] = kmeans.weighted_kmeans(jax.tree.map(lambda a: a[None], hist), 2**bits)[0]
        layers.append(entry)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def variants(model, tokens, other) -> dict[str, Callable]:
    """Every row by name: a function that gives (constants, codecs, rope, sinks), calibrated when it is called."""
    width = model.config.kv_width
    dense = functools.partial(kvquant, outliers=0.0)

    @functools.cache
    def calibrated(method, objective: str = "fisher_s2", foreign: bool = False):
        text = other if foreign else tokens
        constants = calibrate(model, method, text, recipe=Recipe(objective=objective)).constants[0]
        return constants, round_trips(method, width), method.layer.rope, method.sinks

    def fixed(datatype: str):
        """The thresholds and path of nuq3, other signposts."""
        constants, *rest = calibrated(dense(bits=3))
        table = jnp.broadcast_to(fixed_signposts(datatype, 3)[None], constants["v"]["signposts"].shape)
        return {name: group | {"signposts": table} for name, group in constants.items()}, *rest

    def online(method, fraction: float):
        constants, (_, values), *rest = calibrated(method)
        return constants, (online_keys(fraction, width, 3), values), *rest

    make = functools.partial
    return {
        "nuq3": make(calibrated, dense(bits=3)),
        "nuq3 F only": make(calibrated, dense(bits=3), "fisher"),
        "nuq3 unweighted": make(calibrated, dense(bits=3), "none"),
        "nf3": make(fixed, "nf"),
        "int3": make(fixed, "int"),
        "nuq3 1%": make(calibrated, kvquant(bits=3)),
        "nuq3 1% transfer": make(calibrated, kvquant(bits=3), foreign=True),
        "nuq3 1% 8 slots": make(calibrated, kvquant(bits=3, slots=8)),
        "nuq3 post": make(calibrated, dense(bits=3, rope="post")),
        "nuq3 online": make(online, dense(bits=3), 0.0),
        "nuq3 1% online": make(online, kvquant(bits=3), 0.01),
        "nuq3 matrix 1%": lambda: (matrix_constants(model, tokens, 1, 3), (matrix_keys, matrix_values), "pre", 1),
        "nuq2": make(calibrated, dense(bits=2)),
        "nuq2 no sinks": make(calibrated, dense(bits=2, sinks=0)),
        "nuq2 1%": make(calibrated, kvquant(bits=2)),
    }


def same(fixed, x):
    return x


def measure(model, windows, row, batch: int) -> np.ndarray:
    """Mean loss per token of each window with one row's cache."""
    constants, codecs, rope, sinks = row
    parts = [
        negative_log_likelihood(model, jnp.asarray(piece), constants, jnp.int32(sinks), codecs=codecs, rope=rope)
        for piece in np.split(windows, len(windows) // batch)
    ]
    return np.concatenate([np.asarray(p, np.float64) for p in parts]) / (windows.shape[1] - 1)


def resumed(folder: Path, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The losses of one row, from the folder when an earlier run left them there."""
    path = folder / f"{name.replace(' ', '-').replace('%', '')}.npy"
    if not path.exists():
        found = compute()
        np.save(path, found)
        print(f"{name}: {found.mean():.4f}", flush=True)
    return np.load(path)


def summary(losses: list[dict[str, np.ndarray]]) -> dict:
    """Per row the loss beyond the exact cache's, and per comparison the difference with its standard error, 1e-3
    nat."""
    rows = {name: [1e3 * float((loss[name] - loss["exact"]).mean()) for loss in losses] for name in losses[0]}
    pairs = []
    for better, worse, about in PAIRS:
        gains = [1e3 * (loss[worse] - loss[better]) for loss in losses]
        cells = [(float(g.mean()), float(g.std(ddof=1) / len(g) ** 0.5)) for g in gains]
        pairs.append({"about": about, "better": better, "worse": worse, "gain_and_error": cells})
    return {"exact": float(losses[0]["exact"].mean()), "rows": rows, "pairs": pairs}


def report(console: Console, found: dict, scored: int) -> None:
    seeds = range(len(found["rows"]["exact"]))
    table = Table("cache", *(f"loss - exact, seed {i} (1e-3 nat)" for i in seeds), title=f"{scored} tokens")
    for name, cells in found["rows"].items():
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    table = Table("comparison", "paper: better", "worse", *(f"worse - better, seed {i}" for i in seeds))
    for pair in found["pairs"]:
        cells = (f"{gain:+.2f} +- {error:.2f}" for gain, error in pair["gain_and_error"])
        table.add_row(pair["about"], pair["better"], pair["worse"], *cells)
    console.print(table)


def draw(ids: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, count)
    return np.stack([ids[s : s + length] for s in starts]).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, required=True, help="calibrated on: first half; scored: second half")
    parser.add_argument("--other", type=Path, required=True, help="the other text of the transfer row")
    parser.add_argument("--out", type=Path, required=True, help="folder of the losses and the record")
    for name, default in (("windows", 100), ("length", 512), ("sequences", 16), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = kvq.load(options.model)
    texts = [path.read_text(encoding="utf-8") for path in (options.text, options.other)]
    ids, other = (np.asarray(model.tokenizer(text)["input_ids"]) for text in texts)
    half, length = len(ids) // 2, options.length
    count = min(options.windows, (len(ids) - half) // length)
    windows = ids[half : half + count * length].reshape(count, length).astype(np.int32)
    batch = 4 if count % 4 == 0 else 1
    nothing = ({"k": {}, "v": {}}, (same, same), "pre", 0)
    exact = resumed(options.out, "exact", lambda: measure(model, windows, nothing, batch))
    losses = []
    for seed in range(options.seeds):
        own, foreign = (draw(source, options.sequences, length, seed) for source in (ids[:half], other))
        losses.append({"exact": exact})
        for name, make in variants(model, own, foreign).items():
            compute = lambda make=make: measure(model, windows, make(), batch)  # noqa: E731
            losses[-1][name] = resumed(options.out, f"{name} seed {seed}", compute)
    scored = count * (length - 1)
    found = summary(losses)
    report(Console(width=150), found, scored)
    about = {"model": options.model, "tokens": scored, "window": length, "sequences": options.sequences}
    about |= {"text": options.text.name, "other": options.other.name, "jax": jax.__version__}
    (options.out / "kvquant_ablation.json").write_text(json.dumps({"about": about} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
