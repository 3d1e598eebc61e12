"""One case of `benchmarks.step_cost`: compiled ahead of time, counted and printed."""

import dataclasses
import functools
import json
import re
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import typer
from jax.stages import Lowered

from benchmarks.compiled_cost import account, tpu
from benchmarks.compiled_cost.hlo import numbers, parse
from kvqjax._errors import UserError
from kvqjax.cache import allocate_cache
from kvqjax.cache.accounting import array_bytes
from kvqjax.hardware.aot import layout_for, lower_chunk, lower_decode, lower_prompt
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import parse as parse_method
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import config_of

CHIPS = ("h100", "h200", "a100-80", "l4", "t4", "v6e", "v5e", "v7x")

# Options of both commands.
Chip = Annotated[str, typer.Option(help=", ".join(CHIPS))]
Model = Annotated[str, typer.Option(help="a name, folder or config.json")]
CacheText = Annotated[str, typer.Option("--cache", help="a method, as everywhere")]
Layers = Annotated[str, typer.Option(help="two depths, as 2,4: compile those and extrapolate")]
Dump = Annotated[Path | None, typer.Option(help="write the compiled program here")]
AsJson = Annotated[bool, typer.Option("--json", help="one line of JSON")]


class Case(NamedTuple):
    """A program to compile.

    Attributes:
        context: Tokens of a row: a decode step's room, a prompt's tokens, or the tokens before a
            chunk.
        new: None for a decode step, 0 for a prompt of `context` tokens at once, else the tokens of
            a chunk.
        filled: Tokens that a decode step's rows hold, where fewer than they have room for.
    """

    chip: str
    model: str
    cache: str
    context: int
    batch: int = 1
    new: int | None = None
    filled: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of a decode step's rows, by which `generate` chooses a program of static
        lengths."""
        return [self.filled or self.context] * self.batch

    @property
    def is_tpu(self) -> bool:
        return self.chip in tpu.CLOCKS

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that a prompt's row holds before, and new ones."""
        return (self.context, self.new) if self.new else (0, self.context)


def _lower(case: Case, config: ModelConfig) -> Lowered:
    method = parse_method(case.cache)
    if case.new is None:
        return lower_decode(config, method, case.context, case.batch, case.chip, held=case.lengths)
    if case.new:
        return lower_chunk(config, method, case.context, case.new, case.batch, case.chip)
    return lower_prompt(config, method, case.context, case.batch, case.chip)


