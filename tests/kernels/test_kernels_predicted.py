"""The TPU kernel on AQUA-KV's bodies, interpreted, against the plain reconstruction and exact
attention to it; and the caches that take it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from jax.experimental.pallas import tpu as pltpu
from kernel_cache import for_chip, logits
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
)
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import layout as reading
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.methods import parse
from kvqjax.model.config import ModelConfig
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.tpu import predicted as tpu_predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    bits: int
    kv_heads: int
    head_dim: int
    group: int  # query heads per KV head
    slots: int
    stretches: int
    scaled: str = "auto"  # channels that share a scale
    first: bool = False  # the first layer, which has no maps
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

    @property
    def wiring(self):
        alone = ",key_inputs=none,value_inputs=none" if self.first else ""
        scaled = "" if self.scaled == "auto" else f",group={self.scaled}"
        return parse(f"aqua:bits={self.bits}{scaled}{alone}").layer.build(self.config)


# Four heads share a scale; two scales a token, two plane sets, float32 keys; a grid of two
# registers and no maps.
SHARED = Case(bits=2, kv_heads=4, head_dim=128, group=4, slots=1024, stretches=2)
SCALES = Case(
    bits=3,
    kv_heads=8,
    head_dim=64,
    group=1,
    scaled="256",
    slots=512,
    stretches=2,
    length=2,
    target="v5e",
)
FIRST = Case(
    bits=4, kv_heads=2, head_dim=128, group=2, slots=768, stretches=3, first=True, target="v7x"
)
RUNS = [(SHARED, 512), (SCALES, 512), (FIRST, 256)]


class Drawn(NamedTuple):
    """A body and what is below it, queries and bounds, and what is right: keys as attended and
    values [B, S, K, D], and the carry."""

    spec: object
    body: object
    carry: dict
    q: jax.Array
    start: jax.Array
    stop: jax.Array
    keys: jax.Array
    values: jax.Array
    right: dict


def _near(rng, x, noise: float):
    return jnp.asarray(x + noise * rng.normal(size=x.shape), jnp.bfloat16)


@functools.cache
def drawn(case: Case) -> Drawn:
    """Signed, with offsets and outlying channels; of two rows one ends inside a chunk and one
    starts late."""
    rng, config, wiring = np.random.default_rng(0), case.config, case.wiring
    width, packed = config.kv_width, wiring.fast.packed
    shape = (BATCH, case.slots, width)
    below = {name: rng.normal(size=shape) * np.where(np.arange(width) % 17, 1, 10) for name in "kv"}
    below = {name: _near(rng, x + rng.normal(size=width), 0.0) for name, x in below.items()}
    constants = {}
    if not case.first:

        def draw(rows):
            return jnp.asarray(rng.normal(size=(rows, width)) * rows**-0.5, jnp.bfloat16)

        def bias():
            return jnp.asarray(rng.normal(size=width), jnp.float32)

        constants = {
            name: {"weight": draw(n * width), "bias": bias()} for name, n in (("k", 1), ("v", 2))
        }

    def encode(tile, carry):
        def split(x):
            return x.reshape(-1, 128, width)

        return jax.lax.map(
            lambda pair: wiring.maps.encode(constants, *pair)[0], jax.tree.map(split, (tile, carry))
        )

    sources = {name: jnp.asarray(rng.normal(size=shape) * 2, jnp.bfloat16) for name in "kv"}
    if case.first:
        sources = below
    tiles = jax.jit(encode, compiler_options=QUICK)(sources, below)

    def joined(name, x):  # tiles of 128 tokens to rows of all
        if name == "scale":
            return (
                x.reshape(BATCH, -1, *x.shape[1:])
                .transpose(0, 2, 1, 3)
                .reshape(BATCH, x.shape[1], -1)
            )
        return x.reshape(BATCH, case.slots, -1)

    payload = {
        source: {n: joined(n, x) for n, x in parts.items()} for source, parts in tiles.items()
    }
    decode = jax.jit(
        lambda payload, carry: wiring.maps.decode(constants, payload, carry)[1],
        compiler_options=QUICK,
    )
    right, stored = decode(payload, below), {}
    for source, parts in payload.items():
        bits = wiring.storage.codecs[source].fields["codes"].bits
        fields = {
            "codes": packed_codes(np.asarray(parts["codes"]), bits),
            "scale": (to_bits(parts["scale"]),),
        }
        stored[source] = jax.tree.map(
            lambda a: jnp.asarray(np.stack([np.zeros_like(a), a])), fields
        )
    first = jnp.asarray([7, 3000, 900][: case.stretches])
    positions = (first[:, None] + jnp.arange(case.slots // case.stretches)[None]).reshape(1, -1)
    heads = {
        name: x.astype(jnp.float32).reshape(*shape[:2], case.kv_heads, -1)
        for name, x in right.items()
    }
    q = jnp.asarray(
        rng.normal(scale=QUERY, size=(BATCH, case.length, config.num_heads, case.head_dim)),
        jnp.bfloat16,
    )
    later = np.arange(case.length)
    stop = jnp.asarray(np.stack([case.slots // 2 + 45 + later, case.slots - 8 + later]), jnp.int32)
    start = jnp.asarray(np.stack([0 * later, case.slots // 3 + later]), jnp.int32)
    spec = dataclasses.replace(packed.spec, target=case.target, dtype="bfloat16")
    spec = dataclasses.replace(spec, codes=dataclasses.replace(spec.codes, target=case.target))
    body = packed.body({}, constants, stored, first)
    keys = rotate(heads["k"], jnp.tile(positions, (BATCH, 1)), config)
    return Drawn(spec, body, below, q.astype(jnp.float32), start, stop, keys, heads["v"], right)


def oracle(case: Case, start, stop) -> Partial:
    one, slot = drawn(case), jnp.arange(case.slots)[None, None]
    return segment_attention(
        one.q, one.keys, one.values, (slot >= start[..., None]) & (slot < stop[..., None])
    )


def check(case: Case, tile: int, got, start, stop):
    """Outputs query by query, and what flows on: of the tiles that a row sees as it should be, but
    for the last places of bfloat16 numbers, and of the others untouched."""
    (part, carry), want, one = got, oracle(case, start, stop), drawn(case)
    check_outputs(part.out, want.out)
    size = (
        float(jnp.linalg.norm(one.q, axis=-1).max() * jnp.linalg.norm(one.keys, axis=-1).max())
        / case.head_dim**0.5
    )
    np.testing.assert_allclose(part.lse, want.lse, atol=4 * 2.0**-9 * size, rtol=0)
    number = np.arange(case.slots) // tile
    for row in range(BATCH):
        first, last = int(start[row].min()) // tile, -(-int(stop[row].max()) // tile)
        seen = (number >= first) & (number < last)
        for name in "kv":
            found, right, old = (
                np.asarray(x[name][row], np.float32) for x in (carry, one.right, one.carry)
            )
            error = np.abs(found - right)[seen]
            assert (error <= 2.0**-7 * np.abs(right[seen]) + 2.0**-7 * right.std()).all(), (
                name,
                row,
                error.max(),
            )
            assert np.linalg.norm(error) <= 0.002 * np.linalg.norm(right[seen]), (name, row)
            if last > first:
                np.testing.assert_array_equal(found[~seen], old[~seen])


@functools.cache
def run(case: Case, tile: int, interpret):
    return jax.jit(
        lambda q, body, layer, start, stop, carry: tpu_predicted.packed_attention(
            q,
            body,
            layer,
            start,
            stop,
            drawn(case).spec,
            carry=carry,
            tile=tile,
            interpret=interpret,
        ),
        compiler_options=QUICK,
    )


def attended(case: Case, tile: int, interpret, start, stop):
    one = drawn(case)
    return run(case, tile, interpret)(one.q, one.body, jnp.int32(1), start, stop, one.carry)


@pytest.mark.parametrize(
    ("case", "tile"), with_nightly(RUNS, [(FIRST, 256)]), ids=["shared", "scales", "first"]
)
def test_kernel_equals_the_plain_path(case, tile):
    start, stop = drawn(case).start, drawn(case).stop
    check(case, tile, attended(case, tile, True, start, stop), start, stop)


def test_race_free_on_simulated_memory():
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    case = dataclasses.replace(SHARED, slots=512, kv_heads=2)
    start, stop = drawn(case).start, drawn(case).stop
    check(case, 256, attended(case, 256, params, start, stop), start, stop)


def test_pages_are_read_where_they_lie():
    """Tile by tile the same numbers, so that not a bit differs, also of what flows on."""
    one = drawn(SHARED)
    stored, pages = in_pages(
        one.body.codes.stored, 512, ("key_scale", "value_scale"), int(one.stop[0].max())
    )
    paged = one.body._replace(codes=one.body.codes._replace(stored=stored))
    call = functools.partial(
        tpu_predicted.packed_attention,
        spec=one.spec,
        carry=one.carry,
        tile=512,
        pages=pages,
        interpret=True,
    )
    got, carry = jax.jit(call, compiler_options=QUICK)(
        one.q, paged, jnp.int32(1), one.start, one.stop
    )
    want, want_carry = attended(SHARED, 512, True, one.start, one.stop)
    check_equal(got, want)
    for name in "kv":
        np.testing.assert_array_equal(carry[name], want_carry[name])


def test_rows_that_see_nothing_merge_as_nothing():
    start, stop = drawn(SHARED).start, drawn(SHARED).stop.at[1].set(0)
    part, carry = attended(SHARED, 512, True, start, stop)
    check_second_row_sees_nothing(part)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in carry.values())


def form(spec: str, target: str = "v6e", **changes):
    """What reads a body of the layers that `spec` names, the first one's last; None: no kernel
    knows their form."""
    method, config = parse(spec), dataclasses.replace(LLAMA31_8B, num_layers=2, **changes)
    layout = kvq.cache.CacheLayout(
        shape=config.kv_shape, method=method, capacity=4096, dtype="bfloat16", target=target
    )
    group = config.num_heads // config.num_kv_heads
    packed = [run.wiring.fast.packed for run in reversed(kvq.cache.runs_of(layout))]
    return [one and dispatch.path(one.spec, group, 4096) for one in packed]


def test_dispatch_takes_what_was_compiled():
    for target in ("v5e", "v5p", "v6e", "v7x"):
        assert form("aqua:bits=2", target) == ["tpu", "tpu"]
    assert (
        form("aqua:bits=2,window=64,sinks=0") == form("aqua:bits=2", num_heads=64) == ["tpu", "tpu"]
    )
    # A second call of the kernel would pass what flows upwards through the layer once more.
    assert form("aqua:bits=2", num_heads=128) == ["reference", "reference"]
    assert form("aqua:bits=2", "cpu") == form("aqua:bits=2", "sm90") == ["reference", "reference"]
    assert form("aqua:bits=3") == form("aqua:bits=2,key_bits=4") == ["reference", "tpu"]
    assert form("aqua:bits=2,first_bits=16") == ["tpu", None]
    for other in (
        "predictor=int4",
        "key_inputs=kv",
        "value_inputs=v",
        "backbone=token",
        "rope=post",
    ):
        assert form(f"aqua:bits=2,{other}")[0] is None, other
    assert form("aqua:bits=2", qkv_bias=True) == [None, None]
    assert form("aqua:bits=2,centre=none", qkv_bias=True) == ["tpu", "tpu"]


def test_the_kernel_reads_what_the_cache_stores(monkeypatch):
    """A decoding step of a model of three layers through the kernel: every layer's attention as the
    general path finds it from the same keys and values below, those that the kernel left."""
    model, length = tiny(head_dim=128, num_layers=3), 500
    model = model.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    spec, rng = kvq.parse("aqua:bits=2,sinks=3"), np.random.default_rng(0)
    layout = kvq.cache.CacheLayout(
        shape=model.config.kv_shape, method=spec, capacity=515, dtype="bfloat16"
    )
    wanted = [run.wiring.constants(run.count, "bfloat16") for run in kvq.cache.runs_of(layout)]

    def draw(x):
        return jnp.asarray(rng.normal(size=x.shape) * 0.3 * x.shape[-2] ** -0.5, x.dtype)

    model = model.replace(constants=tuple(jax.tree.map(draw, one) for one in wanted))
    cache = kvq.init_cache(model, spec, 2, 515)
    _, cache = kvq.prefill(model, tokens(2, length), jnp.asarray([length, length - 200]), cache)
    calls, outputs = [], []

    def kernel(q, body, layer, start, stop, spec, general, trusted, carry):
        calls.append(spec.mapped)
        found = tpu_predicted.packed_attention(
            q, body, layer, start, stop, spec, carry=carry, interpret=True
        )
        jax.debug.callback(lambda *pair: outputs.append(pair), found[0].out, general()[0].out)
        return found

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    # Kernels were compiled for more heads than these.
    monkeypatch.setattr(reading, "path", lambda *_: "tpu")
    logits(model, for_chip(cache, "v6e"))
    jax.effects_barrier()
    assert (calls, len(outputs)) == ([False, True], 3)
    for found, plain in outputs:
        assert np.abs(plain).max() > 0.1
        check_outputs(np.asarray(found, np.float32), np.asarray(plain, np.float32))
