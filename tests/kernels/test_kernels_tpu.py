"""The TPU kernel, interpreted, against decoding everything and attending exactly; dispatch and the
support table.

Bound: queries times scales, and probabilities times scales, are rounded to bfloat16 (2^-8 relative,
half of it on average); everything else is exact or float32.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import (
    QUICK,
    Case,
    agree,
    check_equal,
    in_pages,
    make_body,
    make_query,
    near,
    oracle,
)

from kvqjax.pallas_kernels import dispatch, reference, support
from kvqjax.pallas_kernels.chips import TARGETS, TPUS
from kvqjax.pallas_kernels.forms import SPLASH, KernelForm, form_of
from kvqjax.pallas_kernels.tpu import packed as tpu
from kvqjax.pallas_kernels.tpu import rows as tpu_rows
from kvqjax.pallas_kernels.tpu import tile as tpu_tile
from kvqjax.pallas_kernels.tpu.call import BY_TOKEN as BY_TOKEN_FIELDS
from kvqjax.pallas_kernels.tpu.call import KEYS_BY_TOKEN
from kvqjax.pallas_kernels.tpu.unpack import token_order
from kvqjax.pallas_kernels.work import Work

FOUR = Case(
    key_bits=4,
    value_bits=4,
    key_group=128,
    value_group=128,
    kv_heads=2,
    head_dim=128,
    group=4,
    slots=512,
    target="v6e",
)
TWO = Case(
    key_bits=2,
    value_bits=2,
    key_group=64,
    value_group=32,
    kv_heads=2,
    head_dim=64,
    group=2,
    slots=512,
    target="v6e",
)
EIGHT = dataclasses.replace(
    TWO,
    key_bits=8,
    value_bits=8,
    value_group=48,
    kv_heads=4,
    head_dim=96,
    group=1,
    length=2,
    slots=256,
    target="v5p",
)
MIXED = Case(
    key_bits=3,
    value_bits=2,
    key_group=128,
    value_group=64,
    kv_heads=2,
    head_dim=64,
    group=2,
    target="v5e",
)
# KIVI's groups: key scales multiply the codes, in bfloat16 or (v5e) in float32
SMALL = Case(
    key_bits=2,
    value_bits=2,
    key_group=32,
    value_group=32,
    kv_heads=1,
    head_dim=128,
    group=4,
    slots=512,
    target="v6e",
)
SMALL4 = dataclasses.replace(SMALL, key_bits=4, value_bits=4, target="v5e")
SCALED = dataclasses.replace(
    FOUR, key_bits=2, value_bits=2, key_factors=1, slots=1024, target="v6e"
)
BALANCED = dataclasses.replace(SCALED, key_factors=2, value_factors=True)
BY_TOKEN = dataclasses.replace(
    FOUR, key_bits=2, value_bits=2, key_group=0, key_channels=128, slots=1024, target="v6e"
)
INTERLEAVED = {"ways": 2, "work": Work(256, 1, 0)}
SPLIT = INTERLEAVED | {"splits": 2}
RUNS = [
    (FOUR, SPLIT),
    # integer codes beside bfloat16 in one product
    (dataclasses.replace(FOUR, target="v7x", slots=1024, kv_heads=3), {"work": Work(1024, 1, 1)}),
    (TWO, {"ways": 8, "work": Work(512, 1, 0)}),
    (EIGHT, {"ways": 4, "work": Work(128, 1, 2)}),
    (MIXED, {"ways": 8, "work": Work(1024)}),
    (SMALL, {}),
    (dataclasses.replace(SMALL, target="v5p", kv_heads=2, head_dim=64), {}),
    (dataclasses.replace(SMALL4, value_bits=2, target="v7x"), {}),
    (SMALL4, {"work": Work(256), "splits": 2}),
    (dataclasses.replace(FOUR, kv_heads=1, group=16, slots=256), {}),
    (FOUR, {"work": Work(512, 2)}),
    (FOUR, {"work": Work(512, 2, -1)}),
    (dataclasses.replace(SMALL, target="v7x"), {}),
    (dataclasses.replace(FOUR, kv_heads=4, head_dim=96, value_group=96, group=2, target="v6e"), {}),
    (SCALED, {"work": Work(512, 1, 0), "splits": 2}),
    (dataclasses.replace(SMALL, key_factors=1, kv_heads=2), {}),
    (
        dataclasses.replace(
            SCALED, target="v5e", key_factors=4, kv_heads=4, head_dim=64, value_group=64, group=2
        ),
        {},
    ),
    (BALANCED, {"work": Work(512, 1, 0)}),
    (
        dataclasses.replace(
            BALANCED, target="v5e", kv_heads=4, key_factors=4, head_dim=64, value_group=64, group=2
        ),
        {},
    ),
    (dataclasses.replace(BALANCED, key_bits=4, target="v7x", length=2), {"work": Work(1024, 2)}),
    (
        dataclasses.replace(BALANCED, key_bits=4, value_bits=4, target="v5e", slots=512),
        {"work": Work(512, 1, 1)},
    ),
    (BY_TOKEN, {"work": Work(512, 1, 0)}),
    (dataclasses.replace(BY_TOKEN, target="v5e", head_dim=64, key_channels=64, value_group=64), {}),
    (
        dataclasses.replace(BY_TOKEN, key_bits=4, value_bits=4, target="v7x", length=2),
        {"work": Work(1024, 2)},
    ),
]


@functools.cache
def compiled(case: Case, **options):
    return jax.jit(
        lambda *args: tpu.packed_attention(*args, case.spec, **options), compiler_options=QUICK
    )


def compiled_in_pages(case: Case, **options):
    """The same of a body in pages, whose table comes last."""

    def call(*args):
        *args, pages = args
        return tpu.packed_attention(*args, case.spec, pages=pages, interpret=True, **options)

    return jax.jit(call, compiler_options=QUICK)


def attend(case: Case, **options):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    got = compiled(case, **options)(q, body, jnp.int32(1), start, stop)
    return got, oracle(q, key, value, start, stop), key, value, q


@pytest.mark.parametrize(("case", "options"), with_nightly(RUNS, RUNS[8:9]), ids=str)
def test_kernel_equals_the_oracle(case, options):
    near(*attend(case, interpret=True, **options))


@pytest.mark.parametrize(
    ("case", "options"),
    with_nightly(
        [(FOUR, INTERLEAVED), (SMALL4, {"work": Work(256)}), (FOUR, {"work": Work(512, 2)})],
        [(FOUR, INTERLEAVED)],
    ),
    ids=str,
)
def test_race_free_on_simulated_memory(case, options):
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    near(*attend(case, interpret=params, **options))


PAGED = [
    (FOUR, SPLIT),
    (dataclasses.replace(SMALL, target="v7x"), {"work": Work(512)}),
    (BALANCED, {"work": Work(512, 1, 0)}),
    (BY_TOKEN, {"work": Work(512, 1, 0)}),
]


@pytest.mark.parametrize(("case", "options"), with_nightly(PAGED, PAGED[:1]), ids=str)
def test_pages_are_read_where_they_lie(case, options):
    """Tile by tile the same numbers, so that not a bit differs."""
    case = dataclasses.replace(case, slots=1024)
    body, (q, start, stop) = make_body(case)[0], make_query(case)
    by_token = BY_TOKEN_FIELDS + KEYS_BY_TOKEN * bool(case.key_channels)
    paged, pages = in_pages(body, 512, by_token, int(stop[0].max()))
    got = compiled_in_pages(case, **options)(q, paged, jnp.int32(1), start, stop, pages)
    check_equal(got, compiled(case, interpret=True, **options)(q, body, jnp.int32(1), start, stop))


def test_scales_prepared_in_parts(monkeypatch):
    """As for tiles and heads too large for these tests."""
    monkeypatch.setattr(tpu_tile, "TOKENS", 256)
    monkeypatch.setattr(tpu_tile, "NUMBERS", 1024)
    near(*attend(dataclasses.replace(FOUR, slots=1024), interpret=True, work=Work(1024, 1, 0)))


@pytest.mark.parametrize(("base", "ways"), [(1, 8), (2, 2), (2, 8), (4, 2), (4, 4), (4, 8), (8, 4)])
def test_token_order_is_a_permutation(base, ways):
    np.testing.assert_array_equal(np.sort(token_order(base, ways, 1024)), np.arange(1024))


def test_rows_that_see_nothing_merge_as_nothing():
    body, _, _ = make_body(FOUR)
    q, start, stop = make_query(FOUR)
    stop = stop.at[1].set(0)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    part = compiled(FOUR, interpret=True, **SPLIT)(q, body, jnp.int32(1), start, stop)
    np.testing.assert_array_equal(part.out[1], 0)
    np.testing.assert_array_equal(part.lse[1], -jnp.inf)
    assert np.isfinite(part.lse[0]).all()


def test_rows_that_start_to_see_beyond_the_body_fetch_within_it():
    """A sliding window may lie in the exact tokens altogether; copies are not checked on chips."""
    start, stop = (
        jnp.array([[500, 600], [512, 700], [0, 3]]),
        jnp.array([[512, 512], [512, 512], [0, 0]]),
    )
    np.testing.assert_array_equal(
        tpu_rows.tile_ends(start, stop, 256, 512), [[1, 2, 1], [1, 2, 1], [0, 0, 0]]
    )
    body, _, _ = make_body(FOUR)
    q, start, stop = make_query(FOUR)
    start = start.at[1].set(700)
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    part = compiled(FOUR, interpret=params, **INTERLEAVED)(q, body, jnp.int32(1), start, stop)
    np.testing.assert_array_equal(part.lse[1], -jnp.inf)
    assert np.isfinite(part.lse[0]).all()


def test_dispatch_guards_by_platform():
    """A program traced for a TPU but run here is the reference, and says so for what no kernel
    covers."""
    case = FOUR
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    agree(
        dispatch.packed_attention(
            q,
            body,
            1,
            start,
            stop,
            case.spec,
            lambda: reference.packed_attention(q, body, 1, start, stop, case.spec),
        ),
        oracle(q, key, value, start, stop),
        key,
        value,
        q,
    )
    assert dispatch.path(case.spec, 4, case.slots) == "tpu"
    wide = dataclasses.replace(case, head_dim=96, value_group=96, kv_heads=4)
    assert (
        dispatch.path(case.spec, 16, case.slots, length=4)
        == dispatch.path(wide.spec, 16, case.slots)
        == "tpu"
    )
    assert dispatch.path(case.spec, 16, case.slots, length=9) == "reference"
    assert (
        dispatch.path(dataclasses.replace(case.spec, scales="float32"), 4, case.slots)
        == "reference"
    )
    assert dispatch.path(dataclasses.replace(case.spec, target="cpu"), 4, case.slots) == "reference"
    assert form_of(dataclasses.replace(SMALL4, value_bits=2).spec) == KernelForm(
        "kivi", 4, 2, group=32
    )
    assert form_of(dataclasses.replace(case, value_group=64).spec) is None


def test_heads_are_shared_out_evenly_among_calls():
    spec = FOUR.spec  # up to 16 rows
    asked = (8,), (16,), (24,), (8, 4), (4, 16), (4, 17), (129,)
    assert [dispatch.at_once(spec, *sizes) for sizes in asked] == [8, 16, 12, 4, 1, 0, 0]
    assert dispatch.at_once(dataclasses.replace(spec, key_slots=13), 1) == 0


@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.nightly), 2, 3])
def test_shared_out_heads_come_back_in_order(some):
    body, key, value = make_body(FOUR)
    q, start, stop = make_query(dataclasses.replace(FOUR, length=2))
    plain = functools.partial(reference.packed_attention, spec=FOUR.spec)
    got = dispatch._shared_out(plain, some, FOUR.spec)(q, body, 1, start, stop)
    agree(got, oracle(q, key, value, start, stop), key, value, q)


def test_table_is_printed_by_form_and_chip(capsys):
    support.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(support.TABLE) + 2
    for line, bits, hopper in ((2, 2, "verified on NVIDIA H100 80GB HBM3"), (3, 3, "compiled")):
        assert (
            lines[line] == f"| kivi {bits} bits |  |{' simulated |' * 4}  |  |  |  | {hopper} |  |"
        )
    assert all(set(row) <= set(TARGETS) for row in support.TABLE.values())
    assert support.lookup(KernelForm("kivi", 4, 4), "sm75") is support.lookup(None, "v5e") is None


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (KernelForm("kivi", 4, 2, 64, group=32), "kivi 4 and 2 bits, head_dim 64, groups of 32"),
        (KernelForm("kvquant", 3, 3, outliers=True), "kvquant 3 bits, outliers"),
        (KernelForm("exact"), "exact"),
        (KernelForm("omniscale", 4, 4, group=32), "omniscale 4 bits, groups of 32"),
        (KernelForm("kvarn", 4, 2), "kvarn 4 and 2 bits"),
        (KernelForm("oscar", 2, 2), "oscar 2 bits"),
        (SPLASH, "splash"),
    ],
)
def test_forms_have_names_that_saved_verdicts_know(form, name):
    """A verdict's file is found by the printed name: it must not change."""
    assert str(form) == name


