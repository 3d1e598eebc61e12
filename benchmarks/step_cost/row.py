"""One row of the page: a chip, a model, a cache, a context and a batch, compiled and counted."""

import dataclasses
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.step_cost import tpu
from benchmarks.step_cost.account import account, target_of
from benchmarks.step_cost.bound import CLOCKS, NAMES, cache_bytes, make_layout, row_lengths
from benchmarks.step_cost.hlo import parse
from kvqjax.aot import lower_decode
from kvqjax.catalogue import config_of
from kvqjax.config import ModelConfig
from kvqjax.methods import parse as parse_method

SAME = {"h200": "h100"}  # chips whose programs are compiled as another's


class Row(NamedTuple):
    chip: str
    model: str
    cache: str
    context: int
    batch: int

    @property
    def compiled_for(self) -> str:
        chip = SAME.get(self.chip, self.chip)
        return NAMES.get(chip, chip)

    @property
    def is_tpu(self) -> bool:
        return self.compiled_for in CLOCKS


def _one(row: Row, config: ModelConfig, folder: Path, dump: Path | None) -> dict:
    method = parse_method(row.cache)
    layout = make_layout(config, method, row.context, SAME.get(row.chip, row.chip))
    lowered = lower_decode(config, method, row.context, row.batch, row.compiled_for)
    begun = time.perf_counter()
    compiled = lowered.compile()
    seconds, text = time.perf_counter() - begun, compiled.as_text()
    if dump is not None:
        dump.write_text(text, encoding="utf-8")
    memory, program = compiled.memory_analysis(), parse(text)
    target = target_of(row.chip, layout, folder if row.is_tpu else None)
    found = {"full": account(program, target, row_lengths(row.context, row.batch, ragged=False))}
    if row.batch > 1:
        found["ragged"] = account(program, target, row_lengths(row.context, row.batch, ragged=True))
    temporaries = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    found |= {"cache_gb": round(cache_bytes(layout, row.batch) / 1e9, 3), "temp_gb": round(temporaries / 1e9, 3)}
    return found | {"arguments_gb": round(memory.argument_size_in_bytes / 1e9, 3), "compile_s": round(seconds, 1)}


def measure(row: Row, folder: Path, depths: tuple[int, ...] = (), dump: Path | None = None) -> dict:
    """The account of one row; `folder` is for the compiler's listings. With two `depths`, models of so many layers are
    compiled, and every number is extrapolated to the model's."""
    if row.is_tpu:
        tpu.prepare(str(folder))
    config = config_of(row.model)
    if not depths:
        found = _one(row, config, folder, dump)
    else:
        few = [dataclasses.replace(config, num_layers=n, windows=config.windows[:n]) for n in depths]
        low, high = (_one(row, one, folder, dump) for one in few)
        share = (config.num_layers - depths[0]) / (depths[1] - depths[0])
        found = _line(low, high, share) | {"layers": list(depths)}
    versions = {
        package: metadata.version(package) for package in ("jax", "libtpu" if row.is_tpu else "jax-cuda13-plugin")
    }
    return found | {"kind": "tpu" if row.is_tpu else "gpu", "versions": versions}


def _line(low, high, share: float):
    """Numbers extrapolated along a straight line, the rest as it is in `low`."""
    if isinstance(low, dict):
        return {name: _line(x, high[name], share) for name, x in low.items()}
    if isinstance(low, (int, float)):
        at = low + share * (high - low)
        return round(at) if isinstance(low, int) else round(at, 4)
    return low
