"""What tuning would take on a machine that is not here, by the planner's cost model.

Every chunk of every measurement reads a device's weights and what the cache holds of its rows once, and computes its
part at the dense 16-bit peak: the larger of the two is its time, a bound that real programs miss by their own factor.
Compilation, calibration and the report's own caches are left out.
"""

import math
from typing import Any

from kvqjax.eval.tune.candidates import named, sorted_out
from kvqjax.eval.tune.chains import exceptions, is_chain
from kvqjax.eval.tune.measure import even_rows
from kvqjax.eval.tune.report import FRONT
from kvqjax.eval.tune.run import Settings, needed_windows
from kvqjax.eval.tune.search import PATIENCE, ROUND
from kvqjax.eval.tune.trial import choice_of
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.hardware.planner import plan_memory, step_bounds
from kvqjax.model.config import ModelConfig
from kvqjax.parallel.mesh_size import MeshSize

__all__ = ["estimated"]


def estimated(config: ModelConfig, methods: str, device: str, mesh: str, settings: Settings) -> dict[str, Any]:
    """Measurements, forward passes, tokens and hours. Of exchanges as many rounds are counted as there are layers,
    and those that end the search, for the mixture and for every chain; `bytes` on a device include the logits of the
    exact pass and of one chunk."""
    found, sizes = sorted_out(named(methods, config), config), MeshSize.parse(mesh)
    layers, count = config.num_layers, len(found.parts)
    alone = layers * sum(1 if whole else 2 for whole in found.whole[1:])
    chains = [own for own in found.others if is_chain(own, config.kv_shape)]
    changed = sum(1 + layers * len(exceptions(found, own, config.kv_shape)) for own in chains)
    rounds = (1 + len(chains)) * (layers + PATIENCE)
    reported = 1 + count + FRONT + len(found.others)
    windows = needed_windows(2 * layers * count)
    rows = even_rows(windows, settings.batch, sizes.data)
    batches = math.ceil(windows / rows)
    exact = batches * (2 + len(chains) + rounds)  # once for each call: the parts alone, every round, the report
    passes = (alone + changed + ROUND * rounds + reported) * batches + exact
    steps = passes * math.ceil(settings.window / settings.chunk)
    chip = DEVICES[find_device(device).name]
    planned = plan_memory(config, choice_of(found), settings.window, rows, sizes)
    reading, computing = step_bounds(planned, config, settings.window, rows, chip, sizes)
    seconds = steps * max(reading, computing * settings.chunk)
    logits = 4 * rows * config.vocab_size * (settings.window + settings.chunk) // sizes.model
    return {
        "device": device,
        "mesh": mesh,
        "candidates": count,
        "parts_alone": alone,
        "exceptions": changed,
        "exchanges": ROUND * rounds,
        "forward_passes": passes,
        "tokens": passes * rows * settings.window,
        "hours": seconds / 3600,
        "bound_by": "bandwidth" if reading >= computing * settings.chunk else "compute",
        "bytes": planned.total + logits,
    }
