"""Count compiled programs (benchmarks/compiled_cost): hand-written HLO, small programs compiled for
CPUs, the bound."""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny
from typer.testing import CliRunner

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.generation.loop import STRIDE, decode_steps
from kvqjax.hardware.aot import decode_arguments, layout_for
from kvqjax.hardware.planner import ALONE
from kvqjax.model.loading import config_of
from kvqjax.pallas_kernels.reference import at_once
from kvqjax.parallel.sharding import rules_for

ROOT = Path(__file__).parents[2]

# One step reads a slice of the weights, puts a row into the cache in place, loops over as many
# blocks of codes as argument "length" has of 64 tokens, copies the cache if these are more than
# two, and starts a kernel that runs beside.
PROGRAM = (Path(__file__).parents[1] / "data" / "decode_loop.hlo").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def counter():
    """Import a module of benchmarks/compiled_cost, found after everything installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        yield lambda name: importlib.import_module(f"benchmarks.compiled_cost.{name}")


def counted(counter, text: str, **known):
    """Return {instruction: (times, bytes read, bytes written)} of a step, the walk, and its
    kernels."""
    known = {name: np.asarray(value, np.int32) for name, value in known.items()}
    walked = counter("walk").walk(counter("hlo").parse(text), known)
    kernels = counter("walk").kernels(walked)
    return (
        {visit.instruction.name: (visit.times, *moved) for visit, moved in kernels},
        walked,
        kernels,
    )


def test_bytes_of_each_kernel(counter):
    table, walked, kernels = counted(counter, PROGRAM, length=200)
    assert table["row.4"] == (1, 512 + 4, 1024)  # one row of the stack, and its number
    assert table["stored.4"] == (1, 1024 + 4, 1024)  # in place: only the row
    assert table["decoded"] == (3, 4096, 16384)  # half a byte a code
    assert table["copied"] == (1, 8192, 8192)
    assert table["negated"] == (1, 8192, 8192)  # started, and not counted once more when done
    assert table["product.4"] == (1, 8192 + 2048, 8192)  # not its workspace
    assert {name for name in table if name.startswith(("begun", "ended"))} == set()
    parts = {visit.instruction.name: visit.part for visit, _ in kernels}
    assert (parts["decoded"], parts["row.4"], parts["stored.4"]) == ("attention", "weights", "rest")
    assert [visit.instruction.name for visit, _ in kernels if visit.once] == ["once"]
    assert walked.unsure == []
    # The step's own condition, four of the blocks' and a branch.
    assert walked.syncs == 1 + 4 + 1


@pytest.mark.parametrize(
    ("length", "blocks", "long"), [(0, 0, False), (127, 1, False), (192, 3, True)]
)
def test_loops_and_branches_follow_the_length(counter, length, blocks, long):
    table, walked, _ = counted(counter, PROGRAM, length=length)
    assert table.get("decoded", (0,))[0] == blocks
    assert ("copied" in table) == long
    assert walked.syncs == 1 + blocks + 1 + 1


def test_what_cannot_be_known_is_named(counter):
    """Without the length a loop counts once, and a branch at its costliest."""
    table, walked, _ = counted(counter, PROGRAM)
    assert table["decoded"][0] == 1
    assert "copied" in table
    assert [reason.split(":")[0] for reason in walked.unsure] == ["blocks", "chosen.4"]
    assert all(reason.endswith("length") for reason in walked.unsure)


@pytest.fixture(scope="module")
def compiled():
    """The decode loop of a tiny model through KIVI, compiled for this machine: 2 layers, 2 rows of
    4096 tokens."""
    config, method = tiny().config, kvq.parse("kivi:bits=2,group=32,window=32")
    rules = rules_for(config, method, ALONE, jax.devices()[:1])
    arguments = decode_arguments(config, method, 4096, 2, rules)
    return config, method, decode_steps.lower(*arguments).compile().as_text()


@pytest.mark.nightly
def test_decode_loop_of_a_tiny_model(compiled, counter):
    """Blocks of the body are read as far as each row reaches; nothing is encoded at rest, one unit
    when due."""
    config, method, text = compiled
    account, program = counter("account"), counter("hlo").parse(text)
    layout = layout_for(config, method, 4096, "cpu")

    def visits(*rows):
        walked = counter("walk").walk(program, account.known_arguments(layout, list(rows)))
        assert walked.unsure == []
        return walked, sum(
            v.times for v in walked.visits if v.part == "attention" and v.instruction.op == "fusion"
        )

    short, long = (account.resting(layout, length) for length in (1100, 4096))
    (low, low_count), (high, high_count), mixed = (
        visits(short, short),
        visits(long, long),
        visits(short, long),
    )
    run = runs_of(layout)[0]
    block = at_once(run.wiring.fast.packed.spec, config.num_heads, run.slots)
    # A window of 32, encoded 32 at a time.
    blocks = [-(-((tokens - 32) // 32 * 32) // block) for tokens in (short, long)]
    layers, rows = config.num_layers, 2
    assert high.syncs - low.syncs == layers * rows * (blocks[1] - blocks[0]) > 0
    assert low_count < high_count
    assert 2 * mixed[1] == low_count + high_count
    ((tokens, unit),) = account.encoding(layout, 4096)
    assert unit == 32
    assert visits(short, tokens)[0].syncs > visits(short, tokens + 1)[0].syncs
    assert {visit.part for visit in visits(long, long)[0].visits} == {
        "attention",
        "weights",
        "rest",
    }


def test_sources_of_parts_exist(counter):
    """A source file that is renamed takes its part of the account with it."""
    paths = [*(ROOT / "kvqjax").rglob("*.py"), ROOT / "pallas_kernels"]
    assert not [
        name
        for name in counter("hlo").SOURCES
        if not any(name in path.as_posix() for path in paths)
    ]


def test_static_lengths_by_a_switch(counter):
    """A switch over static lengths takes the branch that fits the longest row, and a flush only
    when one is due."""
    sizes = 64, 256, 1024

    def loop(lengths, x):
        def step(state):
            count, x = state
            lines = [lambda x, n=n: x.at[:n].set(jnp.sort(x[:n], 0)) for n in sizes]
            x = jax.lax.switch(jnp.searchsorted(jnp.asarray(sizes), lengths.max()), lines, x)
            x = jax.lax.cond((lengths % 32 == 0).any(), lambda x: jnp.sort(x.T).T, lambda x: x, x)
            return count + 1, x

        return jax.lax.while_loop(lambda state: state[1][0, 0] < 3, step, (0, x))[1]

    shapes = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    program = counter("hlo").parse(jax.jit(loop).lower(*shapes).compile().as_text())
    for lengths, size, flushed in (
        ([3, 5], 64, False),
        ([3, 96], 256, True),
        ([1000, 1], 1024, False),
    ):
        walked = counter("walk").walk(program, {"lengths": np.asarray(lengths, np.int32)})
        assert walked.unsure == []
        sorts = [
            visit.instruction.shape for visit in walked.visits if visit.instruction.op == "sort"
        ]
        assert [*map(counter("hlo").dimensions, sorts)] == [(size, 8)] + [(8, 1024)] * flushed


def test_known_values_of_a_compiled_program(counter):
    """Bounds that a compiler has fused: as many turns as numpy says."""

    def loop(lengths, offset):
        turns = jnp.maximum(-(-lengths.max() // 48), 1) + (offset[0] >> 1).astype(jnp.int32)

        def step(state):
            count, x = state
            x = jax.lax.fori_loop(
                0, turns + jnp.where(lengths[1] > 5, 2, 0), lambda _, y: jnp.sin(y) + 1, x
            )
            return count + 1, x

        return jax.lax.while_loop(lambda state: state[1].sum() < 3, step, (0, jnp.zeros((8, 128))))[
            1
        ]

    shapes = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = jax.jit(loop).lower(*shapes).compile().as_text()
    for lengths, offset, turns in (
        ([100, 6, 3], 4, 3 + 2 + 2),
        ([0, 0, 0], 0, 1),
        ([1, 2, 480], 1, 10),
    ):
        known = {
            "lengths": np.asarray(lengths, np.int32),
            "offset": np.asarray([offset, 0], np.uint32),
        }
        walked = counter("walk").walk(counter("hlo").parse(text), known)
        assert walked.unsure == []
        assert walked.syncs == 1 + turns + 1


TPU_PROGRAM = """HloModule jit_loop

