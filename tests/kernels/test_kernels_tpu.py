"""The TPU kernel, interpreted, against decoding everything and attending exactly; dispatch and the support table.

Bound: queries times scales, and probabilities times scales, are rounded to bfloat16 (2^-8 relative, half of it on
average); everything else is exact or float32.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import QUICK, Case, agree, make_body, make_query, near, oracle

from kvqjax.pallas_kernels import dispatch, reference, support
from kvqjax.pallas_kernels.packed import TARGETS
from kvqjax.pallas_kernels.tpu import packed as tpu
from kvqjax.pallas_kernels.tpu import rows as tpu_rows
from kvqjax.pallas_kernels.tpu import tile as tpu_tile
from kvqjax.pallas_kernels.tpu.unpack import token_order
from kvqjax.pallas_kernels.tpu.work import Work

FOUR = Case(key_bits=4, value_bits=4, key_group=128, value_group=128, kv_heads=2, head_dim=128, group=4, slots=512)
TWO = Case(key_bits=2, value_bits=2, key_group=64, value_group=32, kv_heads=2, head_dim=64, group=2, slots=512)
EIGHT = Case(
    key_bits=8, value_bits=8, key_group=64, value_group=48, kv_heads=4, head_dim=96, group=1, length=2, slots=256
)
MIXED = Case(key_bits=3, value_bits=2, key_group=128, value_group=64, kv_heads=2, head_dim=64, group=2, target="v5e")
# KIVI's groups: key scales multiply the codes, in bfloat16 or (v5e) in float32
SMALL = Case(
    key_bits=2, value_bits=2, key_group=32, value_group=32, kv_heads=1, head_dim=128, group=4, slots=512, target="v6e"
)
SMALL4 = dataclasses.replace(SMALL, key_bits=4, value_bits=4, target="v5e")
SCALED = dataclasses.replace(FOUR, key_bits=2, value_bits=2, key_factors=1, slots=1024, target="v6e")
BALANCED = dataclasses.replace(SCALED, key_factors=2, value_factors=True)
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
    (dataclasses.replace(FOUR, kv_heads=1, group=16, slots=256, target="v6e"), {}),
    (FOUR, {"work": Work(512, 2)}),
    (FOUR, {"work": Work(512, 2, -1)}),
    (dataclasses.replace(SMALL, target="v7x"), {}),
    (dataclasses.replace(FOUR, kv_heads=4, head_dim=96, value_group=96, group=2, target="v6e"), {}),
    (SCALED, {"work": Work(512, 1, 0), "splits": 2}),
    (dataclasses.replace(SMALL, key_factors=1, kv_heads=2), {}),
    (dataclasses.replace(SCALED, target="v5e", key_factors=4, kv_heads=4, head_dim=64, value_group=64, group=2), {}),
    (BALANCED, {"work": Work(512, 1, 0)}),
    (dataclasses.replace(BALANCED, target="v5e", kv_heads=4, key_factors=4, head_dim=64, value_group=64, group=2), {}),
    (dataclasses.replace(BALANCED, key_bits=4, target="v7x", length=2), {"work": Work(1024, 2)}),
    (dataclasses.replace(BALANCED, key_bits=4, value_bits=4, target="v5e", slots=512), {"work": Work(512, 1, 1)}),
]


@functools.cache
def compiled(case: Case, **options):
    return jax.jit(lambda *args: tpu.packed_attention(*args, case.spec, **options), compiler_options=QUICK)


def attend(case: Case, **options):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    got = compiled(case, **options)(q, body, jnp.int32(1), start, stop)
    return got, oracle(q, key, value, start, stop), key, value, q


@pytest.mark.parametrize(("case", "options"), RUNS, ids=str)
def test_kernel_equals_the_oracle(case, options):
    near(*attend(case, interpret=True, **options))


@pytest.mark.parametrize(
    ("case", "options"),
    [(FOUR, INTERLEAVED), (SMALL4, {"work": Work(256)}), (FOUR, {"work": Work(512, 2)})],
    ids=str,
)
def test_race_free_on_simulated_memory(case, options):
    """Buffers start as NaN, reads out of bounds raise, races are detected."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    near(*attend(case, interpret=params, **options))


def test_scales_prepared_in_parts(monkeypatch):
    """As for tiles and heads too large for these tests."""
    monkeypatch.setattr(tpu_tile, "TOKENS", 256)
    monkeypatch.setattr(tpu_tile, "NUMBERS", 1024)
    near(*attend(dataclasses.replace(FOUR, target="v6e", slots=1024), interpret=True, work=Work(1024, 1, 0)))


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
    start, stop = jnp.array([[500, 600], [512, 700], [0, 3]]), jnp.array([[512, 512], [512, 512], [0, 0]])
    np.testing.assert_array_equal(tpu_rows.tile_ends(start, stop, 256, 512), [[1, 1, 0], [2, 2, 0], [1, 1, 0]])
    body, _, _ = make_body(FOUR)
    q, start, stop = make_query(FOUR)
    start = start.at[1].set(700)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    q = q.astype(jnp.bfloat16).astype(jnp.float32)
    part = compiled(FOUR, interpret=params, **INTERLEAVED)(q, body, jnp.int32(1), start, stop)
    np.testing.assert_array_equal(part.lse[1], -jnp.inf)
    assert np.isfinite(part.lse[0]).all()


