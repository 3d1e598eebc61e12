"""The figures of a plan: a row for each cache."""

import dataclasses

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
    """A case to plan. `room`: bytes of one device that the program gets, None if no device is
    named. `memory`: bytes of one device in all."""

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


def _fit(case: Case, planned: Plan, room: float | int) -> Row:
    """Say whether a plan fits into `room` bytes, and why."""
    verdict, spare = headroom(planned.total, room), room - planned.total
    words = f"{size(planned.total)} of {size(room)}"
    if verdict != "no":
        return {
            "fits": True,
            "reason": f"{'tight: ' if verdict == 'tight' else ''}{words}, {size(spare)} to spare",
        }
    reason = f"{words}: {size(-spare)} too much"
    if planned.weights > room:
        reason += f"; the weights alone take {size(planned.weights)}"
    return {"fits": False, "reason": reason}


def _limits(case: Case, method: Method, room: float | int) -> Row:
    """The longest context that fits, no longer than the model can see; and the most rows."""

    def enough(context, batch):
        return case.planned(method, context, batch).total <= room

    most = case.config.max_position
    by_model = enough(most, case.batch)
    longest = most if by_model else largest(lambda n: enough(n, case.batch), min(1024, most), most)
    limits = {
        "largest_context": longest,
        "context_limited_by": "the model" if by_model else "memory",
    }
    return limits | {"largest_batch": largest(lambda n: enough(case.context, n), most=MOST_ROWS)}


def _larger_share(case: Case, planned: Plan) -> float | None:
    """The share of a GPU's memory with which the plan would fit; None where it fits, or never
    does."""
    if case.memory is None or case.room is None or planned.total <= case.room:
        return None
    return next((share for share in LARGER_SHARES if planned.total <= share * case.memory), None)


def _speed(case: Case, planned: Plan, method: Method, device: Device, fits: bool) -> Row:
    """Bounds on speed for a plan that fits, and the context up to which recomputing keys and values
    costs no time."""
    reading, computing = step_bounds(
        planned, case.config, case.context, case.batch, device, case.mesh
    )
    hidden = longest_memory_bound(
        step_cost(method, case.config), 1e3 * device.tflops / device.bandwidth
    )
    return {
        "tokens_per_second": case.batch / max(reading, computing) if fits else None,
        "recomputing_hidden_until": "always" if hidden == float("inf") else int(hidden),
        "bound_by": "bandwidth" if reading >= computing else "compute",
        "attention_over_16_bits": attention_over_16_bits(str(method), case.chip or ""),
    }


def _first_token(case: Case, chip: str, fits: bool) -> Row:
    """Give the times of prompts of a whole context: the least, with every operation once at the
    peak of all devices, and on one chip as compiled prompts were counted."""
    peak = DEVICES[chip].tflops * 1e12 * case.mesh.devices
    least = case.batch * prompt_operations(case.config, 0, case.context) / peak
    one_device = case.mesh.devices == 1
    estimated = (
        estimated_seconds(case.config, case.context, case.batch, chip) if one_device else None
    )
    row = {"seconds_to_first_token": least} | (
        {} if estimated is None else {"seconds_to_first_token_estimated": estimated}
    )
    return row if fits else dict.fromkeys(row)


def plan_row(case: Case, method: Method) -> Row:
    """The figures of one cache."""
    planned = case.planned(method, case.context, case.batch)
    row: Row = {
        "cache": str(method),
        "bytes": planned.book.bytes,
        "bytes_exact": planned.book.exact_bytes,
    }
    row["bits_stored"] = planned.book.bits_stored
    parts = {"weights": planned.weights, "constants": planned.constants, "cache": planned.cache}
    parts |= {"workspace": planned.workspace, "total": planned.total}
    row |= {f"bytes_{name}_per_device": count for name, count in parts.items()}
    if case.room is not None:
        row["bytes_available_per_device"] = int(case.room)
        row |= _fit(case, planned, case.room) | _limits(case, method, case.room)
        row["fits_with_memory_fraction"] = _larger_share(case, planned)
    if case.chip is not None and case.device is not None:
        fits = row["fits"]
        row |= _speed(case, planned, method, case.device, fits) | _first_token(
            case, case.chip, fits
        )
    return row | {
        "beyond_model": case.context > case.config.max_position,
        "classes": planned.book.by_role(),
    }


def compiled_row(case: Case, method: Method, chip: str) -> Row:
    """The compiler's account of the same decode loop, per device."""
    from kvqjax.hardware.aot import compile_decode, layout_for

    planned = case.planned(method, case.context, case.batch)
    compiled = compile_decode(
        case.config, method, case.context, case.batch, chip, case.mesh, case.weights
    )
    row: Row = {"bytes_arguments_compiled": compiled.arguments}
    row["compiled_to_planned"] = compiled.arguments / (
        planned.weights + planned.constants + planned.cache
    )
    row |= {
        "bytes_temporaries_compiled": compiled.temporaries,
        "bytes_cache_copied": compiled.cache_copied,
    }
    layout = layout_for(case.config, method, case.context, chip)
    row |= {"compile_seconds": compiled.seconds, "kernels": layout.kernels.text(layout.target)}
    return row | {"read_by": "; ".join(dict.fromkeys(readers_text(layout)))}
