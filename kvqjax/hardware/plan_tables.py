"""A plan in print: what lies on one device, how fast it can be at best, and the cache of all
devices."""

import dataclasses

from kvqjax._tables import Row, Section, cell, size
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
    coded = f" with {case.weights} matrices" if case.weights else ""
    rows = f"{case.batch} row{'s' * (case.batch > 1)} of {case.context} tokens"
    axes = ", ".join(f"{axis}={n}" for axis, n in dataclasses.asdict(case.mesh).items() if n > 1)
    count = case.mesh.devices
    devices = "" if case.chip is None and count == 1 else f", {count} x {case.chip or 'device'}"
    return f"{case.name} in {case.dtype}{coded}, {rows}{devices}{f' (mesh {axes})' if axes else ''}"


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
    """A line whose sizes stay together where a narrow terminal breaks the others."""
    return {
        name: text.replace(" GiB", "\u00a0GiB").replace(" MiB", "\u00a0MiB")
        for name, text in line.items()
    }


def _memory(case: Case, rows: list[Row], note: str) -> Section:
    """Bytes on one device, what fits there, and the limits."""
    lines = []
    for row in rows:
        count = {
            name: row[f"bytes_{name}_per_device"]
            for name in ("weights", "constants", "cache", "workspace", "total")
        }
        line: Row = {"cache": row["cache"], "weights": size(count["weights"])}
        if any(item["bytes_constants_per_device"] for item in rows):
            line["calibrated constants"] = size(count["constants"])
        line |= {"KV cache": size(count["cache"]), "workspace, estimated": size(count["workspace"])}
        line["total"] = size(count["total"])
        if case.room is not None:
            spare = case.room - count["total"]
            tight = "tight" if row["reason"].startswith("tight") else "yes"
            line["fits"] = (
                f"{tight}, {size(spare)} left" if row["fits"] else f"no, {size(-spare)} too much"
            )
            limit = " (the model's)" if row["context_limited_by"] == "the model" else ""
            line["longest context"] = (
                f"{row['largest_context']}{limit}" if row["largest_context"] else "none fits"
            )
            line["largest batch"] = (
                str(row["largest_batch"]) if row["largest_batch"] else "none fits"
            )
        lines.append(_unbroken(line))
    shares = [
        f"{row['cache']} fits with --memory-fraction {row['fits_with_memory_fraction']:g}."
        for row in rows
        if row.get("fits_with_memory_fraction")
    ]
    sentences = [_room(case), note and note[0].upper() + note[1:] + ".", *shares]
    sentences.append(
        "The workspace is a decode step's; a long prompt needs more, unless it enters in chunks."
    )
    title = "On each device" if case.mesh.devices > 1 else "On the device"
    return Section(title, lines, " ".join(filter(None, sentences)), across=True)


def _speed(case: Case, rows: list[Row]) -> Section | None:
    """Bounds on speed for plans that fit."""
    device = case.device
    if device is None or not any(row["fits"] for row in rows):
        return None
    lines, measured = [], any(row["attention_over_16_bits"] is not None for row in rows)
    for row in rows:
        fits = row["fits"]
        line: Row = {"cache": row["cache"]}
        line["tokens a second, at most"] = f"{row['tokens_per_second']:.4g}" if fits else REFUSED
        line["limited by"] = row["bound_by"] if fits else ""
        if any(item["recomputing_hidden_until"] != "always" for item in rows):
            line["recomputing is free up to"] = f"{row['recomputing_hidden_until']} tokens".replace(
                "always tokens", "any"
            )
        line["seconds to first token, at least"] = (
            f"{row['seconds_to_first_token']:.4g}" if fits else REFUSED
        )
        if "seconds_to_first_token_estimated" in row:
            estimate = row["seconds_to_first_token_estimated"]
            line["estimated seconds to first token"] = f"{estimate:.4g}" if fits else REFUSED
        if measured:
            times = row["attention_over_16_bits"]
            line["measured attention, in times of 16 bits"] = (
                "not measured" if times is None else f"{times:.3g}"
            )
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


def _cache(case: Case, rows: list[Row]) -> Section:
    """The cache of all devices, by role."""
    roles = dict.fromkeys(role for row in rows for role in row["classes"])
    lines = []
    for row in rows:
        line: Row = {
            "cache": row["cache"],
            "bytes": size(row["bytes"]),
            "bits per number": f"{row['bits_stored']:.4g}",
        }
        line["times smaller"] = f"{row['bytes_exact'] / row['bytes']:.3g}"
        line |= {ROLES.get(role, role): size(row["classes"].get(role, 0)) for role in roles}
        lines.append(_unbroken(line))
    exact = f"A number is one channel of a key or value; in {case.dtype} they take {size(rows[0]['bytes_exact'])}."
    if rows[0]["beyond_model"]:
        exact += f" {case.context} tokens are beyond the {case.config.max_position} that this model was made for."
    where = (
        f"The cache of all {case.mesh.devices} devices" if case.mesh.devices > 1 else "The cache"
    )
    return Section(where, lines, exact, across=True)


def _compiled(rows: list[Row]) -> Section | None:
    """The compiler's own account."""
    if "compile_seconds" not in rows[0]:
        return None
    lines = [
        {"cache": row["cache"]} | {word: cell(name, row[name]) for name, word in COMPILED.items()}
        for row in rows
    ]
    return Section("As compiled, on each device", lines, across=True)


def sections(case: Case, rows: list[Row], note: str) -> list[Section]:
    """The parts of the printed plan; `note` says what was taken for granted about the device."""
    tables = (_memory(case, rows, note), _speed(case, rows), _compiled(rows), _cache(case, rows))
    return [Section(_title(case), []), *filter(None, tables)]
