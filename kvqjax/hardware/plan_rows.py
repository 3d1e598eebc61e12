"""The figures of a plan: a row for each cache."""

import dataclasses
import math

from kvqjax._tables import Row, size
from kvqjax.cache.layout import stored_form
from kvqjax.cache.runs import readers_text
from kvqjax.hardware.devices import DEVICES, GIB, Device, attention_over_16_bits, target_name
from kvqjax.hardware.planner import Plan, headroom, largest, plan_memory, step_bounds
from kvqjax.hardware.prompts import estimated_seconds, prompt_operations
from kvqjax.methods import Method
from kvqjax.methods.roofline import longest_memory_bound, step_cost
from kvqjax.model.config import ModelConfig
from kvqjax.parallel.mesh_size import MeshSize

MOST_ROWS = 2**16
# Shares of a GPU that are worth a hint where JAX's own is too small. The driver and XLA's own
# buffers need the rest.
LARGER_SHARES = (0.8, 0.85, 0.9, 0.95)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case to plan: a model, its cache's sizes, and a device.

    `room` is the bytes of one device that the program gets. It is None if no device is named.
    `memory` is the bytes of one device in all."""

    name: str
    config: ModelConfig
    context: int
    batch: int
    chip: str | None
    mesh: MeshSize
    room: float | int | None
    memory: float | int | None
    weights: str | None
    dtype: str

    @property
    def device(self) -> Device | None:
        return DEVICES[self.chip] if self.chip else None

    @property
    def device_memory(self) -> float | None:
        """Bytes of the named device."""
        return self.device.memory * GIB if self.device else None

    @property
    def form(self) -> str:
        """Name the form in which bodies are stored on the chip."""
        return stored_form(target_name(self.chip)) if self.chip else "planes"

    def planned(self, method: Method, context: int, batch: int) -> Plan:
        return plan_memory(
            self.config, method, context, batch, self.mesh, self.dtype, self.form, self.weights
        )


def _fit(planned: Plan, room: float | int) -> Row:
    """Say whether a plan fits into `room` bytes, and why."""
    verdict = headroom(planned.total, room)
    needs = f"{size(planned.total)} of {size(room)}"
    if verdict == "no":
        reason = f"{needs}: {size(planned.total - room)} too much"
        if planned.weights > room:
            reason += f"; the weights alone take {size(planned.weights)}"
        return {"fits": False, "reason": reason}
    reason = f"{needs}, {size(room - planned.total)} to spare"
    if verdict == "tight":
        reason = f"tight: {reason}"
    return {"fits": True, "reason": reason}


def _limits(case: Case, method: Method, room: float | int) -> Row:
    """Find the longest context that fits, no longer than the model can see, and the most rows."""

    def enough(context: int, batch: int) -> bool:
        return case.planned(method, context, batch).total <= room

    longest = case.config.max_position
    limited_by = "the model"
    if not enough(longest, case.batch):
        limited_by = "memory"
        longest = largest(lambda n: enough(n, case.batch), min(1024, longest), longest)
    return {
        "largest_context": longest,
        "context_limited_by": limited_by,
        "largest_batch": largest(lambda n: enough(case.context, n), most=MOST_ROWS),
    }


def _larger_share(case: Case, planned: Plan) -> float | None:
    """Find the share of a GPU's memory with which the plan would fit. Return None where it fits
    already, or never does."""
    if case.memory is None or case.room is None or planned.total <= case.room:
        return None
    for share in LARGER_SHARES:
        if planned.total <= share * case.memory:
            return share
    return None


def _speed(case: Case, planned: Plan, method: Method, device: Device, fits: bool) -> Row:
    """Find bounds on the speed of a plan that fits, and the context up to which recomputing keys
    and values costs no time."""
    reading, computing = step_bounds(
        planned, case.config, case.context, case.batch, device, case.mesh
    )
    operations_per_byte = 1e3 * device.tflops / device.bandwidth  # TFLOP/s over GB/s
    hidden_until = longest_memory_bound(step_cost(method, case.config), operations_per_byte)
    return {
        "tokens_per_second": case.batch / max(reading, computing) if fits else None,
        "recomputing_hidden_until": "always" if math.isinf(hidden_until) else int(hidden_until),
        "bound_by": "bandwidth" if reading >= computing else "compute",
        "attention_over_16_bits": attention_over_16_bits(str(method), case.chip or ""),
    }


def _first_token(case: Case, chip: str, fits: bool) -> Row:
    """Find the times of prompts of a whole context.

    The least time has every operation once, at the peak of all devices. For one chip there is also
    an estimate, from counts of compiled prompts."""
    peak = DEVICES[chip].tflops * 1e12 * case.mesh.devices
    operations = case.batch * prompt_operations(case.config, 0, case.context)
    row: Row = {"seconds_to_first_token": operations / peak}
    if case.mesh.devices == 1:
        estimate = estimated_seconds(case.config, case.context, case.batch, chip)
        if estimate is not None:
            row["seconds_to_first_token_estimated"] = estimate
    # All rows of a plan have the same keys.
    return row if fits else dict.fromkeys(row)


def plan_row(case: Case, method: Method) -> Row:
    """Find the figures of one cache."""
    planned = case.planned(method, case.context, case.batch)
    row: Row = {
        "cache": str(method),
        "bytes": planned.book.bytes,
        "bytes_exact": planned.book.exact_bytes,
        "bits_stored": planned.book.bits_stored,
        "bytes_weights_per_device": planned.weights,
        "bytes_constants_per_device": planned.constants,
        "bytes_cache_per_device": planned.cache,
        "bytes_workspace_per_device": planned.workspace,
        "bytes_total_per_device": planned.total,
    }
    if case.room is not None:
        row["bytes_available_per_device"] = int(case.room)
        row |= _fit(planned, case.room)
        row |= _limits(case, method, case.room)
        row["fits_with_memory_fraction"] = _larger_share(case, planned)
    if case.chip is not None and case.device is not None:
        row |= _speed(case, planned, method, case.device, row["fits"])
        row |= _first_token(case, case.chip, row["fits"])
    row["beyond_model"] = case.context > case.config.max_position
    row["classes"] = planned.book.by_role()
    return row


def compiled_row(case: Case, method: Method, chip: str) -> Row:
    """Compile the same decode loop, and return the compiler's account of one device."""
    from kvqjax.hardware.aot import compile_decode, layout_for

    planned = case.planned(method, case.context, case.batch)
    planned_arguments = planned.weights + planned.constants + planned.cache
    compiled = compile_decode(
        case.config, method, case.context, case.batch, chip, case.mesh, case.weights
    )
    layout = layout_for(case.config, method, case.context, chip)
    readers = dict.fromkeys(readers_text(layout))
    return {
        "bytes_arguments_compiled": compiled.arguments,
        "compiled_to_planned": compiled.arguments / planned_arguments,
        "bytes_temporaries_compiled": compiled.temporaries,
        "bytes_cache_copied": compiled.cache_copied,
        "compile_seconds": compiled.seconds,
        "kernels": layout.kernels.text(layout.target),
        "read_by": "; ".join(readers),
    }
