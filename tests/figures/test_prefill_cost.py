"""Count prompts (benchmarks/compiled_cost): products, the least a prompt needs, blocks that splash
leaves out."""

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.prompts import REACHED, estimated_seconds, prompt_operations
from kvqjax.model.loading import config_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counter():
    """Import a module of benchmarks/compiled_cost, found after everything installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        yield lambda name: importlib.import_module(f"benchmarks.compiled_cost.{name}")


def test_products_of_a_loop_are_counted_by_its_trips(counter):
    def chain(x, w, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x @ w, x)

    made = jax.jit(chain).lower(jnp.zeros((8, 16)), jnp.zeros((16, 16)), jnp.int32(0)).compile()
    program, operations = counter("hlo").parse(made.as_text()), counter("account").operations
    walked = counter("walk").walk(program, {"count": np.asarray(3, np.int32)}, per_step=False)
    products = [
        visit.times * operations(program, visit.instruction, visit.computation)
        for visit in walked.visits
    ]
    assert sum(products) == 3 * 2 * 8 * 16 * 16
    assert walked.syncs == 3 + 1
    assert walked.unsure == []


def test_the_least_that_a_prompt_needs():
    """Weights of two layers for each token, the head for one, scores and sums over what each token
    sees."""
    config, least = tiny().config, prompt_operations
    # q, k and v, o, the MLP, two norms.
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * 32
    assert least(config, 0, 1) == 2 * (2 * layer + 50 * 32) + 2 * 4 * 64 * 1
    assert least(config, 0, 3) - least(config, 0, 2) == 2 * 2 * layer + 2 * 4 * 64 * 3
    assert least(config, 10, 1) - least(config, 0, 1) == 2 * 4 * 64 * 10
    slides = dataclasses.replace(config, sliding_window=4)
    assert least(slides, 10, 1) - least(slides, 0, 1) == 2 * 4 * 64 * 3
    chunked = dataclasses.replace(slides, chunked=True)  # token 10 is the third of its chunk
    assert least(chunked, 10, 1) - least(chunked, 0, 1) == 2 * 4 * 64 * 2
    assert least(chunked, 0, 8) == 8 * least(chunked, 0, 1) - 7 * 2 * 50 * 32 + 2 * 4 * 64 * 12


def test_prompts_are_estimated_for_chips_whose_programs_were_compiled():
    config = config_of("llama-3.1-8b")
    for chip in REACHED:
        least = prompt_operations(config, 0, 32768) / (DEVICES[chip].tflops * 1e12)
        assert least < estimated_seconds(config, 32768, 1, chip) < 5 * least
    assert estimated_seconds(config, 32768, 1, "t4") is None


def test_blocks_of_splash_attention(counter):
    tpu = counter("tpu")
    # Chunks of 2048 after 0, 2048, 4096, 6144 tokens: their two blocks of queries see so many of
    # four blocks of keys.
    assert tpu.seen(2048, 8192, 8192, None) == ((2 + 4 + 6 + 8) / 4, 8)
    assert tpu.seen(2048, 8192, 0, None) == (8, 8)
    # A window reaches one block back at most.
    assert tpu.seen(2048, 8192, 8192, 1024)[0] == (2 + 3 * 3) / 4
    lines = [
        " 0x1 LB: > { }",
        " 0x2 : > { }",
        " 0x3 PF: > { }",
        " 0x4 : > { }",
        " 0x5 : > { }",
        " 0x6 PF: > { }",
    ]
    assert tpu.block_bundles("\n".join(lines)) == (6, 3)


SPLASH = """
HloModule m
ENTRY %main (q: bf16[4,128]) -> f32[4,128] {
  %q = bf16[4,128]{1,0} parameter(0)
  ROOT %splash.9 = f32[4,128]{1,0} custom-call(%q), custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[4,128]{1,0}}, backend_config={"custom_call_config":{"body":"PROGRAM"}}
}
"""


def test_a_call_has_the_schedule_of_its_kernel(counter, tmp_path):
    """libtpu writes the text of a call beside its schedule. Of two schedules of one kernel a call
    has the one that bears its name, else the longer one."""
    tpu = counter("tpu")
    call = counter("hlo").parse(SPLASH).computations["main"].instructions["splash.9"]
    short, long = (
        f" 0x1 LB: > {{ }}\n 0x2 : > {{ }}\n 0x3 PF: > {{ }}{end}" for end in ("", "\n 0x4 : > { }")
    )

    def write(name, kernel, schedule):
        text = SPLASH.replace("PROGRAM", kernel)
        (tmp_path / f"1-{name}-00-schedule-analysis_final_bundles.txt").write_text(text)
        (tmp_path / f"1-{name}-01-final_bundles.txt").write_text(schedule)

    write("splash.7", "ANOTHER", long)
    with pytest.raises(ValueError, match=r"splash\.9: no schedule of its kernel was written"):
        tpu.schedule(tmp_path, call)
    write("splash.8", "PROGRAM", short)
    assert tpu.schedule(tmp_path, call) == short
    write("splash.6", "PROGRAM", long)
    assert tpu.schedule(tmp_path, call) == long
    write("splash.9", "PROGRAM", short)
    assert tpu.schedule(tmp_path, call) == short