ENTRY %main (words: u32[2,4,1024]) -> f32[8,128] {
  %words = u32[2,4,1024]{2,1,0:T(8,128)} parameter(0), metadata={op_name="words"}
  %fetch = (bf16[64,128]{1,0:T(8,128)S(1)}, bf16[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %weights = bf16[64,128]{1,0:T(8,128)} parameter(1)
  %near = bf16[64,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %bytes = s8[32768]{0} parameter(2)
  %part = ((s8[32768]{0:T(1024)}), s8[4096]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%bytes), slice={[0:4096]}
  %there = s8[4096]{0:T(1024)S(1)} slice-done(%part)
  %out = f32[8,128]{1,0:T(8,128)S(1)} fusion(%near), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"700"}
  ROOT %packed_attention_k2v2_2048.7 = f32[8,128]{1,0} custom-call(%words), custom_call_target="tpu_custom_call"
}

%x (near: bf16[64,128]) -> f32[8,128] {
  %inside = bf16[64,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %made = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%inside), custom_call_target="x"
}
"""


BUNDLE = "  0x1   :  > { %x }\n"
PACKED = "packed_attention_k2v2_2048.7"


def write_schedule(folder, bundles):
    """Write a kernel's schedule as libtpu does, and beside it the analysis, of which nothing is
    counted."""
    (folder / f"179-{PACKED}-01-final_bundles.txt").write_text(bundles * BUNDLE)
    (folder / f"179-{PACKED}-00-schedule-analysis_final_bundles.txt").write_text(9 * BUNDLE)
    (folder / "180-fusion.3-01-final_bundles.txt").write_text(5 * BUNDLE)


def test_tpu_kernels_and_fast_memory(counter, tmp_path):
    """A tile takes the longer of its bundles and its bytes, for each tile of a row's own length;
    what lies in the chip's fast memory costs no bytes."""
    tpu, (table, _, kernels) = counter("tpu"), counted(counter, TPU_PROGRAM)
    assert table["fetch"] == (1, 16384, 0)
    assert table["part"] == (1, 4096, 0)
    assert {"near", "there"}.isdisjoint(table)
    assert table["out"] == (1, 0, 0)
    (visit,) = [visit for visit, _ in kernels if visit.instruction.name == PACKED]
    assert tpu.is_kernel(visit.instruction)

    def price():
        return tpu.packed_cost(visit, tmp_path, "v6e", [5000, 2048, 0], token_bytes=100.0)

    with pytest.raises(ValueError, match="no schedule of its kernel was written"):
        price()
    write_schedule(tmp_path, 1000)
    cycles, moved = price()  # 3, 1 and no tiles
    assert (cycles, moved.read) == (4 * 1000, 4 * 204800)
    write_schedule(tmp_path, 10)
    assert price()[0] == pytest.approx(4 * 204800 / 1640e9 * 1.75e9)


def test_slice_of_a_stack_laid_out_anew(counter):
    """A copy inside a fusion changes no more than the slice that is taken of it."""
    text = """HloModule jit_f

%anew (x: bf16[4,256]) -> bf16[4,256] {
  %x.1 = bf16[4,256]{1,0} parameter(0)
  ROOT %y.1 = bf16[4,256]{0,1} copy(%x.1)
}

%layer (x: bf16[4,256], at: s32[]) -> bf16[1,256] {
  %x.2 = bf16[4,256]{1,0} parameter(0)
  %at.2 = s32[] parameter(1)
  %y.2 = bf16[4,256]{0,1} fusion(%x.2), kind=kLoop, calls=%anew
  ROOT %z.2 = bf16[1,256]{0,1} dynamic-slice(%y.2, %at.2, %at.2), dynamic_slice_sizes={1,256}
}

ENTRY %main (x: bf16[4,256], at: s32[]) -> bf16[1,256] {
  %x.3 = bf16[4,256]{1,0} parameter(0)
  %at.3 = s32[] parameter(1)
  ROOT %z.3 = bf16[1,256]{0,1} fusion(%x.3, %at.3), kind=kLoop, calls=%layer
}
"""
    assert counted(counter, text)[0] == {"z.3": (1, 512 + 4, 512)}


@pytest.mark.nightly
def test_tpu_step_adds_estimates_and_kernels(counter, tmp_path):
    account, config = counter("account"), tiny().config
    layout = layout_for(config, kvq.parse("kivi:bits=2,group=32,window=32"), 8192, "v6e")
    write_schedule(tmp_path, 10**6)
    rows = [account.resting(layout, 8192)]
    step = account.step_costs(counter("hlo").parse(TPU_PROGRAM), "v6e", layout, rows, tmp_path)
    # Nothing of it is in the loop over steps.
    assert step.total == pytest.approx((700 + 4 * 10**6) / STRIDE / 1.75e9)
    assert step.syncs == 0


def test_shares_of_a_schedules_slots(counter):
    """One bundle before the grid, whose slots do not count; in the grid two bundles, and between
    them a loop of three turns of two bundles."""
    schedule = importlib.import_module("benchmarks.schedule")
    body = "  0x2 LB: > { %x }\n  0x3   : >> { %y; scmp.ge.s32.totalorder %z, 3 /* loop exit test */ }\n"
    listing = f"  0   :  {{ %begin }}\n  0x1 LB: > {{ %a }}\n{body.replace('LB: >', 'LB: >>')}  0x4   : > {{ %b }}\n"
    rows = "2 4 0\n1 0 0\n1 0 0\n1 2 0\n0 0 0\n"
    table = f"== CAPACITY:\nMXU, VALU, VLOAD:FILL\n    2     4     3\n== UTILIZATION:\n{rows}"
    assert schedule.turns(listing) == [0, 1, 3, 3, 1]
    assert schedule.busy(listing, table) == {"MXU": 0.438, "VALU": 0.188}


@pytest.mark.parametrize(("context", "milliseconds"), [(8192, 4.80), (32768, 5.76), (131072, 9.61)])
def test_bound(counter, context, milliseconds):
    """Llama-3.1-8B on an h100: 7.504 billion weights that are read, 65 536 keys and values a token,
    3.35 TB/s."""
    account, config = counter("account"), config_of("llama-3.1-8b")
    least = account.bound(config, [context])
    assert least.attention == context * 65536 * 2
    assert least.weights == pytest.approx(7.504e9 * 2, rel=1e-3)
    assert 1e3 * least.total / account.bandwidth("h100") == pytest.approx(milliseconds, rel=2e-3)
    assert account.bound(config, [context, context // 2]).attention == 1.5 * least.attention


def test_extrapolated_layers(counter):
    low, high = (
        {"n": 100, "x": 1.5, "of": {"a": 2}, "name": "v6e"},
        {"n": 140, "x": 2.0, "of": {"a": 2}, "name": "v6e"},
    )
    assert counter("case").extrapolate(low, high, 15.0) == {
        "n": 700,
        "x": 9.0,
        "of": {"a": 2},
        "name": "v6e",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chip", "h300"], "known: h100, h200"),
        (["--cache", "kivy"], "kivy"),
        (["--model", "llama-9"], "llama-9"),
        (["--layers", "2"], "two depths"),
        (["--context", "4096", "--held", "8192"], "more than the context"),
        (["--context", "4096", "--held", "2048", "--chunk", "0"], "a prompt has no rows"),
    ],
)
def test_bad_options_are_named(counter, options, message):
    # `counter` has put the tree on the path
    command = importlib.import_module("benchmarks.step_cost")
    result = CliRunner().invoke(command.app, options)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_account_of_a_step(counter, compiled):
    config, method, text = compiled
    layout, account = layout_for(config, method, 4096, "cpu"), counter("account")
    record = account.step_record(counter("hlo").parse(text), "h100", layout, [4096] * 2, Path())
    record = json.loads(
        json.dumps(record | account.step_summary(record, "h100", config, [4096] * 2))
    )
    moved = sum(part["read"] + part["written"] for part in record["bytes"].values())
    assert record["bytes_over_bound"] == pytest.approx(moved / sum(record["bound_bytes"].values()))
    assert min(record["attention_over_bound"], record["weights_over_bound"]) > 1
    least = account.LAUNCH * record["launches"] + account.SYNC * record["syncs"]
    assert record["estimated_ms"] >= 1e3 * least * 0.99
    case = counter("case")
    lines = case.report(case.Case("h100", "tiny", "kivi", 4096, 2), record).splitlines()
    assert f"launches             {record['launches']}" in lines
