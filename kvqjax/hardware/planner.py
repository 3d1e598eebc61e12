"""What a model and its cache take on a device, before anything is allocated: bytes, what fits, and time bounds.

Everything is computed from shapes. The workspace is that of one decode step, from the sizes that XLA was seen to keep
at a time; `kvqjax.hardware.aot` compiles the step and measures it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvqjax.cache.accounting import Ledger, array_bytes, ledger
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.decoded import read_at_a_time
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import allocate_cache
from kvqjax.methods import MethodLike, parse
from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import init_params
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for

__all__ = [
    "DEVICES",
    "Device",
    "Plan",
    "headroom",
    "largest",
    "parameter_shapes",
    "plan_memory",
    "step_bounds",
]

GIB = 2**30
TIGHT = 0.05  # share of a device that the driver, the compiler and gaps between arrays may well take
ALONE = MeshSize()


class Device(NamedTuple):
    """One chip as its vendor states it: memory in GiB, its bandwidth in GB/s, dense 16-bit matrix TFLOP/s, and, where
    it can be compiled for ahead of time, the compiler's name for it and the axes of its torus. A tpu7x chip is two
    devices to JAX; these are the figures of one. A T4 has no bfloat16; its peak and its bytes are those of float16."""

    memory: int
    bandwidth: int
    tflops: int
    torus: tuple[str, int] = ("", 0)


# TPUs: Google's pages on their architecture (cloud.google.com/tpu/docs/v4 and its neighbours). GPUs: NVIDIA's data
# sheets, without sparsity, of which they print the double; the A10G is AWS's A10, the B200 that of HGX B200.
DEVICES = {
    "v4": Device(32, 1200, 275, ("v4", 3)),
    "v5e": Device(16, 820, 197, ("v5e", 2)),
    "v5p": Device(95, 2765, 459, ("v5p", 3)),
    "v6e": Device(32, 1640, 918, ("v6e", 2)),
    "tpu7x": Device(96, 3685, 1153, ("tpu7x", 3)),
    "t4": Device(16, 320, 65),
    "l4": Device(24, 300, 121),
    "a10g": Device(24, 600, 70),
    "l40s": Device(48, 864, 362),
    "a100-40": Device(40, 1555, 312),
    "a100-80": Device(80, 2039, 312),
    "h100": Device(80, 3350, 989),
    "h200": Device(141, 4800, 989),
    "b200": Device(180, 8000, 2250),
    "rtx4090": Device(24, 1008, 165),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device: weights, calibrated constants, its part of the cache, and the workspace of a decode step.
    `book` is the whole cache by class."""

    weights: int
    constants: int
    cache: int
    workspace: int
    book: Ledger

    @property
    def total(self) -> int:
        return self.weights + self.constants + self.cache + self.workspace


def parameter_shapes(config: ModelConfig, dtype: str = "bfloat16") -> dict:
    """The params pytree as shapes."""
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config, jnp.dtype(dtype)))