def _compile(case: Case, config: ModelConfig, folder: Path, dump: Path | None) -> dict:
    """Return the costs of one model's program, not yet beside the bound."""
    # Parts are told apart by stack frames.
    jax.config.update("jax_traceback_in_locations_limit", -1)
    layout = layout_for(config, parse_method(case.cache), case.context + (case.new or 0), case.chip)
    lowered = _lower(case, config)
    begun = time.perf_counter()
    compiled = lowered.compile()
    seconds, text, memory = (
        time.perf_counter() - begun,
        compiled.as_text(),
        compiled.memory_analysis(),
    )
    if dump is not None:
        dump.write_text(text, encoding="utf-8")
    if case.new is None:
        record = account.step_record(parse(text), case.chip, layout, case.lengths, folder)
    else:
        record = account.prompt_record(parse(text), case.chip, config, layout, *case.tokens, folder)
    cache = array_bytes(jax.eval_shape(functools.partial(allocate_cache, layout, case.batch)))
    # The cache is donated: what of the results does not lie in its buffers is a copy.
    temporaries = (
        memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    sizes = {"cache": cache, "arguments": memory.argument_size_in_bytes, "temp": temporaries}
    sizes["peak"] = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    return (
        record | {f"{name}_gb": size / 1e9 for name, size in sizes.items()} | {"compile_s": seconds}
    )


def _shallow(config: ModelConfig, depth: int) -> ModelConfig:
    """The first `depth` layers of attention, with the recurrent ones before each."""
    recurrent = config.recurrent
    if recurrent is not None and depth < config.num_layers:
        layers = tuple(
            layer for layer in recurrent.layers if layer < config.attention_layers[depth - 1]
        )
        recurrent = dataclasses.replace(recurrent, layers=layers) if layers else None
    return dataclasses.replace(
        config, num_layers=depth, sliding_window=config.windows[:depth], recurrent=recurrent
    )


def measure(
    case: Case, folder: Path, depths: tuple[int, ...] = (), dump: Path | None = None
) -> dict:
    """Compile a case and return its account.

    Args:
        case: The case.
        folder: An empty folder where libtpu writes its schedules (`tpu.write_schedules`).
        depths: Two numbers of layers: models of so many are compiled, and figures extrapolated to
            all layers.
        dump: Where to write the compiled program.
    """
    config, records = config_of(case.model), []
    for depth in depths or (config.num_layers,):
        for file in folder.iterdir():  # of the depth before
            file.unlink()
        records.append(_compile(case, _shallow(config, depth), folder, dump))
    record = records[0]
    if depths:
        record = extrapolate(*records, (config.num_layers - depths[0]) / (depths[1] - depths[0]))
        # Layers run one after the other: memory that two depths share does not shrink with a third.
        record |= {name: max(record[name], records[1][name]) for name in ("temp_gb", "peak_gb")}
        record["compile_s"] = sum(part["compile_s"] for part in records)
    if case.new is None:
        record |= account.step_summary(record, case.chip, config, case.lengths)
    else:
        estimated = sum(record["seconds"].values())
        least = case.batch * prompt_operations(config, *case.tokens) / account.peak(case.chip)
        record |= {"estimated_s": estimated, "bound_s": least, "share_of_peak": least / estimated}
    packages = ("jax", "libtpu" if case.is_tpu else "jax-cuda13-plugin")
    record |= {
        "versions": {name: metadata.version(name) for name in packages},
        "layers": list(depths),
    }
    return case._asdict() | record


def extrapolate(low, high, share: float):
    """Return numbers on the straight line through two records, `share` times their distance from
    `low`."""
    if isinstance(low, dict):
        return {name: extrapolate(value, high[name], share) for name, value in low.items()}
    if isinstance(low, (int, float)):
        value = low + share * (high - low)
        return round(value) if isinstance(low, int) else value
    return low


def report(case: Case, record: dict) -> str:
    """Return a case's account as lines of text."""
    rows = f"{case.batch} x {case.context} tokens"
    kinds = {
        None: f"a decode step of {case.batch} x {case.lengths[0]} tokens",
        0: f"prompts of {rows}",
    }
    kind = kinds.get(case.new, f"chunks of {case.new} tokens after {rows}")
    lines = [f"{case.chip} {case.model} {case.cache}: {kind}"]
    for part, moved in record["bytes"].items():
        traffic = f"{moved['read'] / 1e9:9.3f} GB read {moved['written'] / 1e9:9.3f} GB written"
        lines.append(f"{part:9} {traffic} {1e3 * record['seconds'][part]:9.3f} ms")
    figures = {name: value for name, value in record.items() if isinstance(value, (int, float))}
    lines += [
        f"{name:20} {value:.6g}" for name, value in figures.items() if name not in Case._fields
    ]
    lines += [
        f"not computed, so counted once or at its costliest: {name}" for name in record["unsure"]
    ]
    lines += [f"assumed: {line}" for line in account.ASSUMPTIONS["tpu" if case.is_tpu else "gpu"]]
    return "\n".join(lines)


def run(case: Case, layers: str, dump: Path | None, as_json: bool) -> None:
    """Compile one case and print its account. A mistake of the user's is one line and exit code
    2."""
    if case.chip not in CHIPS:
        raise typer.BadParameter(f"{case.chip}; known: {', '.join(CHIPS)}", param_hint="--chip")
    if case.lengths[0] > case.context:
        raise typer.BadParameter(
            f"{case.filled} is more than the context, {case.context}", param_hint="--held"
        )
    depths = numbers(layers) if re.fullmatch(r"(\d+,\d+)?", layers) else (0,)
    if depths and not 0 < depths[0] < depths[-1]:
        raise typer.BadParameter(
            f"{layers}; wanted two depths, the smaller one first: 2,4", param_hint="--layers"
        )
    with tempfile.TemporaryDirectory() as folder:
        if case.is_tpu:
            tpu.write_schedules(folder)
        try:
            record = measure(case, Path(folder), depths, dump)
        except UserError as error:
            typer.echo(error, err=True)
            raise typer.Exit(2) from error
    typer.echo(json.dumps(record) if as_json else report(case, record))
