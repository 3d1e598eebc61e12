"""Counting compiled programs (benchmarks/step_cost): hand-written HLO, small programs compiled for CPUs, and the
bound."""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.generation.loop import decode_steps
from kvqjax.hardware.aot import decode_arguments
from kvqjax.hardware.planner import ALONE
from kvqjax.pallas_kernels.reference import at_once
from kvqjax.parallel.sharding import rules_for

ROOT = Path(__file__).parents[2]

# One step reads a slice of the weights, puts a row into the cache in place, loops over as many blocks of codes as
# argument "length" has of 64 tokens, copies the cache if these are more than two, and starts a kernel that runs beside.
PROGRAM = (Path(__file__).parents[1] / "data" / "decode_loop.hlo").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def counter():
    """Modules of benchmarks/step_cost, found after everything installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        yield lambda name: importlib.import_module(f"benchmarks.step_cost.{name}")


def counted(counter, text: str, **facts):
    """{instruction: (times, bytes read, bytes written)} of a step, the walk, and its parts."""
    known = {name: np.asarray(value, np.int32) for name, value in facts.items()}
    found = counter("walk").walk(counter("hlo").parse(text), known)
    kernels = counter("gpu").kernels(found)
    return {k.visit.instruction.name: (k.visit.times, *k.bytes) for k in kernels}, found, kernels


def test_bytes_of_each_kernel(counter):
    found, walked, kernels = counted(counter, PROGRAM, length=200)
    assert found["row.4"] == (1, 512 + 4, 1024)  # one row of the stack, and its number
    assert found["stored.4"] == (1, 1024 + 4, 1024)  # in place: only the row
    assert found["decoded"] == (3, 4096, 16384)  # half a byte a code
    assert found["copied"] == (1, 8192, 8192)
    assert found["negated"] == (1, 8192, 8192)  # started, and not counted once more when done
    assert found["product.4"] == (1, 8192 + 2048, 8192)  # not its workspace
    assert {name for name in found if name.startswith(("begun", "ended"))} == set()
    parts = {k.visit.instruction.name: k.visit.part for k in kernels}
    assert (parts["decoded"], parts["row.4"], parts["stored.4"]) == ("attention", "weights", "rest")
    assert [k.visit.instruction.name for k in kernels if k.visit.once] == ["once"]
    assert walked.unsure == []
    # The step's own condition, four of the blocks' and a branch.
    assert walked.syncs == 1 + 4 + 1


@pytest.mark.parametrize(("length", "blocks", "long"), [(0, 0, False), (127, 1, False), (192, 3, True)])
def test_loops_and_branches_follow_the_length(counter, length, blocks, long):
    found, walked, _ = counted(counter, PROGRAM, length=length)
    assert found.get("decoded", (0,))[0] == blocks
    assert ("copied" in found) == long
    assert walked.syncs == 1 + blocks + 1 + 1


def test_what_cannot_be_known_is_named(counter):
    """Without the length a loop counts once, and a branch at its costliest."""
    found, walked, _ = counted(counter, PROGRAM)
    assert found["decoded"][0] == 1
    assert "copied" in found
    assert [reason.split(":")[0] for reason in walked.unsure] == ["blocks", "chosen.4"]
    assert all(reason.endswith("length") for reason in walked.unsure)


@pytest.fixture(scope="module")
def compiled():
    """The decode loop of a tiny model through KIVI, compiled for this machine: 2 layers, 2 rows of 4096 tokens."""
    config, method = tiny().config, kvq.parse("kivi:bits=2,group=32,window=32")
    rules = rules_for(config, method, ALONE, jax.devices()[:1])
    arguments = decode_arguments(config, method, 4096, 2, rules)
    return config, method, decode_steps.lower(*arguments).compile().as_text()


def test_decode_loop_of_a_tiny_model(compiled, counter):
    """Blocks of the body are read as far as the longest row reaches; nothing is encoded at rest, one unit when due."""
    config, method, text = compiled
    bounds, program = counter("bound"), counter("hlo").parse(text)
    layout = bounds.make_layout(config, method, 4096, "cpu")

    def visits(*held):
        found = counter("walk").walk(program, bounds.facts(layout, list(held)))
        assert found.unsure == []
        return found, sum(v.times for v in found.visits if v.part == "attention" and v.instruction.op == "fusion")

    short, long = (bounds.resting(layout, length) for length in (1100, 4096))
    (low, few), (high, most), mixed = visits(short, short), visits(long, long), visits(short, long)
    run = runs_of(layout)[0]
    block = at_once(run.wiring.fast.packed.spec, (2, 1, config.num_heads, config.head_dim), run.slots)
    blocks = [-(-((held - 32) // 32 * 32) // block) for held in (short, long)]  # a window of 32, encoded 32 at a time
    assert high.syncs - low.syncs == 2 * (blocks[1] - blocks[0]) > 0
    assert few < most == mixed[1]
    ((held, unit),) = bounds.encoding(layout, 4096)
    assert unit == 32
    assert visits(short, held)[0].syncs > visits(short, held + 1)[0].syncs
    parts = {visit.part for visit in visits(long, long)[0].visits}
    assert parts == {"attention", "weights", "rest"}


def test_static_lengths_by_a_switch(counter):
    """A switch over static lengths takes the branch that fits the longest row, and a flush only when one is due."""
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
    for lengths, size, flushed in (([3, 5], 64, False), ([3, 96], 256, True), ([1000, 1], 1024, False)):
        found = counter("walk").walk(program, {"lengths": np.asarray(lengths, np.int32)})
        assert found.unsure == []
        sorted_ = [counter("hlo").dimensions(v.instruction.shape) for v in found.visits if v.instruction.op == "sort"]
        assert sorted_ == [(size, 8)] + [(8, 1024)] * flushed


def test_known_values_of_a_compiled_program(counter):
    """Bounds that a compiler has fused: as many turns as numpy says."""

    def loop(lengths, offset):
        turns = jnp.maximum(-(-lengths.max() // 48), 1) + (offset[0] >> 1).astype(jnp.int32)

        def step(state):
            count, x = state
            x = jax.lax.fori_loop(0, turns + jnp.where(lengths[1] > 5, 2, 0), lambda _, y: jnp.sin(y) + 1, x)
            return count + 1, x

        return jax.lax.while_loop(lambda state: state[1].sum() < 3, step, (0, jnp.zeros((8, 128))))[1]

    shapes = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = jax.jit(loop).lower(*shapes).compile().as_text()
    for lengths, offset, turns in (([100, 6, 3], 4, 3 + 2 + 2), ([0, 0, 0], 0, 1), ([1, 2, 480], 1, 10)):
        known = {"lengths": np.asarray(lengths, np.int32), "offset": np.asarray([offset, 0], np.uint32)}
        found = counter("walk").walk(counter("hlo").parse(text), known)
        assert found.unsure == []
        assert found.syncs == 1 + turns + 1


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


def test_tpu_kernels_and_fast_memory(counter):
    """A tile takes the longer of its bundles and its bytes, for each tile of a row's own length; what lies in the
    chip's fast memory costs no bytes."""
    tpu, found = counter("tpu"), counted(counter, TPU_PROGRAM)[0]
    assert found["fetch"] == (1, 16384, 0)
    assert found["part"] == (1, 4096, 0)
    assert {"near", "there"}.isdisjoint(found)
    assert found["out"] == (1, 0, 0)
    kernel = counter("hlo").parse(TPU_PROGRAM).computations["main"].instructions["packed_attention_k2v2_2048.7"]
    assert tpu.is_kernel(kernel)
    reading = tpu.Reading([5000, 2048, 0], token_bytes=100.0)  # 3, 1 and no tiles
    cycles, moved = tpu.kernel_cost(kernel, {kernel.name: 1000}, reading, "v6e")
    assert (cycles, moved.read) == (4 * 1000, 4 * 204800)
    slow, _ = tpu.kernel_cost(kernel, {kernel.name: 10}, reading, "v6e")
    assert slow == pytest.approx(4 * 204800 / 1640e9 * 1.75e9)
    with pytest.raises(ValueError, match="its schedule was not written"):
        tpu.kernel_cost(kernel, {}, reading, "v6e")


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