def test_printed_forms_are_all_different():
    assert len({str(form) for form in support.TABLE}) == len(support.TABLE)


def test_a_chip_that_found_a_kernel_right_is_named_by_its_level(monkeypatch):
    """Dispatch takes kernels of every level but `compiled`, unless they are trusted."""
    form, spec = KernelForm("kivi", 4, 4), FOUR.spec
    levels = {
        support.COMPILED: "reference",
        support.SIMULATED: "tpu",
        support.verified("TPU v6 lite"): "tpu",
    }
    assert list(levels)[2] == "verified on TPU v6 lite"
    for level, path in levels.items():
        monkeypatch.setitem(support.TABLE[form], "v6e", support.Entry(level, 8))
        assert dispatch.path(spec, 4, 512) == path
        assert dispatch.path(spec, 4, 512, trusted=True) == "tpu"


def recorded_case(form: KernelForm) -> str:
    """The case of benchmarks/tpu_bundles.py that a form of the table stands on."""
    size = "" if form.head_dim == 128 else f"-d{form.head_dim}"
    # The most that are compiled.
    rows = {"-d96": "-r2", "-d64": "" if form.method == "kivi" else "-r4"}.get(size, "")
    if form.method == "kvquant":
        return f"nuq{form.key_bits}{size}{rows}" + "-o12" * form.outliers
    name = f"k{form.key_bits}v{form.value_bits}-g{form.group}{size}{rows}"
    return name + {"kivi": "", "kivi_star": "-pre"}.get(form.method, f"-{form.method}")