def _whole(run: RunLayout, batch: int, item: int) -> int:
    """Bytes beside a body that is read as a whole: a score of every token and query head, its weight, and its weight
    times the scale of every group of the value's channels."""
    scales = [
        f.width for f in run.wiring.storage.codecs["v"].fields.values() if f.kind == "token" and f.role == "scales"
    ]
    groups = sum(-(-width // run.shape.num_kv_heads) for width in scales)
    return batch * run.slots_here * run.shape.num_heads * (4 + item * (1 + groups))


def _workspace(layout: CacheLayout, batch: int, vocabulary: int) -> int:
    """Bytes of a decode step beside its arguments: float32 logits (drawn from and sorted), the exact tokens of a layer
    as keys and values, one block of the body unpacked and decoded with its scores (or what a body that is read as a
    whole takes), and what the method carries."""
    config, item = layout.shape, jnp.dtype(layout.dtype).itemsize
    logits = 2 * 4 * batch * vocabulary
    most = 0
    for run in runs_of(layout):
        width = sum(run.wiring.storage.sources.values()) + 2 * config.kv_width
        exact = batch * (layout.method.sinks + run.ring + 1) * width * item
        block = batch * min(run.reading, run.slots_here) * (width * (4 + item) + 4 * config.num_heads)
        if run.wiring.fast.direct is not None:
            block = _whole(run, batch, item)
        elif run.static:  # as keys or values are looked up, multiplied and rotated
            tokens = batch * run.slots_here
            block = min(read_at_a_time(tokens), tokens) * 3 * config.kv_width * item
        carried = batch * min(run.carried, run.slots_here) * sum(run.wiring.chain.carry.values()) * item
        most = max(most, exact + block + carried)
    return logits + most


def plan_memory(
    config: ModelConfig,
    method: MethodLike,
    context: int,
    batch: int,
    mesh: MeshSize = ALONE,
    dtype: str = "bfloat16",
    form: str = "planes",
) -> Plan:
    """The plan of one device of `mesh` for `batch` rows of at most `context` tokens, weights and exact tokens in
    `dtype`, bodies in the device's `form` (`kvqjax.cache.state.stored_form`). Rows are rounded up to what the mesh can
    share out."""
    method = parse(method)
    rules = rules_for(config, method, mesh, devices=())
    rows = -(-batch // mesh.data)
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=context, dtype=dtype, form=form)
    layout = rules.cache_layout(layout, rows * mesh.data)
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, rows * mesh.data))
    weights = parameter_shapes(config, dtype)
    return Plan(
        weights=array_bytes(rules.shares(weights, rules.parameters(weights))),
        constants=array_bytes([run.wiring.constants(run.count, dtype) for run in runs_of(layout)]),
        cache=array_bytes(rules.shares(cache, rules.cache(cache))),
        workspace=_workspace(rules.local_layout(layout), rows, config.vocab_size // rules.size(rules.vocabulary)),
        book=ledger(cache),
    )


def headroom(total: int, device: Device) -> str:
    """Whether so many bytes fit a device: "yes", "tight" (less than TIGHT of it is left), "no"."""
    spare = device.memory * GIB - total
    return "no" if spare < 0 else "tight" if spare < TIGHT * device.memory * GIB else "yes"


def largest(fits: Callable[[int], bool], step: int = 1, most: int = 2**24) -> int:
    """The largest multiple of `step`, at most `most`, for which `fits` holds (it holds below any number it holds for);
    0 if none."""
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step


def step_bounds(
    found: Plan,
    config: ModelConfig,
    context: int,
    batch: int,
    device: Device,
    mesh: MeshSize = ALONE,
    dtype: str = "bfloat16",
) -> tuple[float, float]:
    """Lower bounds on one decode step at a full context: (seconds to read a device's weights, constants and cache once,
    seconds to compute its part at the dense 16-bit peak). An embedding table that is not the head is looked up, not
    read; what devices send each other is not counted. Of experts, those count that one token passes through: rows that
    choose others read more.

    Operations, two per multiply-accumulate: every weight once per row, scores and weighted sum over the context, and
    what the method spends to bring cached tokens back (arXiv 2508.10395, section 3.4, for XQuant)."""
    split = 1 if config.vocab_size % mesh.model else mesh.model
    lookup = 0 if config.tied_embeddings else config.vocab_size * config.width // split
    lookup += config.idle_numbers // mesh.model
    item, rows = jnp.dtype(dtype).itemsize, -(-batch // mesh.data)
    read = found.weights - lookup * item + found.constants + found.cache
    attention = 4 * config.num_layers * config.query_width * context
    cached = (attention + found.book.flops * context) / (mesh.seq * mesh.model)
    operations = rows * (2 * (found.weights // item - lookup) + cached)
    return read / (device.bandwidth * 1e9), operations / (device.tflops * 1e12)