def test_dispatch_guards_by_platform():
    """A program traced for a TPU but run here is the reference, and says so for what no kernel covers."""
    case = Case(**{**vars(FOUR), "target": "v6e"})
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    agree(
        dispatch.packed_attention(q, body, 1, start, stop, case.spec), oracle(q, key, value, start, stop), key, value, q
    )
    assert dispatch.path(case.spec, 4, case.slots) == "tpu"
    wide = dataclasses.replace(case, head_dim=96, value_group=96, kv_heads=4)
    assert dispatch.path(case.spec, 16, case.slots, length=4) == dispatch.path(wide.spec, 16, case.slots) == "tpu"
    assert dispatch.path(case.spec, 16, case.slots, length=9) == "reference"
    assert dispatch.path(dataclasses.replace(case.spec, scales="float32"), 4, case.slots) == "reference"
    assert dispatch.path(FOUR.spec, 4, case.slots) == "reference"
    assert dispatch.row_of(dataclasses.replace(SMALL4, value_bits=2).spec) == "kivi 4 and 2 bits, groups of 32"
    assert dispatch.row_of(dataclasses.replace(case, value_group=64).spec) == ""


def test_heads_are_shared_out_evenly_among_calls():
    spec = dataclasses.replace(FOUR, target="v6e").spec  # up to 16 rows
    asked = (8,), (16,), (24,), (8, 4), (4, 16), (4, 17), (129,)
    assert [dispatch.at_once(spec, *sizes) for sizes in asked] == [8, 16, 12, 4, 1, 0, 0]
    assert dispatch.at_once(dataclasses.replace(spec, key_slots=13), 1) == 0


@pytest.mark.parametrize("some", [1, 2, 3])
def test_shared_out_heads_come_back_in_order(some):
    body, key, value = make_body(FOUR)
    q, start, stop = make_query(dataclasses.replace(FOUR, length=2))
    plain = functools.partial(reference.packed_attention, spec=FOUR.spec)
    got = dispatch._shared_out(plain, some, FOUR.spec)(q, body, 1, start, stop)
    agree(got, oracle(q, key, value, start, stop), key, value, q)


def test_table_covers_every_target(capsys):
    support.main()
    assert all(set(row) == set(TARGETS) for row in support.ROWS.values())
    assert support.lookup("kivi 4 bits", "sm75") == "reference"
    assert "| kivi 2 bits |" in capsys.readouterr().out


def recorded_case(method: str) -> str:
    """The case of benchmarks/tpu_bundles.py that a row of the table stands on."""
    kind, (key, *_, value) = method.split()[0], 2 * re.findall(r"\d+", method.split(" bits")[0])
    size = "".join("-d" + dim for dim in re.findall(r"head_dim (\d+)", method))
    rows = {"-d96": "-r2", "-d64": "" if kind == "kivi" else "-r4"}.get(size, "")  # the most that dispatch allows
    if kind == "kvquant":
        return f"nuq{key}{size}{rows}" + ("-o12" if "outliers" in method else "")
    group = 32 if "groups of 32" in method else 128
    form = {"kivi": "", "kivi_star": "-pre"}.get(kind, f"-{kind}")
    return f"k{key}v{value}-g{group}{size}{rows}{form}"


OWN_RECORD = ("xquant", "higgs", "commvq")  # and tests of their own that levels follow from it


@functools.cache
def recorded_bundles() -> dict:
    return json.loads((Path(__file__).parents[2] / "benchmarks" / "records" / "tpu_bundles.json").read_text())


DEARER = {("kvarn 2 bits", "v7x"): 1.29, ("kvarn 4 bits", "v7x"): 1.17}  # as docs/methods/rotation.md says


@pytest.mark.parametrize("method", [row for row in support.ROWS if row.startswith(("omniscale", "kvarn"))])
def test_factors_cost_a_seventh_at_most(method):
    """Of the bundles of KIVI at the same bits and groups, on chips that use the kernel, but for what is named."""
    kivi = re.sub("^[a-z]+", "kivi", method)
    for target in [target for target in TARGETS if support.lookup(method, target) == "correct"]:
        own, other = (recorded_bundles()[target][recorded_case(name)]["total"] for name in (method, kivi))
        assert own <= DEARER.get((method, target), 1.15) * other, target
        assert ((method, target) in DEARER) == (own > 1.15 * other), target


def test_fast_means_within_budget():
    """The table's levels follow from the recorded bundles."""
    record = recorded_bundles()
    for method, row in support.ROWS.items():
        for target in ("v5e", "v5p", "v6e", "v7x"):
            if row[target] not in ("fast", "correct") or method.startswith(OWN_RECORD):
                continue
            found = record[target][recorded_case(method)]
            assert found["spills"] == 0, (method, target)
            if method.startswith(("kivi ", "omniscale ", "kvarn ")):
                budget = support.BUDGETS.get(method, {}).get(target, 0)
                within = found["marginal"] <= budget and found["fixed"] <= support.FIXED_BUDGET
            else:
                share = int((re.findall(r"head_dim (\d+)", method) or ["128"])[0]) / 128
                within = found["total"] <= share * support.EXACT.get(target, 0)
            assert within == (row[target] == "fast"), (method, target)
