"""The TPU kernel on HIGGS bodies, interpreted, against decoding everything and attending exactly;
and the caches that take it."""

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
    QUERY,
    QUICK,
    check_equal,
    check_outputs,
    check_second_row_sees_nothing,
    in_pages,
    packed_codes,
    path,
    vectors,
)
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import parse
from kvqjax.cache import layout as reading
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.codecs.higgs import Higgs
from kvqjax.model.config import ModelConfig
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import segment_attention
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.tpu import higgs as tpu_higgs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    bits: int
    kv_heads: int
    head_dim: int
    group: int  # query heads per KV head
    slots: int
    stretches: int
    scaled: str = "auto"  # channels that share a scale
    length: int = 1
    target: str = "v6e"

    @property
    def config(self) -> ModelConfig:
        shape = {
            "num_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return ModelConfig(vocab_size=8, width=64, mlp_width=8, num_layers=1, **shape)


# All heads share a scale, and the last tile reaches beyond the array; a scale per head, two plane
# sets, several steps for each chunk of tokens; a grid of two registers of lanes, several groups of
# heads; many query rows as float32, with the smallest chunks.
SHARED = Case(bits=2, kv_heads=2, head_dim=128, group=4, slots=768, stretches=3)
HEADS = Case(
    bits=3,
    kv_heads=12,
    head_dim=64,
    group=1,
    scaled="head",
    slots=512,
    stretches=1,
    length=2,
    target="v5e",
)
LARGE = Case(
    bits=4, kv_heads=4, head_dim=64, group=2, scaled="128", slots=512, stretches=2, target="v7x"
)
MANY = Case(
    bits=2, kv_heads=2, head_dim=128, group=8, slots=512, stretches=2, length=3, target="v5p"
)
RUNS = [(SHARED, 512), (HEADS, 512), (LARGE, 256), (MANY, 512)]


@functools.cache
def drawn(case: Case):
    """(spec, body, queries, start, stop, keys as attended and values [B,S,K,D]); signed, with
    offsets and outlying channels, rows of which one ends inside a chunk and one starts late."""
    rng, config = np.random.default_rng(0), case.config
    packed = parse(f"higgs:bits={case.bits},group={case.scaled}").layer.build(config).fast.packed
    wide = SimpleNamespace(slots=case.slots, kv_heads=case.kv_heads, head_dim=case.head_dim)
    codec = Higgs(bits=case.bits, group=packed.spec.group).build(config.kv_width)
    stored, decoded = {}, {}
    for name, offset in (("k", 1.0), ("v", 0.5)):
        encode, decode = (
            jax.jit(f, compiler_options=QUICK)
            for f in (jax.vmap(codec.encode, (None, 0)), codec.decode)
        )
        payload = encode({}, vectors(rng, wide, offset))
        fields = {"codes": packed_codes(np.asarray(payload["codes"]), codec.fields["codes"].bits)}
        fields |= {"scale": (np.asarray(to_bits(payload["scale"])),)}
        stored[name] = jax.tree.map(lambda a: jnp.asarray(np.stack([np.zeros_like(a), a])), fields)
        decoded[name] = decode({}, payload).reshape(BATCH, case.slots, case.kv_heads, case.head_dim)
    first = jnp.asarray([7, 3000, 900][: case.stretches])
    positions = (first[:, None] + jnp.arange(case.slots // case.stretches)[None]).reshape(1, -1)
    keys = rotate(decoded["k"], jnp.tile(positions, (BATCH, 1)), config)
    q = jnp.asarray(
        rng.normal(scale=QUERY, size=(BATCH, case.length, config.num_heads, case.head_dim)),
        jnp.float32,
    )
    later = np.arange(case.length)
    stop = jnp.asarray(np.stack([case.slots // 2 + 45 + later, case.slots - 8 + later]), jnp.int32)
    start = jnp.asarray(np.stack([0 * later, case.slots // 3 + later]), jnp.int32)
    spec = dataclasses.replace(packed.spec, target=case.target)
    return spec, packed.body({}, stored, first), q, start, stop, keys, decoded["v"]


def oracle(case: Case):
    *_, q, start, stop, keys, values = drawn(case)
    slot = jnp.arange(case.slots)[None, None]
    return segment_attention(q, keys, values, (slot >= start[..., None]) & (slot < stop[..., None]))


def near(case: Case, got):
    """Rounded to bfloat16, 2^-9 relative at most: the queries, sums and differences of grid
    numbers, keys transformed within heads, the table of cos and sin, and the two products: six
    times 2^-9 of the products of a query with the transformed heads that share its scale. By
    Cauchy-Schwarz those are at most sqrt(n) |q| times the norm of all n, and the transform between
    heads, which the keys still lack, is sqrt(n) long: |q| |all keys of the group| D^-1/2.
    Weights: 2^-9 of the output, which scores move by e^error - 1; outputs are compared query by
    query."""
    want, (spec, _, q, *_, keys, _) = oracle(case), drawn(case)
    grouped = keys.reshape(BATCH, case.slots, -1, spec.group)
    size = (
        float(jnp.linalg.norm(q, axis=-1).max() * jnp.linalg.norm(grouped, axis=-1).max())
        / case.head_dim**0.5
    )
    np.testing.assert_allclose(got.lse, want.lse, atol=6 * 2.0**-9 * size, rtol=0)
    check_outputs(got.out, want.out)


@functools.cache
def run(case: Case, tile: int, interpret):
    return jax.jit(
        lambda *given: tpu_higgs.packed_attention(
            *given, drawn(case)[0], tile=tile, interpret=interpret
        ),
        compiler_options=QUICK,
    )


@pytest.mark.parametrize(
    ("case", "tile"), with_nightly(RUNS, [(SHARED, 512)]), ids=["shared", "heads", "large", "many"]
)
def test_kernel_equals_the_oracle(case, tile):
    _, body, q, start, stop, *_ = drawn(case)
    near(case, run(case, tile, True)(q, body, jnp.int32(1), start, stop))


@pytest.mark.nightly
def test_race_free_on_simulated_memory():
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    case = dataclasses.replace(SHARED, slots=512, stretches=2)
    _, body, q, start, stop, *_ = drawn(case)
    near(case, run(case, 256, params)(q, body, jnp.int32(1), start, stop))


@pytest.mark.nightly
@pytest.mark.parametrize("case", with_nightly([SHARED, LARGE], [SHARED]), ids=["shared", "large"])
def test_pages_are_read_where_they_lie(case):
    """Tile by tile the same numbers, so that not a bit differs."""
    case = dataclasses.replace(case, slots=1024, stretches=2)
    spec, body, q, start, stop, *_ = drawn(case)
    stored, pages = in_pages(body.stored, 512, ("key_scale", "value_scale"), int(stop[0].max()))
    call = functools.partial(tpu_higgs.packed_attention, spec=spec, tile=256, interpret=True)
    paged = body._replace(stored=stored)
    got = jax.jit(call, compiler_options=QUICK)(q, paged, jnp.int32(1), start, stop, pages=pages)
    check_equal(got, run(case, 256, True)(q, body, jnp.int32(1), start, stop))


def test_rows_that_see_nothing_merge_as_nothing():
    _, body, q, start, stop, *_ = drawn(SHARED)
    part = run(SHARED, 512, True)(q, body, jnp.int32(1), start, stop.at[1].set(0))
    check_second_row_sees_nothing(part)


def test_dispatch_takes_what_was_compiled():
    assert (
        path("higgs:bits=2") == path("higgs:bits=3") == path("higgs:bits=4", target="v7x") == "tpu"
    )
    assert path("higgs:bits=2,sinks=0,window=64") == path("higgs:bits=2", group=8) == "tpu"
    assert path("higgs:bits=2", target="v5e") == path("higgs:bits=4", target="v5p") == "tpu"
    assert path("higgs:bits=4", group=33) == "reference"
    assert path("higgs:bits=2", target="cpu") == path("higgs:bits=2", target="sm90") == "reference"
    assert path("higgs:bits=4", group=16) == "tpu"  # four calls of four rows
    assert path("higgs:bits=2", group=65) == path("higgs:bits=2,group=head") == "reference"
    assert path("higgs:bits=2,value_bits=4") == path("higgs:bits=2,scales=float32") == "reference"
    for other in ("rope=post", "seed=1", "dim=4", "centre=mean", "group=64"):
        assert path(f"higgs:bits=2,{other}") is None, other
    assert path("higgs:bits=2", dataclasses.replace(LLAMA31_8B, head_dim=96)) is None


@pytest.mark.nightly
def test_the_kernel_reads_what_the_cache_stores(monkeypatch):
    """A decoding step of a model through the kernel, and the same program where there is no TPU:
    the general path."""
    model, length = tiny(head_dim=128, num_layers=1), 500
    cache = kvq.init_cache(model, kvq.parse("higgs:bits=2,sinks=3"), 2, 515)
    _, cache = kvq.prefill(model, tokens(2, length), jnp.asarray([length, length - 200]), cache)
    for_tpu = cache.replace(layout=dataclasses.replace(cache.layout, target="v6e"))

    def logits(cache):
        def step(c):
            return kvq.forward(model, tokens(2, 1, 3), jnp.ones(2, jnp.int32), c)[0]

        return np.asarray(jax.jit(step, compiler_options=QUICK)(cache))

    plain, calls = logits(for_tpu), []

    def kernel(q, body, layer, start, stop, spec, general, trusted, recent=None):
        calls.append(spec.target)
        return tpu_higgs.packed_attention(q, body, layer, start, stop, spec, interpret=True)

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    # Kernels were compiled for more heads than these.
    monkeypatch.setattr(reading, "path", lambda *_: "tpu")
    found = logits(for_tpu)
    assert calls == ["v6e"]
    check_outputs(found, plain)
