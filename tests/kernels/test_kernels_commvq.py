"""The TPU kernel on CommVQ's codes, interpreted, against decoding the keys by the cache's own codec
and attending exactly; and the caches that take it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    BATCH,
    LLAMA31_8B,
    QUERY,
    QUICK,
    check_equal,
    check_outputs,
    check_second_row_sees_nothing,
    in_pages,
    packed_codes,
    path,
)

from kvqjax.methods import parse
from kvqjax.model.config import ModelConfig
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import blockwise_attention
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels import dispatch, support
from kvqjax.pallas_kernels.forms import KernelForm
from kvqjax.pallas_kernels.tpu import commvq as tpu_commvq


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    bits: int
    rounds: int
    levels: int = 64
    kv_heads: int
    head_dim: int
    group: int  # query heads per KV head
    stretches: int
    length: int = 1
    slots: int = 2048
    target: str = "v6e"

    @property
    def config(self) -> ModelConfig:
        shape = {
            "num_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return ModelConfig(vocab_size=8, width=64, mlp_width=8, num_layers=1, **shape)

    @property
    def wiring(self):
        return parse(
            f"commvq:bits={self.bits},rounds={self.rounds},levels={self.levels}"
        ).layer.build(self.config)


# A draft of two on halves of words; a product of three steps, four heads together; a
# draft of four whose rows are padded.
HALVES = Case(
    bits=1, rounds=3, kv_heads=2, head_dim=64, group=4, stretches=2, length=2, target="v5e"
)
MANY = Case(bits=2, rounds=9, levels=16, kv_heads=8, head_dim=16, group=2, stretches=1)
PADDED = Case(
    bits=1,
    rounds=2,
    kv_heads=3,
    head_dim=128,
    group=1,
    stretches=1,
    length=4,
    slots=1024,
    target="v7x",
)


@functools.cache
def drawn(case: Case):
    """(spec, body, queries, start, stop, positions [B,S], keys before RoPE [B,S,K,D], values
    [B,S,N], the largest sum of sizes of a key's codebook rows). Keys are signed, with outlying
    channels; tokens differ in size; row 0 ends inside a block and row 1 starts late."""
    rng, width, wiring = np.random.default_rng(0), case.config.kv_width, case.wiring
    spec = dataclasses.replace(wiring.fast.packed.spec, target=case.target)
    book = rng.normal(size=(case.rounds, case.kv_heads, case.levels, case.head_dim))
    book *= 0.5 ** np.arange(case.rounds)[:, None, None, None]
    book[..., ::17] *= 5
    constants = {"k": {"codebook": jnp.asarray(book, jnp.float32)}}
    codes = rng.integers(0, case.levels, (BATCH, case.slots, 2 * case.rounds * case.kv_heads))
    bits = rng.integers(0, 2, (BATCH, case.slots, case.bits * width))
    sizes = [
        jnp.asarray(rng.lognormal(-1, 0.7, (BATCH, 1, case.slots)), jnp.bfloat16) for _ in range(2)
    ]

    def stored(array):
        return jnp.asarray(np.stack([np.zeros_like(array), array]))  # the body's layer 1

    words = {
        "codes": tuple(stored(x.swapaxes(1, 2)) for x in packed_codes(codes, spec.bits)),
        "prescale": (stored(to_bits(sizes[0])),),
    }
    values = {
        "bits": tuple(map(stored, packed_codes(bits, 1))),
        "gain": (stored(to_bits(sizes[1])),),
    }
    first = jnp.asarray([7, 300000][: case.stretches])
    body = wiring.fast.packed.body({}, constants, {"k": words, "v": values}, first)
    payload = {"codes": jnp.asarray(codes, jnp.uint32), "prescale": sizes[0]}
    keys = (
        wiring.storage.codecs["k"]
        .decode(constants["k"], payload)
        .reshape(BATCH, case.slots, case.kv_heads, case.head_dim)
    )
    gain = jnp.swapaxes(sizes[1], 1, 2).astype(jnp.float32)
    levels = codes.reshape(BATCH, case.slots, case.rounds, 2, case.kv_heads)
    rounds, heads = (
        np.arange(case.rounds)[None, None, :, None, None],
        np.arange(case.kv_heads)[None, None, None, None],
    )
    rows = np.linalg.norm(book, axis=-1)[rounds, heads, levels].sum((2, 3))  # [B, S, K]
    largest = float((rows * np.asarray(sizes[0], np.float32).swapaxes(1, 2)).max())
    q = jnp.asarray(
        rng.normal(scale=QUERY, size=(BATCH, case.length, case.config.num_heads, case.head_dim)),
        jnp.float32,
    )
    later = np.arange(case.length)
    stop = jnp.asarray(np.stack([case.slots // 2 + 45 + later, case.slots - 8 + later]), jnp.int32)
    start = jnp.asarray(np.stack([0 * later, case.slots // 3 + later]), jnp.int32)
    positions = (first[:, None] + jnp.arange(case.slots // case.stretches)[None]).reshape(1, -1)
    return (
        spec,
        body,
        q,
        start,
        stop,
        jnp.tile(positions, (BATCH, 1)),
        keys,
        jnp.asarray(bits, jnp.float32) * gain,
        largest,
    )


def oracle(case: Case):
    """Exact attention over decoded keys with gain * bits as values, and the keys."""
    spec, _, q, start, stop, positions, keys, values, _ = drawn(case)
    k, slot = rotate(keys, positions, case.config), jnp.arange(case.slots)[None, None]
    mask = (slot >= start[..., None]) & (slot < stop[..., None])

    def read(j, carry):
        return (k, values[:, :, None], mask, carry)

    found = blockwise_attention(
        q, case.kv_heads, read, jnp.int32(0), jnp.int32(1), None, spec.value_width
    )
    return found[0], k


def near(case: Case, got):
    """Rounded to bfloat16, 2^-9 relative at most: queries and keys (a score is off by 2^-8 |q||k|
    D^-1/2) and codebook rows (2^-9 |q| times the sum of their sizes). Angles of positions up to 3e5
    are off by what float32 resolves there, 2^-6 relative to a key at most. Weights: 2^-9 of the
    output, which scores move by e^error - 1; outputs are compared query by query."""
    want, k = oracle(case)
    q, largest = drawn(case)[2], drawn(case)[-1]
    size, far = (
        float(jnp.linalg.norm(q, axis=-1).max()) / case.head_dim**0.5,
        2.0**-6 if case.stretches > 1 else 0.0,
    )
    bound = size * ((2.0**-8 + far) * float(jnp.linalg.norm(k, axis=-1).max()) + 2.0**-9 * largest)
    np.testing.assert_allclose(got.lse, want.lse, atol=bound, rtol=0)
    # Far positions: see above.
    check_outputs(got.out, want.out, most=0.01 if case.stretches == 1 else 0.02)


@functools.cache
def run(case: Case, interpret):
    call = functools.partial(tpu_commvq.packed_attention, spec=drawn(case)[0], interpret=interpret)
    return jax.jit(call, compiler_options=QUICK)


@pytest.mark.parametrize(
    "case",
    [
        HALVES,
        pytest.param(MANY, marks=pytest.mark.nightly),
        pytest.param(PADDED, marks=pytest.mark.nightly),
    ],
    ids=["halves", "many levels", "padded rows"],
)
def test_kernel_equals_the_oracle(case):
    _, body, q, start, stop, *_ = drawn(case)
    near(case, run(case, True)(q, body, jnp.int32(1), start, stop))


@pytest.mark.nightly
def test_race_free_on_simulated_memory():
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    case = dataclasses.replace(HALVES, kv_heads=2, rounds=2, length=1)
    _, body, q, start, stop, *_ = drawn(case)
    near(case, run(case, params)(q, body, jnp.int32(1), start, stop))


@pytest.mark.parametrize(
    ("slots", "page"), with_nightly([(2048, 1024), (4096, 2048)], [(2048, 1024)])
)
def test_pages_are_read_where_they_lie(slots, page):
    """Also pages of fewer words than lanes. Tile by tile the same numbers, so that not a bit
    differs."""
    case = dataclasses.replace(HALVES, slots=slots)
    spec, body, q, start, stop, *_ = drawn(case)
    paged, pages = in_pages(body, page, ("key_codes", "prescale", "gain"), int(stop[0].max()))
    call = functools.partial(tpu_commvq.packed_attention, spec=spec, interpret=True)
    got = jax.jit(call, compiler_options=QUICK)(q, paged, jnp.int32(1), start, stop, pages=pages)
    check_equal(got, run(case, True)(q, body, jnp.int32(1), start, stop))


def test_rows_that_see_nothing_merge_as_nothing():
    _, body, q, start, stop, *_ = drawn(HALVES)
    part = run(HALVES, True)(q, body, jnp.int32(1), start, stop.at[1].set(0))
    check_second_row_sees_nothing(part)


def test_dispatch_takes_what_was_compiled():
    small = dataclasses.replace(LLAMA31_8B, width=2048, head_dim=64)
    for target, bits, config in itertools.product(
        ("v5e", "v5p", "v6e", "v7x"), (1, 2), (LLAMA31_8B, small)
    ):
        taken = (
            support.lookup(KernelForm("commvq", bits, bits, config.head_dim), target) is not None
        )
        assert path(f"commvq:bits={bits}", config, target=target) == (
            "tpu" if taken else "reference"
        )
    assert path("commvq:bits=1") == "tpu"
    assert path("commvq:bits=1,rounds=7") == path("commvq:bits=1,levels=16") == "reference"
    assert (
        path("commvq:bits=1", target="cpu") == path("commvq:bits=1", target="sm90") == "reference"
    )
    assert path("commvq:bits=1", group=16) == "tpu"  # four calls of four rows
    assert path("commvq:bits=1", group=33) == "reference"
    assert path("commvq:bits=1,group=32") is None


def test_a_program_for_a_tpu_falls_back_where_there_is_none():
    """The spec of a cache for a TPU, run here: the caller's own computation."""
    spec, body, q, start, stop, *_ = drawn(PADDED)
    want = oracle(PADDED)[0]
    got = dispatch.packed_attention(q, body, 1, start, stop, spec, lambda: want)
    np.testing.assert_array_equal(got.out, want.out)
