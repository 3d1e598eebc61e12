"""The TPU kernel on packed latents, interpreted, against decoding the latents, making every key and
attending exactly; and the caches that take it."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    BATCH,
    LLAMA31_8B,
    _stored,
    check_equal,
    check_outputs,
    check_second_row_sees_nothing,
    in_pages,
    path,
    vectors,
)

from kvqjax.codecs.uniform import Uniform
from kvqjax.methods import parse
from kvqjax.model.config import ModelConfig
from kvqjax.model.decoder import heads, norm
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import blockwise_attention
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.tpu import latents as tpu_latents
from kvqjax.pallas_kernels.tpu.call import BY_TOKEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    bits: int
    kv_heads: int
    head_dim: int
    group: int  # query heads per KV head
    rank: int
    slots: int
    stretches: int
    length: int = 1
    qk_norm: bool = False
    target: str = "v6e"

    @property
    def config(self) -> ModelConfig:
        shape = {
            "num_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return ModelConfig(
            vocab_size=8, width=self.rank, mlp_width=8, num_layers=1, qk_norm=self.qk_norm, **shape
        )


# One case a token order: halves of words (v5e), rotated in two slices a stretch; nibbles; and plane
# sets of two widths, with so many query rows that minima are summed apart. The last tile of the
# first two reaches beyond the array.
HALVES = Case(
    bits=4,
    kv_heads=2,
    head_dim=128,
    group=4,
    rank=128,
    slots=768,
    stretches=3,
    length=2,
    qk_norm=True,
    target="v5e",
)
NIBBLES = Case(
    bits=2, kv_heads=4, head_dim=64, group=2, rank=256, slots=1536, stretches=3, qk_norm=True
)
TWO_SETS = Case(
    bits=3,
    kv_heads=4,
    head_dim=64,
    group=4,
    rank=256,
    slots=1024,
    stretches=1,
    length=3,
    target="v7x",
)
RUNS = [(HALVES, 512), (NIBBLES, 1024), (TWO_SETS, 1024)]


@functools.cache
def drawn(case: Case):
    """(spec, body, weights, queries, start, stop, positions [B,S], latents x and y [B,S,R]);
    signed, with offsets and outlying channels, rows of which one ends inside a group and one starts
    late."""
    rng = np.random.default_rng(0)
    wide = SimpleNamespace(slots=case.slots, kv_heads=1, head_dim=case.rank)
    parts = []
    for along, offset in (("tokens", 3.0), ("channels", 0.5)):
        codec = Uniform(bits=case.bits, along=along, group=128).build(case.rank)
        parts.append(_stored(codec, vectors(rng, wide, offset)))
    (k, x), (v, y) = parts
    packed = parse(f"xquant:bits={case.bits},latent=true").layer.build(case.config).fast.packed
    up = rng.normal(size=(case.rank, case.config.kv_width)) * case.rank**-0.5 / 4
    weights = {
        "k": jnp.asarray(up, jnp.bfloat16),
        "k_bias": jnp.asarray(rng.normal(size=case.config.kv_width)),
    }
    if case.qk_norm:
        weights["k_norm"] = jnp.asarray(1 + 0.3 * rng.normal(size=case.head_dim), jnp.float32)
    first = jnp.asarray([7, 3000, 900][: case.stretches])
    stored = {"k": dict(zip(("codes", "scale", "low"), (k[0], (k[1],), (k[2],)), strict=True))}
    stored["v"] = dict(zip(("codes", "scale", "low"), (v[0], (v[1],), (v[2],)), strict=True))
    body = packed.body(weights, {"k": {"up": weights["k"]}}, stored, first)
    q = rng.normal(size=(BATCH, case.length, case.kv_heads * case.group, case.head_dim))
    later = np.arange(case.length)
    stop = jnp.asarray(np.stack([case.slots // 2 + 45 + later, case.slots - 8 + later]), jnp.int32)
    start = jnp.asarray(np.stack([0 * later, case.slots // 3 + later]), jnp.int32)
    positions = (first[:, None] + jnp.arange(case.slots // case.stretches)[None]).reshape(1, -1)
    spec = dataclasses.replace(packed.spec, target=case.target)
    return (
        spec,
        body,
        weights,
        jnp.asarray(q, jnp.float32),
        start,
        stop,
        jnp.tile(positions, (BATCH, 1)),
        x,
        y,
    )


def oracle(case: Case):
    """Exact attention over rematerialised keys with the decoded value latents as values, and the
    keys."""
    _, body, weights, q, start, stop, positions, x, y = drawn(case)
    k = heads(x @ body.up.astype(jnp.float32) + weights["k_bias"][None, None], case.kv_heads)
    k = norm(k, weights["k_norm"], case.config.norm_eps) if case.qk_norm else k
    k = rotate(k, positions, case.config)
    slot = jnp.arange(case.slots)[None, None]
    mask = (slot >= start[..., None]) & (slot < stop[..., None])

    def read(j, carry):
        return (k, y[:, :, None], mask, carry)

    return blockwise_attention(q, case.kv_heads, read, jnp.int32(0), jnp.int32(1), None, case.rank)[
        0
    ], k


def near(case: Case, got):
    """Rounded to bfloat16, 2^-9 relative at most: queries and keys (a score is off by 2^-8 |q||k|
    D^-1/2), latents (2^-9 |q| times what the absolute values of latents and up-projection give,
    less than |q| |x| |up| D^-1/2, |up| its spectral norm; a norm after it scales both alike),
    squares of the norm (2^-10 of a score). Weights: 2^-9 of the output, which scores move by
    e^error - 1. Outputs are compared query by query: within 3 %, not 1 %, since one group of 128
    channels holds the outlying ones, so that weights rounded to 2^-9 are summed with steps from the
    minimum many times as large as the values."""
    want, k = oracle(case)
    _, body, _, q, _, _, _, x, _ = drawn(case)
    size = float(jnp.linalg.norm(q, axis=-1).max()) / case.head_dim**0.5
    keys = float(jnp.linalg.norm(k, axis=-1).max())
    latents = float(
        jnp.linalg.norm(x, axis=-1).max() * jnp.linalg.norm(body.up.astype(jnp.float32), 2)
    )
    bound = size * (2.0**-8 * keys + 2.0**-9 * (keys if case.qk_norm else latents))
    np.testing.assert_allclose(got.lse, want.lse, atol=bound, rtol=0)
    check_outputs(got.out, want.out, most=0.03)


@functools.cache
def run(case: Case, tile: int, interpret):
    return jax.jit(
        lambda *given: tpu_latents.packed_attention(
            *given, drawn(case)[0], tile=tile, interpret=interpret
        )
    )


@pytest.mark.parametrize(
    ("case", "tile"), with_nightly(RUNS, [(TWO_SETS, 1024)]), ids=["halves", "nibbles", "two sets"]
)
def test_kernel_equals_the_oracle(case, tile):
    _, body, _, q, start, stop, *_ = drawn(case)
    near(case, run(case, tile, True)(q, body, jnp.int32(1), start, stop))


@pytest.mark.nightly
def test_race_free_on_simulated_memory():
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    case = dataclasses.replace(HALVES, slots=512, stretches=2, length=1)
    _, body, _, q, start, stop, *_ = drawn(case)
    near(case, run(case, 256, params)(q, body, jnp.int32(1), start, stop))


def test_pages_are_read_where_they_lie():
    """Tile by tile the same numbers, so that not a bit differs."""
    spec, body, _, q, start, stop, *_ = drawn(NIBBLES)
    stored, pages = in_pages(body.stored, 512, BY_TOKEN, int(stop[0].max()))
    call = functools.partial(tpu_latents.packed_attention, spec=spec, tile=512, interpret=True)
    got = jax.jit(call)(q, body._replace(stored=stored), jnp.int32(1), start, stop, pages=pages)
    check_equal(got, run(NIBBLES, 512, True)(q, body, jnp.int32(1), start, stop))


def test_rows_that_see_nothing_merge_as_nothing():
    _, body, _, q, start, stop, *_ = drawn(HALVES)
    part = run(HALVES, 512, True)(q, body, jnp.int32(1), start, stop.at[1].set(0))
    check_second_row_sees_nothing(part)


def test_dispatch_takes_what_was_compiled():
    assert (
        path("xquant:bits=2")
        == path("xquant:bits=3", target="v5e")
        == path("xquant:bits=4", target="v7x")
        == "tpu"
    )
    normed = dataclasses.replace(LLAMA31_8B, qk_norm=True)
    assert path("xquant:bits=4", normed) == path("xquant:bits=4", normed, target="v5e") == "tpu"
    assert path("xquant:bits=2", normed) == "reference"
    small = dataclasses.replace(LLAMA31_8B, width=2048, head_dim=64)
    assert path("xquant:bits=4", small) == "tpu"
    assert path("xquant:bits=2", small) == "reference"
    assert path("xquant:bits=8") == path("xquant:bits=2,group=64") == "reference"
    assert (
        path("xquant:bits=2", target="cpu") == path("xquant:bits=2", target="sm90") == "reference"
    )
    assert path("xquant:bits=2", group=32) == "tpu"  # four calls of eight rows
    assert path("xquant:bits=2", group=65) == "reference"
    assert path("xquant:bits=4,value_bits=2") == "reference"
    assert path("xquant:bits=2,outliers=1") is path("xquant:bits=16") is None


def test_a_program_for_a_tpu_falls_back_where_there_is_none():
    """The spec of a cache for a TPU, run here: the caller's own computation."""
    spec, body, _, q, start, stop, *_ = drawn(TWO_SETS)
    want = oracle(TWO_SETS)[0]
    got = dispatch.packed_attention(q, body, 1, start, stop, spec, lambda: want)
    np.testing.assert_array_equal(got.out, want.out)
