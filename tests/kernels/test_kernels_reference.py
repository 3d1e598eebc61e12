"""The blockwise reference on packed bodies against decoding everything and attending exactly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly
from kernel_cases import Case, agree, check_outputs, make_body, make_query, oracle

from kvqjax.pallas_kernels.packed import PackedSpec
from kvqjax.pallas_kernels.reference import at_once, packed_attention

CASES = [
    Case(key_bits=2, value_bits=2, key_group=32, value_group=32, kv_heads=2, head_dim=64, group=1),
    Case(key_bits=4, value_bits=4, key_group=128, value_group=128, kv_heads=1, head_dim=128, group=4, length=2),
    Case(key_bits=3, value_bits=2, key_group=64, value_group=64, kv_heads=2, head_dim=96, group=2, slots=2048),
    Case(key_bits=2, value_bits=3, key_group=32, value_group=128, kv_heads=2, head_dim=64, group=8, slots=2048),
    Case(key_bits=8, value_bits=4, key_group=64, value_group=32, kv_heads=1, head_dim=256, group=16, length=3),
    Case(key_bits=4, value_bits=8, key_group=32, value_group=64, kv_heads=4, head_dim=64, group=2),
    Case(key_bits=2, value_bits=2, key_group=128, value_group=64, kv_heads=2, head_dim=64, group=3, striped=True),
    Case(key_bits=4, value_bits=4, key_group=32, value_group=32, kv_heads=2, head_dim=64, group=2, length=3,
         striped=True),
    Case(key_bits=3, value_bits=2, key_group=64, value_group=32, kv_heads=1, head_dim=96, group=2, slots=2048,
         striped=True),
    Case(key_bits=8, value_bits=2, key_group=64, value_group=64, kv_heads=4, head_dim=64, group=1, striped=True),
    Case(key_bits=6, value_bits=5, key_group=32, value_group=96, kv_heads=3, head_dim=64, group=1, slots=2048,
         striped=True),
    Case(key_bits=3, value_bits=4, key_group=32, value_group=32, kv_heads=2, head_dim=64, group=3, length=4,
         striped=True, slots=2048),
]  # fmt: skip


@pytest.mark.parametrize("case", with_nightly(CASES, CASES[4:5]), ids=str)
def test_equals_decoding_then_attending(case):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    agree(
        packed_attention(q, body, 1, start, stop, case.spec),
        oracle(q, key, value, start, stop),
        key,
        value,
        q,
    )


@pytest.mark.nightly
def test_reads_only_blocks_in_sight():
    """Garbage scales (NaN, as bits of bfloat16) outside the visible blocks must not be touched; a
    traced layer is as good as a number."""
    case = CASES[0]
    body, key, value = make_body(case)
    q, _, _ = make_query(case)
    start, stop = jnp.full((2, 1), 600), jnp.full((2, 1), 1000)
    edge = 512 // case.key_group
    poisoned = body._replace(key_scale=body.key_scale.at[:, :, :edge].set(0x7FC0))
    attend = jax.jit(packed_attention, static_argnums=5)
    agree(
        attend(q, poisoned, jnp.int32(1), start, stop, case.spec),
        oracle(q, key, value, start, stop),
        key,
        value,
        q,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", with_nightly((case for case in CASES if case.striped), CASES[6:7]), ids=str
)
def test_scales_beyond_the_last_token_may_be_anything(case):
    """Of whole groups, in blocks that are read: NaN and infinity, as bits of bfloat16."""
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    edges = [-(-int(stop[0].max()) // each) for each in (case.key_group, 1)]
    poisoned = body._replace(
        key_scale=body.key_scale.at[:, 0, edges[0] :].set(0x7FC0),
        key_low=body.key_low.at[:, 0, edges[0] :].set(0x7F80),
        value_scale=body.value_scale.at[:, 0, :, edges[1] :].set(0x7F80),
        value_low=body.value_low.at[:, 0, :, edges[1] :].set(0x7FC0),
    )
    agree(
        packed_attention(q, poisoned, 1, start, stop, case.spec),
        oracle(q, key, value, start, stop),
        key,
        value,
        q,
    )


@pytest.mark.parametrize(
    "case", thinned(with_nightly((case for case in CASES if case.striped), CASES[6:8]), 2), ids=str
)
def test_large_keys_have_finite_scores(case):
    """Scales of 1e30, as bits of bfloat16."""
    body, _, _ = make_body(case)
    q, start, stop = make_query(case)
    part = packed_attention(
        q, body._replace(key_scale=jnp.full_like(body.key_scale, 0x7149)), 1, start, stop, case.spec
    )
    assert jnp.isfinite(part.out).all()
    assert (jnp.abs(part.lse) > 1e28).any()


@pytest.mark.parametrize("bits", thinned([4, 8], 2))
def test_a_cpu_decodes_no_code_twice_for_a_query(bits):
    """One mask for each channel of the keys, and one for every 32 values of a turn. XLA would
    compute scores anew wherever they are used. No words are copied."""
    case = Case(
        key_bits=bits, value_bits=bits, key_group=128, value_group=64, kv_heads=2, head_dim=64, group=3, slots=8192,
        striped=True,
    )  # fmt: skip
    body, (q, start, stop) = make_body(case)[0], make_query(case)
    attend = jax.jit(
        lambda q, body, start, stop: packed_attention(q, body, 1, start, stop, case.spec)
    )
    text = attend.lower(q, body, start, stop).compile().as_text()
    block = at_once(case.spec, q.shape[2], case.slots)
    masks = len(re.findall(r"= u32\S* and\(", text))
    assert case.head_dim + block // 32 <= masks <= case.head_dim + block // 32 + 8
    assert not re.search(r"= u32\S* (fusion|copy)\(", text)


def test_nothing_in_sight_merges_as_nothing():
    case = CASES[0]
    body, _, _ = make_body(case)
    q, start, _ = make_query(case)
    part = packed_attention(q, body, 0, start, jnp.zeros_like(start), case.spec)
    np.testing.assert_array_equal(part.out, 0)
    np.testing.assert_array_equal(part.lse, -jnp.inf)


def test_refuses_what_does_not_fit():
    case = CASES[0]
    body, _, _ = make_body(case)
    q, start, stop = make_query(case)
    with pytest.raises(ValueError, match=r"key_scale: got .* want"):
        packed_attention(
            q, body._replace(key_scale=body.key_scale[:, :, 1:]), 0, start, stop, case.spec
        )
    with pytest.raises(ValueError, match=r"q: got"):
        packed_attention(q[..., 1:], body, 0, start, stop, case.spec)
    with pytest.raises(ValueError, match="target"):
        PackedSpec(
            key_bits=2,
            value_bits=2,
            key_group=32,
            value_group=32,
            kv_heads=2,
            head_dim=64,
            target="h100",
        )


def test_one_query_that_is_off_is_noticed():
    """Among 64 outputs one is 2 % off: hardly anything of the norm of all."""
    want = np.random.default_rng(0).normal(size=(2, 4, 8, 32))
    check_outputs(want * 1.009, want)
    off = want.copy()
    off[1, 2, 3] *= 1.02
    assert np.linalg.norm(off - want) < 0.003 * np.linalg.norm(want)
    with pytest.raises(AssertionError, match="off by 2"):
        check_outputs(off, want)
    unseen = want * (np.arange(4) > 0)[None, :, None, None]
    check_outputs(unseen, unseen)
    with pytest.raises(AssertionError):
        check_outputs(unseen + 1e-6, unseen)