def test_tpu_step_adds_estimates_and_kernels(counter):
    bounds, account = counter("bound"), counter("account")
    layout = bounds.make_layout(tiny().config, kvq.parse("kivi:bits=2,group=32,window=32"), 8192, "v6e")
    target = account.Target("v6e", {"packed_attention_k2v2_2048.7": 10**6}, tiny().config, layout)
    step = account.step(counter("hlo").parse(TPU_PROGRAM), target, [bounds.resting(layout, 8192)])
    assert sum(step.work.values()) == pytest.approx((700 + 4 * 10**6) / 16)  # nothing of it is in a loop over steps
    assert (step.syncs, step.seconds) == (0, pytest.approx(sum(step.work.values()) / 1.75e9))


def test_listings_of_schedules(counter, tmp_path):
    """Bundles by the whole name; of the two listings of a kernel, the schedule itself."""
    bundle = "  0x1   :  > { %x }\n"
    (tmp_path / "179-packed_attention_k2v2_2048.7-01-final_bundles.txt").write_text(3 * bundle)
    (tmp_path / "179-packed_attention_k2v2_2048.7-00-schedule-analysis_final_bundles.txt").write_text(9 * bundle)
    (tmp_path / "180-fusion.3-01-final_bundles.txt").write_text(5 * bundle)
    assert counter("tpu").listings(tmp_path) == {"packed_attention_k2v2_2048.7": 3}


