"""Bodies, queries and bounds shared by the kernel tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic import primitives
from jax.interpreters import mlir

from kvqjax import parse
from kvqjax.codecs import Uniform
from kvqjax.model.config import ModelConfig
from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.ops.packing.base import split_bits, to_bits
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope

BATCH, LAYERS = 2, 2
QUERY = 0.25  # spread of queries: keys here are so large that with 1 rounding a score moves an output by percents
# A kernel under test runs once: compiling it takes all the time.
QUICK = {"xla_backend_optimization_level": 0}

LLAMA31_8B = ModelConfig(
    vocab_size=8, width=4096, mlp_width=8, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128
)


def path(spec: str, config=LLAMA31_8B, group=4, target="v6e", slots=4096) -> str | None:
    """What reads a body of the method that `spec` names; None: no kernel knows its form."""
    packed = parse(spec).layer.build(config).fast.packed
    return packed and dispatch.path(dataclasses.replace(packed.spec, target=target), group, slots)


def check_second_row_sees_nothing(part: Partial) -> None:
    """It merges as nothing, and the first row is sound."""
    np.testing.assert_array_equal(part.out[1], 0)
    np.testing.assert_array_equal(part.lse[1], -jnp.inf)
    assert np.isfinite(part.lse[0]).all()


def _packed_halves(low, high, *, packed_dtype):
    """What `pltpu.pack_elementwise` is documented to give, for interpreters of a JAX that lack
    it."""
    halves = (jax.lax.bitcast_convert_type(x.astype(packed_dtype), jnp.uint16) for x in (low, high))
    low, high = (half.astype(jnp.uint32) for half in halves)
    return low | (high << jnp.uint32(16))


mlir.register_lowering(
    primitives.pack_elementwise_p,
    mlir.lower_fun(_packed_halves, multiple_results=False),
    platform="cpu",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    key_bits: int
    value_bits: int
    key_group: int
    value_group: int
    kv_heads: int
    head_dim: int
    group: int  # query heads per KV head
    length: int = 1  # query tokens
    slots: int = 1024
    target: str = "cpu"
    rope: Rope | None = None
    datatype: str = "uniform"
    key_slots: int = 0
    value_slots: int = 0
    key_factors: int = 0
    value_factors: bool = False
    key_channels: int = 0
    striped: bool = False

    @property
    def spec(self) -> PackedSpec:
        names = {field.name for field in dataclasses.fields(PackedSpec)} & set(vars(self))
        return PackedSpec(**{name: getattr(self, name) for name in names})

    def __str__(self):
        return (
            f"k{self.key_bits}g{self.key_group}-v{self.value_bits}g{self.value_group}"
            f"-K{self.kv_heads}D{self.head_dim}G{self.group}T{self.length}-{self.slots}"
            + (f"-factors{self.key_factors}" + "v" * self.value_factors if self.key_factors else "")
            + f"-keys{self.key_channels}" * bool(self.key_channels)
            + "-stripes" * self.striped
        )


def vectors(rng, case: Case, offset: float):
    """Signed, with an offset per channel and a few channels of large values, as in real keys."""
    x = rng.normal(size=(BATCH, case.slots, case.kv_heads * case.head_dim))
    x[..., ::17] *= 10
    return jnp.asarray(x + offset * rng.normal(size=x.shape[-1]), jnp.float32)


def packed_codes(codes: np.ndarray, bits: int, form: str = "planes", heads: int = 1) -> tuple:
    """The layouts once more in numpy. Planes: token t of a block sits in row t % 32, bits part*(t
    // 32) and up. Stripes have planes of 32*part tokens, and rows turned. Lines: channel d is in
    word d // (32/part) of its token."""
    stored, shift, width = [], 0, codes.shape[-1]
    for part in split_bits(bits):
        places = np.arange(0, 32, part, dtype=np.uint32)
        these = (codes >> shift & (2**part - 1)).astype(np.uint32)
        if form == "lines":
            words = (
                these.reshape(BATCH, -1, 32, heads, width // heads * part // 32, 32 // part)
                << places
            ).sum(-1)
            stored.append(words.astype(np.uint32).transpose(0, 3, 1, 4, 2))
        else:
            plane = 32 * part if form == "stripes" else 32
            blocks = these.reshape(BATCH, -1, 32 // part, plane, width)
            words = (blocks << places.reshape(1, 1, -1, 1, 1)).sum(2, dtype=np.uint32)
            stored.append(
                words.swapaxes(2, 3) if form == "stripes" else words.reshape(BATCH, -1, width)
            )
        shift += part
    return tuple(stored)


def _stored(codec, x, **form):
    """The arrays of a body whose layer 1 holds `x` and whose layer 0 holds zeros, and what the
    codec decodes."""
    payload = jax.jit(jax.vmap(lambda rows: codec.encode({}, rows)), compiler_options=QUICK)(x)
    decoded = jax.jit(lambda payload: codec.decode({}, payload), compiler_options=QUICK)(payload)
    codes = packed_codes(np.asarray(payload["codes"]), codec.fields["codes"].bits, **form)
    arrays = codes, *(to_bits(payload[name]) for name in ("scale", "low"))
    return jax.tree.map(lambda a: jnp.asarray(np.stack([np.zeros_like(a), a])), arrays), decoded


def make_body(case: Case, seed: int = 0):
    """A packed body whose layer 1 holds random tokens, with the decoded keys and values [B, S, K,
    D]."""
    rng = np.random.default_rng(seed)
    width = case.kv_heads * case.head_dim
    along, group = (
        ("channels", case.key_channels) if case.key_channels else ("tokens", case.key_group)
    )
    keys = Uniform(bits=case.key_bits, along=along, group=group).build(width)
    values = Uniform(bits=case.value_bits, along="channels", group=case.value_group).build(width)
    form = {"form": "lines", "heads": case.kv_heads} if case.striped else {}
    k, key = _stored(keys, vectors(rng, case, 3.0), **form)
    v, value = _stored(
        values, vectors(rng, case, 0.5), **({"form": "stripes"} if case.striped else {})
    )
    body, pair = (
        PackedBody(*k, *v),
        [x.reshape(BATCH, case.slots, case.kv_heads, -1) for x in (key, value)],
    )

    def factors(*shape):
        x = jnp.asarray(rng.uniform(0.25, 2, (BATCH, *shape)), jnp.bfloat16)
        return to_bits(jnp.stack([jnp.zeros_like(x), x])), x.astype(jnp.float32)

    if case.key_factors:
        stored, factor = factors(case.key_factors, case.slots)
        body, pair[0] = body._replace(key_factor=stored), pair[0] * factor.swapaxes(1, 2)[..., None]
    if case.value_factors:
        stored, factor = factors(case.slots // case.key_group, width)
        spread = jnp.repeat(factor, case.key_group, axis=1).reshape(pair[1].shape)
        body, pair[1] = body._replace(value_factor=stored), pair[1] * spread
    return body, *pair


def in_pages(stored, page: int, on_lanes: tuple[str, ...], last: int):
    """Deal the fields [L, B, ...] of a body to pages of `page` tokens that lie in no order. Return
    them and the table.

    Fields `on_lanes` have tokens on the last axis, others on the one before. The first page has all
    bits set, which is NaN in scales. No row has it. Row 0 lacks the pages behind its token number
    `last`."""
    slots = stored.slots
    count = slots // page
    order = np.random.default_rng(3).permutation(BATCH * count)
    table = np.argsort(order).reshape(BATCH, count).astype(np.int32) + 1
    table[0, -(-last // page) :] = -1

    def dealt(name, x):
        if x.ndim < 4:  # constants of a layer
            return x
        axis = 3 if name in on_lanes else 2
        pages = np.moveaxis(np.stack(np.split(np.asarray(x), count, axis)), 0, 2).reshape(
            len(x), -1, *x.shape[2:axis], x.shape[axis] // count, *x.shape[axis + 1 :]
        )
        return jnp.asarray(np.concatenate([~np.zeros_like(pages[:, :1]), pages[:, order]], 1))

    fields = stored._asdict().items()
    dealt_fields = {name: jax.tree.map(functools.partial(dealt, name), x) for name, x in fields}
    return stored._replace(**dealt_fields), jnp.asarray(table)


def make_query(case: Case, seed: int = 1):
    """Queries and ragged intervals: row 0 ends inside a group, row 1 starts late (a sliding
    window)."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, case.length, case.kv_heads * case.group, case.head_dim)
    q = jnp.asarray(rng.normal(scale=QUERY, size=shape), jnp.float32)
    later = np.arange(case.length)
    stop = jnp.asarray(np.stack([case.slots // 2 + 45 + later, case.slots - 8 + later]), jnp.int32)
    start = jnp.asarray(np.stack([0 * later, case.slots // 3 + later]), jnp.int32)
    return q, start, stop


def oracle(q, key, value, start, stop) -> Partial:
    slot = jnp.arange(key.shape[1])[None, None]
    mask = (slot >= start[..., None]) & (slot < stop[..., None])
    return segment_attention(q, key, value, mask)


def check_equal(got: Partial, want: Partial) -> None:
    """Not a bit differs."""
    np.testing.assert_array_equal(got.lse, want.lse)
    np.testing.assert_array_equal(got.out, want.out)
    assert np.isfinite(want.lse).any()


def agree(got: Partial, want: Partial, key, value, q):
    """|error| of a score <= ~ D eps |q||k|/sqrt(D), eps = 2^-23; that of the output <= 2 max|v| times it
    (softmax is 1-Lipschitz in the largest score error), plus the rounding of the sum itself. A
    factor of 2 stands for the order of additions."""
    scores = (
        jnp.linalg.norm(q, axis=-1).max() * jnp.linalg.norm(key, axis=-1).max() / q.shape[-1] ** 0.5
    )
    bound = float(2.0**-22 * q.shape[-1] ** 0.5 * scores)
    np.testing.assert_allclose(got.lse, want.lse, atol=bound, rtol=0)
    np.testing.assert_allclose(
        got.out, want.out, atol=2 * float(jnp.abs(value).max()) * bound, rtol=0
    )
    assert float(jnp.abs(want.out).max()) > 20 * bound, "the comparison says nothing"


def check_outputs(got, want, most: float = 0.01) -> None:
    """Every query's output [B, T, H, D] is off by at most 1 % of its norm, and zero where it should
    be. Rounding to bfloat16 gives 0.3 %."""
    error, size = (np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (got - want, want))
    assert (error <= most * size).all(), (
        f"a query's output is off by {np.max(error / np.maximum(size, 1e-30)):.2%}"
    )


def near(got, want, key, value, q, most: float = 0.01):
    """As `agree` for 2^-9 of rounding on queries and on probabilities: log-sum-exp within the bound
    of the longest query and key, outputs query by query within `most` of what is summed.

    Kernels sum steps times codes and minima apart, which nearly cancel for signed values: what is
    rounded are values above the minimum of their head, `lifted` times as large as the values."""
    bound = float(
        2.0**-9
        * jnp.linalg.norm(q, axis=-1).max()
        * jnp.linalg.norm(key, axis=-1).max()
        / q.shape[-1] ** 0.5
    )
    np.testing.assert_allclose(got.lse, want.lse, atol=bound, rtol=0)
    above = value - value.min(-1, keepdims=True)
    lifted = float(jnp.sqrt(jnp.mean(jnp.square(above)) / jnp.mean(jnp.square(value))))
    check_outputs(got.out, want.out, most * max(1.0, lifted))
