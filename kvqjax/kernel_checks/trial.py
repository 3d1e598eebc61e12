"""Bodies to try a kernel on, filled by the cache's own encoder, and two ways to attend to them
through the very functions that decoding uses: by the kernel and by the plain path.

Keys and values are signed, with an offset for every channel, every 17th channel ten times as large,
and a few single outliers. Rows are full, ragged, nearly empty and empty; the last tile is partly
filled. Queries are rounded to bfloat16 beforehand, as kernels do, so that both sides get the
same."""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._timing import alternating_seconds
from kvqjax.cache.append import at_layer, commit
from kvqjax.cache.attention import attend_body, attend_tokens
from kvqjax.cache.layout import CacheLayout, Pool, RunLayout
from kvqjax.cache.pages import with_pages
from kvqjax.cache.runs import page_for, runs_of
from kvqjax.cache.state import Cache, allocate_cache
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.kernel_checks.compare import Attention, Speed
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.model.config import KVShape
from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.dispatch import at_once
from kvqjax.pallas_kernels.forms import BY_TABLE, OFF, KernelForm, Kernels, form_of
from kvqjax.pallas_kernels.klt import KltSpec

ROWS = 4  # full, ragged, nearly empty and empty
SINKS = 4  # so that a body token's number is not its position
QUERY = 0.25  # standard deviation of queries at first
# By how much a log-sum-exp may exceed that of equal scores: half the variance of normal scores,
# which is then at most 1. A product of 16-bit numbers rounds each term by 2^-9 of it. So scores are
# off by about 2^-9 / sqrt(3) of their deviation, and the worst of some hundred by three to four
# times that: 0.4 %, below half of what `compare.MOST` allows. With 1.5, KIVI's kernel for 3 bits
# reached 1.14 % on an H100.
SPREAD = 0.5
HALVINGS = 10  # of queries, until that holds
ROUNDS = 5  # of a timing
CALLS = 8  # how often a round attends
LENGTHS = (1, 3)  # new tokens of a call
# Rows of a timing. Bodies of 8192 tokens and 8 KV heads of 128 channels, at 2.25 bits a number,
# then have 151 MB together. Like the bodies of all layers of a model, that is more than any chip's
# second-level cache holds (H100 50 MB, B200 126 MB).
TIMED_ROWS = 32


class Candidate(NamedTuple):
    """A layer whose kernel is to be tried: its kernel form (None where only the plain path reads
    it), its layer spec and its shape."""

    form: KernelForm | None
    spec: LayerSpec
    shape: KVShape

    @property
    def name(self) -> str:
        """Name what a verdict is kept under: all that a compiled kernel depends on, but for the
        body's size."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        heads = f"{shape.num_kv_heads} KV heads of {shape.head_dim}, {group} queries each"
        name = f"{self.form}, {heads}"
        packed = single_layer(self, 1, "cpu", BY_TABLE).packed
        if isinstance(packed.spec, KltSpec):
            return f"{name}, levels {packed.spec.levels_text}"
        key_slots = getattr(packed.spec, "key_slots", 0)
        value_slots = getattr(packed.spec, "value_slots", 0)
        if key_slots or value_slots:
            return f"{name}, {key_slots} and {value_slots} outliers"
        return name


class _Single(NamedTuple):
    """A layout, and how its body is read while packed."""

    layout: CacheLayout
    packed: Any


def single_layer(
    candidate: Candidate, capacity: int, target: str, kernels: Kernels, stored: str = "planes"
) -> _Single:
    """Return the layout of a cache of one layer of `candidate`, and how its body is read while
    packed."""
    layout = CacheLayout(
        shape=candidate.shape,
        method=Method(name="trial", layer=candidate.spec, sinks=SINKS),
        capacity=capacity,
        dtype="bfloat16",
        form=stored,
        target=target,
        kernels=kernels,
    )
    return _Single(layout, runs_of(layout)[0].wiring.fast.packed)


def candidates(layout: CacheLayout) -> list[Candidate | None]:
    """Return what to try for every run of a layout; None where no kernel reads its body on the
    layout's target. Bodies are taken in planes."""
    planes = dataclasses.replace(layout, form="planes", kernels=BY_TABLE)
    specs = layout.method.layers(layout.shape)
    out: list[Candidate | None] = []
    for run in runs_of(planes):
        packed = run.wiring.fast.packed
        group = run.shape.num_heads // run.shape.num_kv_heads
        # A ring and a body that evicts tokens are read block by block, never by a kernel.
        readable = packed is not None and not run.wraps and layout.method.keep is None
        if readable and at_once(packed.spec, group):
            # Without a window, the trial's body is no ring.
            shape = dataclasses.replace(run.shape, sliding_window=None, chunked=False)
            out.append(Candidate(form_of(packed.spec), specs[run.first], shape))
        else:
            out.append(None)
    return out