@functools.cache
def recorded_bundles() -> dict:
    return json.loads(
        (Path(__file__).parents[2] / "benchmarks" / "records" / "tpu_bundles.json").read_text()
    )


ROTATED = ("omniscale", "kvarn", "oscar")
# Totals over those of KIVI at the same bits and groups where they are above 1.15, as
# docs/methods/rotation.md says.
DEARER = {(KernelForm("omniscale", 2, 2), "v5p"): 1.17}
DEARER |= {(KernelForm("kvarn", 2, 2), "v7x"): 1.23, (KernelForm("kvarn", 4, 4), "v7x"): 1.17}


@pytest.mark.parametrize(
    "form", [form for form in support.TABLE if form.method in ROTATED], ids=str
)
def test_rotated_bodies_cost_a_seventh_at_most(form):
    """Of the bundles of KIVI at the same bits and groups, on chips that have the kernel, but for
    what is named."""
    kivi = dataclasses.replace(form, method="kivi")
    for target in set(support.TABLE[form]) & set(TPUS):
        own, other = (recorded_bundles()[target][recorded_case(x)]["total"] for x in (form, kivi))
        assert own <= DEARER.get((form, target), 1.15) * other, target
        assert ((form, target) in DEARER) == (own > 1.15 * other), target


# Records of their own, and tests of their own that the table follows from them.
OWN_RECORD = ("higgs", "exact")
GPUS_ALONE = ("klt", "turboquant")  # no kernel for TPUs reads them
# Bundles that 512 tokens of K and V of a KV head add, head_dim 128, 8 query rows; and what a tile
# may cost besides.
BUDGETS = {
    KernelForm("kivi", 2, 2): {"v5e": 135, "v6e": 85, "v7x": 78},
    KernelForm("kivi", 4, 4): {"v5e": 125, "v6e": 88, "v7x": 60},
    KernelForm("kivi", 8, 8): {"v5e": 130, "v6e": 90, "v7x": 85},
}
FIXED_BUDGET = 220
# For keys before RoPE all bundles for as many tokens, head_dim 128, and of other sizes in
# proportion: those in which the chip's memory delivers as many keys and values as bfloat16. Within
# them no exact cache can be faster.
EXACT = {"v5e": 480, "v6e": 280, "v7x": 156}
# Chips on which a form is within its budget.
WITHIN = dict.fromkeys(BUDGETS, ("v5e", "v6e", "v7x"))
WITHIN |= {KernelForm("kivi_star", bits, bits): ("v5e", "v6e") for bits in (2, 3, 4)}
WITHIN |= {KernelForm("kivi_star", bits, bits, group=32): ("v5e", "v6e") for bits in (2, 4)}
WITHIN |= {KernelForm("kivi_star", bits, bits, 64): ("v5e", "v6e") for bits in (2, 4)}
WITHIN |= {KernelForm("kvquant", 2, 2, dim): ("v5e", "v6e") for dim in (64, 128)}
WITHIN |= {KernelForm("kvquant", 3, 3, dim): ("v5e",) for dim in (64, 128)}


def is_within(form: KernelForm, target: str, found: dict) -> bool:
    if form.method in ("kivi", *ROTATED):
        budget = BUDGETS.get(form, {}).get(target, 0)
        return found["marginal"] <= budget and found["fixed"] <= FIXED_BUDGET
    return found["total"] <= form.head_dim / 128 * EXACT.get(target, 0)


def test_the_table_follows_from_the_record():
    """TPU kernels have rows where they were compiled without spills, and those that were within
    their budgets still are."""
    forms = [form for form in support.TABLE if form.method not in (*OWN_RECORD, *GPUS_ALONE)]
    for form in forms:
        name = recorded_case(form)
        found = {
            target: recorded_bundles()[target][name]
            for target in TPUS
            if name in recorded_bundles()[target]
        }
        unspilt = {target for target, row in found.items() if row["spills"] == 0}
        assert set(support.TABLE[form]) & set(TPUS) == unspilt, form
        assert form.method in ROTATED or unspilt == set(TPUS), form
        assert tuple(t for t in found if is_within(form, t, found[t])) == WITHIN.get(form, ()), form
    assert set(WITHIN) <= set(forms)
