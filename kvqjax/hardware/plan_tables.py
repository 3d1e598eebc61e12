"""A plan in print: what lies on one device, how fast it can be at best, and the cache of all
devices."""

import dataclasses

from kvqjax._tables import TIE, Row, Section, cell, size
from kvqjax.cache.accounting import ROLES
from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.plan_rows import Case

# What a figure of the compiler is called in print; in JSON and in Python it keeps its name.
COMPILED = {
    "bytes_arguments_compiled": "arguments",
    "compiled_to_planned": "arguments / planned",
    "bytes_temporaries_compiled": "workspace",
    "bytes_cache_copied": "cache copied",
    "compile_seconds": "seconds to compile",
    "kernels": "compiled with",
    "read_by": "read by",
}
REFUSED = "does not fit"


def _title(case: Case) -> str:
    """Name the plan and its device."""
    title = f"{case.name} in {case.dtype}"
    if case.weights:
        title += f" with {case.weights} matrices"
    rows = "row" if case.batch == 1 else "rows"
    title += f", {case.batch} {rows} of {case.context} tokens"
    if case.chip is not None or case.mesh.devices > 1:
        title += f", {case.mesh.devices} x {case.chip or 'device'}"
    sizes = dataclasses.asdict(case.mesh).items()
    axes = [f"{axis}={count}" for axis, count in sizes if count > 1]
    if axes:
        title += f" (mesh {', '.join(axes)})"
    return title


def _room(case: Case) -> str:
    """Say how much of a device's memory the program gets, and why."""
    if case.room is None or case.memory is None:
        return "Name a --device, or its --memory, to see what fits and how fast it can be."
    if case.chip is None or case.memory != case.device_memory:
        return f"A program gets {size(case.room)} of each device, as you said."
    sold = DEVICES[case.chip].sold
    if case.room == case.memory:
        return (
            f"{case.chip}: a program gets {size(case.room)} of the {sold} GB with which it is sold."
        )
    return (
        f"{case.chip}: a program gets {size(case.room)} of {size(case.memory)}, since JAX takes "
        f"{case.room / case.memory:.0%} of a GPU. --memory-fraction plans for another share; "
        "XLA_PYTHON_CLIENT_MEM_FRACTION makes the program take it."
    )


def _unbroken(line: Row) -> Row:
    """Keep numbers and units together, wherever a narrow terminal breaks a line."""
    unbroken = {}
    for name, text in line.items():
        for unit in ("GiB", "MiB"):
            text = text.replace(f" {unit}", f"{TIE}{unit}")
        unbroken[name] = text
    return unbroken


def _memory(case: Case, rows: list[Row], note: str) -> Section:
    """Set the bytes on one device, what fits there, and the limits."""
    # All rows have the same lines, so that they stand beside each other.
    has_constants = any(row["bytes_constants_per_device"] for row in rows)
    lines = []
    for row in rows:
        line: Row = {"cache": row["cache"], "weights": size(row["bytes_weights_per_device"])}
        if has_constants:
            line["calibrated constants"] = size(row["bytes_constants_per_device"])
        line["KV cache"] = size(row["bytes_cache_per_device"])
        line["workspace, estimated"] = size(row["bytes_workspace_per_device"])
        line["total"] = size(row["bytes_total_per_device"])
        if case.room is not None:
            line |= _limits(row, case.room)
        lines.append(_unbroken(line))
    sentences = [_room(case)]
    if note:
        sentences.append(note[0].upper() + note[1:] + ".")
    for row in rows:
        share = row.get("fits_with_memory_fraction")
        if share:
            sentences.append(f"{row['cache']} fits with --memory-fraction {share:g}.")
    sentences.append(
        "The workspace is a decode step's; a long prompt needs more, unless it enters in chunks."
    )
    title = "On each device" if case.mesh.devices > 1 else "On the device"
    return Section(title, lines, " ".join(sentences), across=True)


def _limits(row: Row, room: float | int) -> Row:
    """Say whether a cache fits `room` bytes, and which context and batch would be the largest."""
    spare = room - row["bytes_total_per_device"]
    if not row["fits"]:
        fits = f"no, {size(-spare)} too much"
    elif row["reason"].startswith("tight"):
        fits = f"tight, {size(spare)} left"
    else:
        fits = f"yes, {size(spare)} left"
    context = "none fits"
    if row["largest_context"]:
        context = str(row["largest_context"])
        if row["context_limited_by"] == "the model":
            context += " (the model's)"
    batch = str(row["largest_batch"]) if row["largest_batch"] else "none fits"
    return {"fits": fits, "longest context": context, "largest batch": batch}