class Trial(NamedTuple):
    """A filled cache of one layer, its weights and constants."""

    cache: Cache
    weights: dict
    constants: dict

    @property
    def run(self) -> RunLayout:
        return runs_of(self.cache.layout)[0]


def made_up(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return a random constant of this name and shape that a codec can work with, quickly made."""
    match name:
        case "upper":
            return random.uniform(4, 12, shape)
        case "lower":
            return random.uniform(-12, -4, shape)
        case "signposts":
            # Codes are indices of signposts in ascending order.
            return np.sort(random.uniform(-1, 1, shape))
        case "scale":
            return random.uniform(0.5, 2, shape)
        case "mean":
            return random.normal(size=shape)
        case "keys" | "values":
            # Rotations.
            return np.linalg.qr(random.normal(size=shape))[0]
    # Any other constant may be any numbers: normal ones that keep the size of what a matrix
    # multiplies, with variance one over the second last axis.
    return random.normal(size=shape) * shape[-2] ** -0.5


def _constants(run: RunLayout, dtype: str, random: np.random.Generator) -> dict:
    """Make up the calibrated constants of one layer, [1, ...] each."""

    def array(name: str, about):
        return jnp.asarray(made_up(name, about.shape, random), about.dtype)

    constants = {}
    for group, names in run.wiring.constants(1, dtype).items():
        constants[group] = {name: array(name, about) for name, about in names.items()}
    return constants


def _weights(shape: KVShape, dtype: str, random: np.random.Generator) -> dict:
    """Make up what reading a body asks of a layer's weights: dtypes of the projections, and
    biases."""
    weights = {"k": jnp.zeros((), dtype), "v": jnp.zeros((), dtype)}
    if shape.qkv_bias:
        for name in ("k_bias", "v_bias"):
            weights[name] = jnp.asarray(0.3 * random.normal(size=shape.kv_width), dtype)
    return weights


def _sources(
    run: RunLayout, rows: int, tokens: int, dtype: str, random: np.random.Generator
) -> dict:
    """Make up the vectors of `rows` rows of `tokens` tokens that the method stores."""
    sources = {}
    for name, width in run.wiring.storage.sources.items():
        x = random.normal(size=(1, rows, tokens, width))
        x[..., ::17] *= 10
        x += random.normal(size=width) * (1.5 if name == "v" else 3.0)
        x[random.random(x.shape) < 1e-4] *= 5
        sources[name] = jnp.asarray(x, dtype)
    return sources


def make(
    candidate: Candidate,
    tokens: int,
    target: str,
    kernels: Kernels,
    stored: str = "planes",
    seed: int = 0,
    dtype: str = "bfloat16",
    pages: bool = False,
) -> Trial:
    """Fill a cache of one layer with up to `tokens` tokens a row, in rows that are full, ragged,
    nearly empty and empty. With `pages` their bodies lie in pages of a pool, in no order."""
    random = np.random.default_rng(seed)
    length = SINKS + tokens
    layout = single_layer(candidate, length, target, kernels, stored).layout
    layout = dataclasses.replace(layout, dtype=dtype)
    if pages:
        page = page_for(layout)
        layout = dataclasses.replace(layout, pool=Pool(ROWS * -(-tokens // page), page))
    run = runs_of(layout)[0]
    clock = run.wiring.storage.clocks[0]
    # 13 more tokens than five eighths, so that a row ends within a unit and within a tile.
    ragged = length * 5 // 8 + 13
    # The fewest tokens of which a unit is encoded, and one more.
    nearly_empty = SINKS + clock.window + clock.unit + 1
    counts = jnp.asarray([length, ragged, nearly_empty, SINKS], jnp.int32)
    constants = _constants(run, layout.dtype, random)
    pending = (_sources(run, ROWS, length, layout.dtype, random),)
    cache = allocate_cache(layout, ROWS)
    if cache.pages is not None:
        cache = with_pages(cache, random.permutation(cache.pages.size).reshape(cache.pages.shape))
    cache = jax.jit(commit)(cache, pending, counts, (constants,))
    return Trial(cache, _weights(candidate.shape, layout.dtype, random), constants)


def full(trial: Trial, tokens: int, rows: int) -> Trial:
    """Return the trial with `rows` bodies of `tokens` tokens: the trial's first row, over and over.
    Bodies of zeros would take less power, and a chip that takes less power may run faster."""
    layout = dataclasses.replace(trial.cache.layout, capacity=SINKS + tokens)
    cache = allocate_cache(layout, rows)
    run = runs_of(layout)[0]
    units = [tokens // clock.unit for clock in run.wiring.storage.clocks]
    flushed = tuple(jnp.full((cache.batch,), count, jnp.int32) for count in units)
    lengths = jnp.full((cache.batch,), SINKS + tokens, jnp.int32)
    filled = jax.tree.map(_repeated, cache.runs[0].body, trial.cache.runs[0].body)
    runs = (cache.runs[0].replace(flushed=flushed, body=filled),)
    return trial._replace(cache=cache.replace(runs=runs, lengths=lengths))


def _repeated(target: jax.Array, source: jax.Array) -> jax.Array:
    """Fill an array of `target`'s shape with the first row of `source`, over and over along every
    axis. Any word, scale or outlier of an encoded body may stand for any token."""
    # Not every backend gathers 4-bit numbers.
    wide = jnp.int8 if source.dtype == jnp.int4 else source.dtype
    x = source[:, :1].astype(wide)
    for axis, size in enumerate(target.shape):
        if x.shape[axis] != size:
            x = jnp.take(x, jnp.arange(size) % x.shape[axis], axis=axis)
    return x.astype(source.dtype)


def _in_layer(trial: Trial, q: jax.Array) -> tuple[LayerView, NewTokens]:
    """View the trial's layer, and new tokens with the queries `q`, [B, T, H, D]."""
    run = trial.run
    cache = trial.cache
    batch, length = q.shape[:2]
    positions = cache.lengths[:, None] + jnp.arange(length)[None]
    tokens = NewTokens(positions, jnp.full((batch,), length, jnp.int32), cache.lengths - SINKS)

    # In bfloat16 first, so that the precise path gets the same numbers.
    new = {}
    for name, width in run.wiring.storage.sources.items():
        x = jax.random.normal(jax.random.key(width), (batch, length, width), jnp.bfloat16)
        new[name] = x.astype(q.dtype)
    constants = at_layer(trial.constants, 0)
    view = LayerView(
        run, cache.runs[0], jnp.int32(0), trial.weights, constants, new, SINKS, pages=cache.pages
    )
    return view, tokens


def _attend_to_body(trial: Trial, q: jax.Array) -> Partial:
    """Attend with new tokens' queries [B, T, H, D] to the body alone, in the way that the cache's
    layout names."""
    view, tokens = _in_layer(trial, q)
    return attend_body(q, view, tokens, {})[0]


def _attend(trial: Trial, q: jax.Array) -> Partial:
    """Attend as the check of a kernel does: to the body alone, but for exact bodies, whose kernels
    take the tokens beside the body as well. There all are attended to."""
    codecs = trial.run.wiring.storage.codecs.values()
    is_exact = all(codec.lossless for codec in codecs)
    if is_exact and family(trial.cache.layout.target) != "cpu":
        view, tokens = _in_layer(trial, q)
        return attend_tokens(q, view, tokens, False, {}, {})[0]
    return _attend_to_body(trial, q)


_attend_compiled = jax.jit(_attend)
_to_body_compiled = jax.jit(_attend_to_body)


@jax.jit
def _precisely(trial: Trial, q: jax.Array) -> Partial:
    """Attend in float32 throughout. A TPU's matrix unit rounds float32 to bfloat16 unless it is
    told not to."""
    with jax.default_matmul_precision("highest"):
        return _attend(trial, q.astype(jnp.float32))


def by_kernel(trial: Trial) -> Attention:
    """Return attention as decoding does it: a function of the queries."""
    return functools.partial(_attend_compiled, trial)


def of_body(trial: Trial) -> Attention:
    """Return attention to the body alone, as the cache's layout names: a function of the
    queries."""
    return functools.partial(_to_body_compiled, trial)


def by_plain_path(trial: Trial) -> Attention:
    """Return attention to the same arrays without a kernel, in float32."""
    layout = dataclasses.replace(trial.cache.layout, kernels=OFF)
    return functools.partial(_precisely, trial._replace(cache=trial.cache.replace(layout=layout)))


def queries(trial: Trial, lengths: tuple[int, ...] = LENGTHS) -> list[jax.Array]:
    """Make queries [B, T, H, D] for every T of `lengths` that the kernel takes. They are so short
    that no token takes all the weight: with larger scores the plain path's own rounding would be a
    matter of percents."""
    run = trial.run
    shape = run.shape
    packed = run.wiring.fast.packed
    group = shape.num_heads // shape.num_kv_heads
    random = np.random.default_rng(1)
    plain = by_plain_path(trial)
    # The log-sum-exp of a full row's equal scores, and what SPREAD allows beyond it.
    most = np.log(run.slots) + SPREAD
    out = []
    for length in lengths:
        if packed is None or not at_once(packed.spec, group, length):
            continue
        size = (trial.cache.batch, length, shape.num_heads, shape.head_dim)
        q = jnp.asarray(random.normal(scale=QUERY, size=size), jnp.bfloat16)
        for _ in range(HALVINGS):
            if float(plain(q).lse.max()) <= most:
                break
            q = q * jnp.bfloat16(0.5)
        out.append(q)
    return out


@functools.partial(jax.jit, static_argnames="inner")
def _chain(trial: Trial, q: jax.Array, *, inner: int) -> jax.Array:
    """Attend `inner` times, each call fed by the one before so that none can be left out. The query
    hardly changes."""

    def step(_, x):
        return q + (1e-3 * _attend(trial, x).out).astype(q.dtype)

    return jax.lax.fori_loop(0, inner, step, q)


def decoding(trial: Trial, inner: int) -> Callable[[], jax.Array]:
    """Return a call that attends `inner` times with one new token a row."""
    shape = trial.cache.layout.shape
    q = jnp.ones((trial.cache.batch, 1, shape.num_heads, shape.head_dim), jnp.bfloat16)
    return functools.partial(_chain, trial, q, inner=inner)


def speed(kernel: Trial, plain: Trial, tokens: int) -> Speed:
    """Measure the median milliseconds of a call with one new token on TIMED_ROWS bodies of `tokens`
    tokens, both sides in turn."""
    sides = [decoding(full(trial, tokens, TIMED_ROWS), CALLS) for trial in (kernel, plain)]

    def milliseconds(spent: list[float]) -> float:
        """Give the time of a call; a round has CALLS of them."""
        return 1e3 * statistics.median(spent) / CALLS

    kernel_seconds, plain_seconds = alternating_seconds(sides, ROUNDS)
    return Speed(milliseconds(kernel_seconds), milliseconds(plain_seconds))
