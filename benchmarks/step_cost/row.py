"""One case: a chip, a model, a cache, a context and a batch, compiled and counted."""

import dataclasses
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Lowered

from benchmarks.step_cost.account import account, target_of
from benchmarks.step_cost.bound import CLOCKS, NAMES, cache_bytes, make_layout, row_lengths
from benchmarks.step_cost.hlo import Program, parse
from kvqjax.cache import CacheLayout
from kvqjax.cache.reach import reach_for
from kvqjax.hardware.aot import lower_decode
from kvqjax.methods import parse as parse_method
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import config_of

CHIPS = ("h100", "h200", "a100-80", "v6e", "v5e", "v7x")
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


class Compiled(NamedTuple):
    """A program and what its compiler says of memory, in bytes, and how long it took."""

    program: Program
    layout: CacheLayout
    temporaries: int
    arguments: int
    seconds: float


def programs(row: Row, layout: CacheLayout, held: int | None = None) -> list[list[int]]:
    """Lengths of rows that differ in the program that `generate` chooses for them: full rows, whose longest holds
    `held` tokens if not the context, and ragged ones if those have one of their own."""
    full, ragged = (row_lengths(held or row.context, row.batch, ragged) for ragged in (False, True))
    return [full] if reach_for(layout, full) == reach_for(layout, ragged) else [full, ragged]


def layout_of(row: Row, config: ModelConfig) -> CacheLayout:
    """The layout of a row's cache."""
    return make_layout(config, parse_method(row.cache), row.context, row.compiled_for)


def lowered(row: Row, config: ModelConfig, lengths: list[int]) -> Lowered:
    """A row's decode loop for rows of these lengths before it is compiled, with whole stack frames, by which its parts
    are told apart."""
    jax.config.update("jax_traceback_in_locations_limit", -1)
    return lower_decode(config, parse_method(row.cache), row.context, row.batch, row.compiled_for, held=lengths)


def compile_row(row: Row, config: ModelConfig, lengths: list[int], dump: Path | None = None) -> Compiled:
    """Compile a row's decode loop for rows of these lengths."""
    layout = layout_of(row, config)
    program = lowered(row, config, lengths)
    begun = time.perf_counter()
    compiled = program.compile()
    seconds, text, memory = time.perf_counter() - begun, compiled.as_text(), compiled.memory_analysis()
    if dump is not None:
        dump.write_text(text, encoding="utf-8")
    temporaries = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(parse(text), layout, temporaries, memory.argument_size_in_bytes, seconds)


def accounts(row: Row, made: list[Compiled], folder: Path, held: int | None = None) -> dict:
    """The account of a compiled row, with full and, of several rows, ragged ones, whose program is the last of `made`;
    the longest holds `held` tokens, if not the context."""
    target = target_of(row.chip, config_of(row.model), made[0].layout, folder if row.is_tpu else None)
    longest = held or row.context
    found: dict = {"full": account(made[0].program, target, row_lengths(longest, row.batch, ragged=False))}
    if row.batch > 1:
        found["ragged"] = account(made[-1].program, target, row_lengths(longest, row.batch, ragged=True))
    temporaries = max(one.temporaries for one in made)
    sizes = {"cache": cache_bytes(made[0].layout, row.batch), "temp": temporaries, "arguments": made[0].arguments}
    found |= {f"{name}_gb": round(size / 1e9, 3) for name, size in sizes.items()}
    return found | {"compile_s": round(made[0].seconds, 1)}


def measure(
    row: Row, folder: Path, depths: tuple[int, ...] = (), dump: Path | None = None, held: int | None = None
) -> dict:
    """Compile one case and give its account. `folder` is where `tpu.prepare` has libtpu put its listings. With two
    `depths`, models of so many layers are compiled and numbers extrapolated. The longest row holds `held` tokens, if
    not the context."""
    config, results = config_of(row.model), []
    for depth in depths or (config.num_layers,):
        for old in folder.iterdir():
            old.unlink()
        part = dataclasses.replace(config, num_layers=depth, sliding_window=config.windows[:depth])
        compiled = [compile_row(row, part, lengths, dump) for lengths in programs(row, layout_of(row, part), held)]
        results.append(accounts(row, compiled, folder, held))
    if not depths:
        return results[0] | about(row)
    share = (config.num_layers - depths[0]) / (depths[1] - depths[0])
    return _line(*results, share) | about(row) | {"layers": list(depths)}


def about(row: Row) -> dict:
    """What compiled a row."""
    packages = ("jax", "libtpu" if row.is_tpu else "jax-cuda13-plugin")
    return {"kind": "tpu" if row.is_tpu else "gpu", "versions": {name: metadata.version(name) for name in packages}}


def _line(low, high, share: float):
    """Numbers extrapolated along a straight line, the rest as it is in `low`."""
    if isinstance(low, dict):
        return {name: _line(x, high[name], share) for name, x in low.items()}
    if isinstance(low, (int, float)):
        at = low + share * (high - low)
        return round(at) if isinstance(low, int) else round(at, 4)
    return low
