"""Ways to compute experts, compiled ahead of time and counted: the table of docs/howto/model.md.

    python -m benchmarks.experts --chip h100 --form "products at once" --rows 8

Each figure is that of the step account (`python -m benchmarks.step_cost`) or, of many rows, of a prompt's chunk
(`python -m benchmarks.prefill_cost`), with the function that computes the experts exchanged: four layers of
Qwen3-30B-A3B, exact cache, behind 4096 tokens. Every row is kept in benchmarks/records/experts.json, so that a stopped
run goes on where it was; `--anew` computes those named again, `--page-only` writes the table alone.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from benchmarks.compiled_cost import tpu
from benchmarks.compiled_cost.case import CHIPS, Case, measure
from benchmarks.hf_folders import config_to_hf
from kvqjax.model import experts
from kvqjax.model.loading import config_of

MODEL, LAYERS, CONTEXT = "qwen3-30b-a3b", 4, 4096
MANY = 64  # rows from which on they are a chunk of one prompt
HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records" / "experts.json", HERE.parent / "docs" / "howto" / "model.md"
BEGIN, END = "<!-- benchmarks.experts -->\n", "<!-- end of benchmarks.experts -->\n"
Form = Callable[[dict, Array, Array], Array]


def grouped(weights: dict, x: Float[Array, "N E"], chosen: Int[Array, "N k"]) -> Float[Array, "N k E"]:
    """Every chosen expert's output by `jax.lax.ragged_dot` over pairs of token and expert, sorted by expert."""
    (count, k), experts_here = chosen.shape, weights[experts.BY_EXPERT[0]].experts
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs)
    sizes = (pairs[:, None] == jnp.arange(experts_here)[None]).sum(0, dtype=jnp.int32)
    gate, up, down = (weights[name].read() for name in experts.BY_EXPERT)
    rows = x[order // k]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(inner, down, sizes)
    return jnp.zeros_like(out).at[order].set(out).reshape(count, k, -1)


def looped(weights: dict, x: Float[Array, "N E"], chosen: Int[Array, "N k"]) -> Float[Array, "N k E"]:
    """The same by the library's loop over tiles."""
    return _LOOP(weights, x, chosen, alone=True)


_LOOP, _AT_ONCE = experts._in_turn, experts._at_once
FORMS: dict[str, Form] = {"jax.lax.ragged_dot": grouped, "loop over tiles": looped, "products at once": _AT_ONCE}


@contextlib.contextmanager
def computed_by(form: Form) -> Iterator[None]:
    """Programs traced inside compute their experts by `form`, for whatever platform."""
    experts._at_once = lambda weights, x, chosen, **_: form(weights, x, chosen)
    experts._in_turn = lambda weights, x, chosen, **_: form(weights, x, chosen)
    jax.clear_caches()
    try:
        yield
    finally:
        experts._at_once, experts._in_turn = _AT_ONCE, _LOOP
        jax.clear_caches()


def counted(chip: str, rows: int, form: str) -> dict:
    """One row of the table. Of a program that the compiler or the account cannot take, the error in one line."""
    case = Case(chip, "", "exact", CONTEXT, new=rows) if rows >= MANY else Case(chip, "", "exact", CONTEXT, rows)
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as folder, computed_by(FORMS[form]):
        if case.is_tpu:
            tpu.write_schedules(folder)
        model = Path(place) / "config.json"
        model.write_text(json.dumps(config_to_hf(dataclasses.replace(config_of(MODEL), num_layers=LAYERS))))
        try:
            account = measure(case._replace(model=str(model)), Path(folder))
            milliseconds = account["estimated_ms"] if rows < MANY else 1e3 * account["estimated_s"]
            return {"gigabytes": sum(account["bytes"]["weights"].values()) / 1e9, "estimated_ms": milliseconds}
        except (ValueError, KeyError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"refused": (str(error).splitlines() or [type(error).__name__])[0][:120]}


def recorded() -> dict[str, dict]:
    """What was computed so far."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def table(records: dict[str, dict]) -> str:
    """The records as Markdown, rows of one chip and number of rows together."""
    lines = ["| chip, rows | form | GB of weights read and written | estimated ms |", "|---|---|--:|--:|"]
    order = lambda key: (CHIPS.index(key[0]), int(key[1]), list(FORMS).index(key[2]))  # noqa: E731
    for chip, rows, form in sorted((key.split("/") for key in records), key=order):
        account = records[f"{chip}/{rows}/{form}"]
        told = (
            "cannot be counted | "
            if "refused" in account
            else f"{account['gigabytes']:.2f} | {account['estimated_ms']:.2f}"
        )
        lines.append(f"| {chip}, {rows} | {form} | {told} |")
    return "\n".join(lines) + "\n"


def write_page(records: dict[str, dict]):
    """Put the table in its place on the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, tail = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(records) + "\n" + END + tail.split(END)[1], encoding="utf-8")


def main(
    chip: Annotated[list[str], typer.Option(help=", ".join(CHIPS))] = ["h100"],  # noqa: B006
    form: Annotated[list[str], typer.Option(help=", ".join(FORMS))] = list(FORMS),  # noqa: B006
    rows: Annotated[list[int], typer.Option(help=f"{MANY} and more are one prompt's chunk")] = [1, 8, 512, 2048],  # noqa: B006
    anew: Annotated[bool, typer.Option("--anew", help="also rows that are recorded")] = False,
    page_only: Annotated[bool, typer.Option("--page-only", help="compute nothing")] = False,
) -> None:
    """Compute the rows that are not recorded yet, and write the table."""
    for names, choices in ((chip, CHIPS), (form, FORMS)):
        if unknown := [name for name in names if name not in choices]:
            raise typer.BadParameter(f"{unknown[0]}; known: {', '.join(choices)}")
    for key in [] if page_only else [(c, r, f) for c in chip for r in rows for f in form]:
        name = "/".join(map(str, key))
        if anew or name not in recorded():
            account = counted(*key)
            records = recorded() | {name: account}  # of chips that another process computes, too
            part = RECORDS.with_suffix(".part")
            part.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
            part.replace(RECORDS)
            typer.echo(f"{name}: {account}")
    write_page(recorded())


if __name__ == "__main__":
    typer.run(main)