def _speed(case: Case, rows: list[Row]) -> Section | None:
    """Set the bounds on speed of the plans that fit."""
    device = case.device
    if device is None or not any(row["fits"] for row in rows):
        return None
    # All rows have the same lines, so that they stand beside each other.
    recomputes = any(row["recomputing_hidden_until"] != "always" for row in rows)
    measured = any(row["attention_over_16_bits"] is not None for row in rows)
    lines = []
    for row in rows:
        line: Row = {"cache": row["cache"]}
        line["tokens a second, at most"] = _bound(row, "tokens_per_second")
        line["limited by"] = row["bound_by"] if row["fits"] else ""
        if recomputes:
            until = row["recomputing_hidden_until"]
            line["recomputing is free up to"] = "any" if until == "always" else f"{until} tokens"
        line["seconds to first token, at least"] = _bound(row, "seconds_to_first_token")
        if "seconds_to_first_token_estimated" in row:
            estimate = _bound(row, "seconds_to_first_token_estimated")
            line["estimated seconds to first token"] = estimate
        if measured:
            ratio = row["attention_over_16_bits"]
            text = "not measured" if ratio is None else f"{ratio:.3g}"
            line["measured attention, in times of 16 bits"] = text
        lines.append(line)
    all_but = "But for the last line nothing" if measured else "Nothing"
    note = (
        f"{all_but} here is measured. At most: all rows together, if a step reads its weights and cache once at "
        f"{device.bandwidth} GB/s and computes at {device.tflops} TFLOP/s (16 bits), and devices exchange nothing. The "
        "first token follows a prompt as long as the context: at least what every operation takes at that peak."
    )
    if case.config.experts is not None:
        note += " A step reads only the experts of one token; more rows read more."
    if "seconds_to_first_token_estimated" in rows[0]:
        note += (
            " The estimate uses the shares of the peak that compiled prompts reach (docs/speed.md)."
        )
    if measured:
        note += (
            " The last line was measured on such a chip, for one new token in 8 rows of 32768 and a layer of "
            "Llama-3.1-8B, without our kernels: attention's time against reading 16-bit keys and values at the chip's "
            "bandwidth. Above 1 a cache saves memory and no time (docs/speed.md)."
        )
    return Section("Speed at best", lines, note, across=True)


def _bound(row: Row, name: str) -> str:
    return f"{row[name]:.4g}" if row["fits"] else REFUSED


def _cache(case: Case, rows: list[Row]) -> Section:
    """Set the bytes of the cache on all devices, by role."""
    roles = dict.fromkeys(role for row in rows for role in row["classes"])
    lines = []
    for row in rows:
        line: Row = {"cache": row["cache"], "bytes": size(row["bytes"])}
        line["bits per number"] = f"{row['bits_stored']:.4g}"
        line["times smaller"] = f"{row['bytes_exact'] / row['bytes']:.3g}"
        for role in roles:
            line[ROLES.get(role, role)] = size(row["classes"].get(role, 0))
        lines.append(_unbroken(line))
    title = "The cache"
    if case.mesh.devices > 1:
        title += f" of all {case.mesh.devices} devices"
    exact = size(rows[0]["bytes_exact"])
    note = f"A number is one channel of a key or value; in {case.dtype} they take {exact}."
    if rows[0]["beyond_model"]:
        note += (
            f" {case.context} tokens are beyond the {case.config.max_position} that this model was "
            "made for."
        )
    return Section(title, lines, note, across=True)


def _compiled(rows: list[Row]) -> Section | None:
    """Set the compiler's own account, where the step was compiled."""
    if "compile_seconds" not in rows[0]:
        return None
    lines = []
    for row in rows:
        line: Row = {"cache": row["cache"]}
        for name, word in COMPILED.items():
            line[word] = cell(name, row[name])
        lines.append(line)
    return Section("As compiled, on each device", lines, across=True)


def sections(case: Case, rows: list[Row], note: str) -> list[Section]:
    """Set all parts of the printed plan; `note` says what was taken for granted about the
    device."""
    title = Section(_title(case), [])
    parts = [_memory(case, rows, note), _speed(case, rows), _compiled(rows), _cache(case, rows)]
    return [title, *(part for part in parts if part is not None)]
