"""One case: a chip, a cache, a context, and a whole prompt or a chunk, compiled and counted."""

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.prefill_cost.account import costs, facts, record
from benchmarks.prefill_cost.kernels import kernel_cost
from benchmarks.step_cost.bound import make_layout
from benchmarks.step_cost.hlo import parse
from benchmarks.step_cost.row import Row as Step
from benchmarks.step_cost.row import about
from kvqjax.hardware.aot import lower_chunk, lower_prompt
from kvqjax.methods import parse as parse_method
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import config_of


class Row(NamedTuple):
    """A prompt of `context` tokens at once (`chunk` 0), or the chunk of so many tokens that follows them."""

    chip: str
    model: str
    cache: str
    context: int
    chunk: int = 0

    @property
    def step(self) -> Step:
        return Step(self.chip, self.model, self.cache, self.context, 1)


def compile_row(row: Row, config: ModelConfig, folder: Path, dump: Path | None = None) -> dict:
    """The account of one model's row. `folder` is where `tpu.prepare` has libtpu put its listings."""
    jax.config.update("jax_traceback_in_locations_limit", -1)  # by whole stack frames parts are told apart
    method, chip = parse_method(row.cache), row.step.compiled_for
    layout = make_layout(config, method, row.context + row.chunk, chip)
    if row.chunk:
        lowered = lower_chunk(config, method, row.context, row.chunk, 1, chip)
    else:
        lowered = lower_prompt(config, method, row.context, 1, chip)
    begun = time.perf_counter()
    compiled = lowered.compile()
    spent, text, memory = time.perf_counter() - begun, compiled.as_text(), compiled.memory_analysis()
    if dump is not None:
        dump.write_text(text, encoding="utf-8")
    held, new = (row.context, row.chunk) if row.chunk else (0, row.context)
    price = kernel_cost(folder, row.chip, row.chunk, config.windows[0]) if row.step.is_tpu else None
    found = costs(parse(text), row.chip, facts(layout, held, new, 1), price)
    made = record(found, config, row.chip, held, new, 1)
    made["temp_gb"] = (memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 1e9
    made["peak_gb"] = (memory.peak_memory_in_bytes - memory.argument_size_in_bytes) / 1e9
    return made | {"unsure": found.unsure, "compile_s": spent}


def measure(row: Row, folder: Path, depths: tuple[int, ...] = (), dump: Path | None = None) -> dict:
    """Compile one row; with two `depths`, models of so many layers, and numbers along a straight line through them."""
    config, found = config_of(row.model), []
    for depth in depths or (config.num_layers,):
        for old in folder.iterdir():
            old.unlink()
        found.append(compile_row(row, dataclasses.replace(config, num_layers=depth), folder, dump))
    result = found[0]
    if depths:
        result = _along(*found, (config.num_layers - depths[0]) / (depths[1] - depths[0])) | {"layers": list(depths)}
        # Layers that run one after the other need the most of them: memory may grow with them, but not shrink.
        result |= {name: max(result[name], found[1][name]) for name in ("temp_gb", "peak_gb")}
    result["compile_s"] = sum(one["compile_s"] for one in found)
    return result | {"share_of_peak": result["bound_s"] / result["estimated_s"]} | about(row.step)


def _along(low, high, share: float):
    if isinstance(low, dict):
        return {name: _along(x, high[name], share) for name, x in low.items()}
    return low + share * (high - low) if isinstance(low, (int, float)) else low