def test_shares_of_a_schedules_slots(counter):
    """One bundle before the grid, whose slots do not count; in the grid two bundles, and between them a loop of three
    turns of two bundles."""
    schedule = importlib.import_module("benchmarks.schedule")
    body = "  0x2 LB: > { %x }\n  0x3   : >> { %y; scmp.ge.s32.totalorder %z, 3 /* loop exit test */ }\n"
    listing = f"  0   :  {{ %begin }}\n  0x1 LB: > {{ %a }}\n{body.replace('LB: >', 'LB: >>')}  0x4   : > {{ %b }}\n"
    rows = "2 4 0\n1 0 0\n1 0 0\n1 2 0\n0 0 0\n"
    table = f"== CAPACITY:\nMXU, VALU, VLOAD:FILL\n    2     4     3\n== UTILIZATION:\n{rows}"
    assert schedule.turns(listing) == [0, 1, 3, 3, 1]
    assert schedule.busy(listing, table) == {"MXU": 0.438, "VALU": 0.188}


@pytest.mark.parametrize(("context", "milliseconds"), [(8192, 4.80), (32768, 5.76), (131072, 9.61)])
def test_bound(counter, context, milliseconds):
    """Llama-3.1-8B on an h100: 7.504 billion weights that are read, 65 536 keys and values a token, 3.35 TB/s."""
    config = importlib.import_module("kvqjax.model.loading").config_of("llama-3.1-8b")
    bounds = counter("bound")
    found = bounds.bound(config, [context])
    assert found.attention == context * 65536 * 2
    assert found.weights == pytest.approx(7.504e9 * 2, rel=1e-3)
    assert 1e3 * found.seconds("h100") == pytest.approx(milliseconds, rel=2e-3)
    ragged = bounds.row_lengths(context, 8, ragged=True)
    assert ragged[-1] == context
    assert bounds.bound(config, ragged).attention == pytest.approx(4.5 * found.attention, rel=1e-3)


def test_extrapolated_layers(counter):
    line = counter("row")._line
    low, high = {"n": 100, "x": 1.5, "of": {"a": 2}, "name": "v6e"}, {"n": 140, "x": 2.0, "of": {"a": 2}, "name": "v6e"}
    assert line(low, high, 15.0) == {"n": 700, "x": 9.0, "of": {"a": 2}, "name": "v6e"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chip", "h300"], "known: h100, h200"),
        (["--cache", "kivy"], "kivy"),
        (["--model", "llama-9"], "llama-9"),
        (["--context", "4096", "--held", "8192"], "more than the context"),
    ],
)
def test_bad_options_are_named(counter, options, message):
    from typer.testing import CliRunner

    result = CliRunner().invoke(counter("__main__").app, options)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_account_has_the_promised_keys(counter, compiled):
    config, method, text = compiled
    layout = counter("bound").make_layout(config, method, 4096, "cpu")
    account = counter("account")
    target = account.Target("h100", {}, config, layout)
    found = json.loads(json.dumps(account.account(counter("hlo").parse(text), target, [4096, 2048])))
    promised = {"launches", "syncs", "bytes_over_bound", "attention_over_bound", "estimated_ms"}
    assert promised <= found.keys()
    moved = sum(part["read"] + part["written"] for part in found["bytes"].values())
    assert found["bytes_over_bound"] == pytest.approx(moved / sum(found["bound_bytes"].values()), rel=1e-3)
    least = 3e-6 * found["launches"] + 8e-6 * found["syncs"]
    assert found["estimated_ms"] >= 1e3 * least * 0.99
