"""The TPU kernel on keys before RoPE (KIVI*, KVQuant), interpreted, against decoding everything,
rotating it in float64 and attending exactly. Bound: as for the plain form; tables of cos and sin
are rounded to bfloat16 as well."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import thinned, with_nightly
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import QUICK, check_equal, in_pages, make_query, near, oracle
from kernel_forms import case_of, changed, first_positions, make_form, rope, within

from kvqjax.pallas_kernels import reference
from kvqjax.pallas_kernels.tpu import packed as tpu
from kvqjax.pallas_kernels.tpu import rows as tpu_rows
from kvqjax.pallas_kernels.tpu.call import BY_TOKEN
from kvqjax.pallas_kernels.tpu.rope import swapped
from kvqjax.pallas_kernels.work import Work

STAR4 = case_of(4, target="v6e", slots=512)
NUQ2 = case_of(2, datatype="nuq", target="v6e", slots=512)
SMALL = changed(case_of(2, target="v6e", slots=512, kv_heads=1), key_group=32, value_group=32)
SLOTTED = case_of(
    4, datatype="nuq", target="v5e", head_dim=64, slots=256, key_slots=2, value_slots=4
)
FAR = {"first": 300_003, "apart": 3}
RUNS = [
    (case_of(2, target="v6e", slots=512), {}, {"work": Work(512)}),
    (case_of(4, target="v5e", slots=512, length=2), FAR, {"work": Work(256), "splits": 2}),
    (
        case_of(3, datatype="nuq", target="v5e", rope=rope(500_000.0, 128, 1.2), kv_heads=1),
        {},
        {"work": Work(1024)},
    ),
    (case_of(4, datatype="nuq", target="v5p", slots=256, group=1), FAR, {"work": Work(256)}),
    (SMALL, {}, {}),
    (changed(SMALL, target="v5p"), FAR, {}),
    (changed(NUQ2, key_slots=3, value_slots=2), FAR, {"work": Work(512)}),
    (changed(NUQ2, key_slots=2, value_slots=2), {}, {"work": Work(512, 1, 0)}),
    (case_of(4, target="v6e", slots=512, kv_heads=1), FAR, {"work": Work(512, 2)}),
    (
        case_of(4, datatype="nuq", target="v5p", slots=512, kv_heads=1, key_slots=2),
        FAR,
        {"work": Work(512, 2)},
    ),
    (case_of(3, datatype="nuq", target="v7x", kv_heads=1), {}, {}),
    (SLOTTED, {}, {"work": Work(256)}),
]


@functools.cache
def compiled(case, **options):
    return jax.jit(
        lambda *args: tpu.packed_attention(*args, case.spec, **options), compiler_options=QUICK
    )


def attend(case, place: dict, **options):
    body, key, value = make_form(case, **place)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    got = compiled(case, **options)(q, body, jnp.int32(1), start, stop)
    return got, oracle(q, key, value, start, stop), key, value, q


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "place", "options"), with_nightly(RUNS, (RUNS[4],)), ids=str)
def test_kernel_equals_the_oracle(case, place, options):
    near(*attend(case, place, interpret=True, **options), within(**place))


@pytest.mark.nightly
def test_race_free_on_simulated_memory():
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    near(*attend(NUQ2, {}, interpret=params, work=Work(512)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", with_nightly([STAR4, changed(NUQ2, key_slots=3, value_slots=2)], [STAR4]), ids=str
)
def test_pages_are_read_where_they_lie(case):
    """Positions and outliers too. Tile by tile the same numbers, so that not a bit differs."""
    case = changed(case, slots=1024)
    body, (q, start, stop) = make_form(case, **FAR)[0], make_query(case)
    paged, pages = in_pages(body, 512, BY_TOKEN, int(stop[0].max()))
    call = functools.partial(tpu.packed_attention, spec=case.spec, work=Work(512), interpret=True)
    got = jax.jit(call, compiler_options=QUICK)(q, paged, jnp.int32(1), start, stop, pages=pages)
    check_equal(got, jax.jit(call, compiler_options=QUICK)(q, body, jnp.int32(1), start, stop))


@pytest.mark.parametrize("wrong", thinned([{"first": 5}, {"apart": 1}], 2))
def test_wrong_positions_are_noticed(wrong):
    """The bound can fail: keys one token, or stretches of tokens, off."""
    case = STAR4
    body, key, value = make_form(case)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    moved = body._replace(
        positions=jnp.asarray(
            first_positions(case, **({"first": 4, "apart": 0} | wrong)), jnp.int32
        )
    )
    got = compiled(case, interpret=True)(q, moved, jnp.int32(1), start, stop)
    with pytest.raises(AssertionError):
        near(got, oracle(q, key, value, start, stop), key, value, q)


def test_the_wrong_sense_of_rotation_is_noticed(monkeypatch):
    monkeypatch.setattr(tpu_rows, "swapped", lambda q: -swapped(q))
    case = changed(STAR4, kv_heads=1, slots=256)
    body, key, value = make_form(case)
    q, start, stop = make_query(case)
    got = tpu.packed_attention(q, body, jnp.int32(1), start, stop, case.spec, interpret=True)
    with pytest.raises(AssertionError):
        near(got, oracle(q, key, value, start, stop), key, value, q)


def test_forms_that_no_kernel_reads_are_refused():
    body, _, _ = make_form(STAR4)
    q, start, stop = make_query(STAR4)
    with pytest.raises(ValueError, match="want stretches of 256"):
        tpu.packed_attention(
            q, body._replace(positions=jnp.arange(8)), 1, start, stop, STAR4.spec, interpret=True
        )
    with pytest.raises(ValueError, match="uniform codes of keys after RoPE only"):
        reference.packed_attention(q, body, 1, start, stop, STAR4.spec)
