"""Plans a model and its cache on a device before anything is allocated: bytes, fit, and bounds on
time.

Everything is computed from shapes. The workspace is that of one decode step, from the sizes that
XLA was seen to keep at a time; `kvqjax.hardware.aot` compiles the step and measures it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.accounting import Ledger, array_bytes, ledger
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.readers.decoded import read_at_a_time
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, allocate_cache
from kvqjax.hardware.devices import Device
from kvqjax.methods import Method, MethodLike, parse
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import CODED_WEIGHTS
from kvqjax.model.weight_codes import CodedWeight, code_weight
from kvqjax.model.weight_trees import BY_EXPERT, Rows, init_params, is_coded
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import rules_for

TIGHT = 0.05  # share of a program's memory that the compiler and gaps between arrays may well take
ALONE = MeshSize()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device: weights, calibrated constants, its part of the cache, and the workspace
    of a decode step. `state` is the whole cache of all devices as shapes. Of the weights, one token
    at least reads `read` bytes and is multiplied by `multiplied` numbers: a looked-up embedding and
    the experts that the token passes by count in neither.
    """

    weights: int
    read: int
    multiplied: int
    constants: int
    cache: int
    workspace: int
    state: Cache

    @property
    def total(self) -> int:
        return self.weights + self.constants + self.cache + self.workspace

    @functools.cached_property
    def book(self) -> Ledger:
        """The whole cache by class, of all devices. Made only where it is asked for: a search for
        the longest context makes many plans and wants their totals."""
        return ledger(self.state)


@functools.lru_cache(maxsize=16)
def _plain_shapes(config: ModelConfig, dtype: str) -> dict:
    """Return the params as shapes. They are kept, because a plan needs them some forty times for
    every cache, which was half of its time."""
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config, jnp.dtype(dtype)))


def parameter_shapes(
    config: ModelConfig, dtype: str = "bfloat16", weights: str | None = None
) -> dict:
    """Return the params pytree as shapes. The layers' matrices are codes where `weights` is "int8"
    or "int4"."""
    # A fresh copy: the caller may change it.
    params = jax.tree.map(lambda x: x, _plain_shapes(config, dtype))
    if weights is None:
        return params
    if weights not in CODED_WEIGHTS:
        raise UserError(f"weights {weights!r} is unknown; known: {', '.join(CODED_WEIGHTS)}")
    to_codes = functools.partial(code_weight, bits=CODED_WEIGHTS[weights])

    def coded(x):
        if isinstance(x, Rows):
            return x.replace(stack=coded(x.stack))
        return jax.eval_shape(to_codes, x)

    layers = {}
    for name, x in params["layers"].items():
        layers[name] = coded(x) if is_coded(f"layers/{name}") else x
    return params | {"layers": layers}


def _share(rules: Rules, params: dict) -> dict:
    """Return the shapes of the weights that one device holds. Devices that share out a group of
    inputs each have its scale."""

    def with_scales(spec, x):
        """Count a scale of codes for every device that has a part of its group."""
        if not isinstance(x, CodedWeight):
            return x
        # The spec of the axis of inputs, the last but one; a short spec splits no further axis.
        axes = (*spec, None, None)[x.codes.ndim - 2]
        if isinstance(axes, str):
            axes = (axes,)
        devices = 1 if axes is None else rules.size(tuple(axes))
        *lead, groups, outputs = x.scale.shape
        shape = (*lead, math.lcm(groups, devices), outputs)
        return x.replace(scale=jax.ShapeDtypeStruct(shape, x.scale.dtype))

    def is_codes(x):
        return isinstance(x, CodedWeight)

    def with_all_scales(spec, parameter):
        # A parameter may be several arrays: rows of a stack.
        change = functools.partial(with_scales, spec)
        return jax.tree.map(change, parameter, is_leaf=is_codes)

    specs = rules.parameters(params)
    return rules.shares(jax.tree.map(with_all_scales, specs, params), specs)


@functools.lru_cache(maxsize=16)
def _rules(config: ModelConfig, method: Method, mesh: MeshSize) -> Rules:
    """Choose the rules of a plan, which are the same for every length and number of rows."""
    return rules_for(config, method, mesh, devices=())


@functools.lru_cache(maxsize=16)
def _weights(
    config: ModelConfig, rules: Rules, dtype: str, weights: str | None
) -> tuple[int, int, int]:
    """Count bytes of a device's share of the weights, bytes that a step reads of it, and numbers by
    which a token is multiplied: the same for every length, too."""
    params = parameter_shapes(config, dtype)
    share = _share(rules, parameter_shapes(config, dtype, weights))
    plain_share = rules.shares(params, rules.parameters(params))
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(plain_share))
    # An embedding that is not the head too is looked up, not read.
    table = 0
    if not config.tied_embeddings:
        table = math.prod(params["embed"].shape) // rules.size(rules.vocabulary)
    bytes_of_table = table * params["embed"].dtype.itemsize
    # Experts that a token passes by are stored, and neither read nor multiplied by.
    devices = rules.size(rules.width)
    idle = config.idle_numbers // devices
    by_expert = {name: share["layers"][name] for name in BY_EXPERT if name in share["layers"]}
    all_experts = sum(math.prod(params["layers"][name].stack.shape) for name in by_expert)
    all_experts //= devices
    bytes_of_idle = 0
    if all_experts:
        # Codes and scales are shared out as the numbers that they stand for.
        bytes_of_idle = round(array_bytes(by_expert) * idle / all_experts)
    total = array_bytes(share)
    return total, total - bytes_of_table - bytes_of_idle, numbers - table - idle


def _whole_body_bytes(run: RunLayout, batch: int, item: int) -> int:
    """Count the bytes beside a body that is read as a whole: a score of every token and query head,
    its weight, and its weight times the scale of every group of the value's channels."""
    groups = 0
    for field in run.wiring.storage.codecs["v"].fields.values():
        if field.kind == "token" and field.role == "scales":
            groups += -(-field.width // run.shape.num_kv_heads)
    per_score = 4 + item * (1 + groups)  # the score is float32
    return batch * run.slots_here * run.shape.num_heads * per_score


def _workspace(layout: CacheLayout, batch: int, vocabulary: int) -> int:
    """Count the bytes of a decode step beside its arguments:

    - float32 logits, drawn from and sorted;
    - the exact tokens of a layer as keys and values;
    - one block of the body unpacked and decoded with its scores, or what a body that is read as a
      whole takes;
    - what the method carries."""
    config = layout.shape
    item = jnp.dtype(layout.dtype).itemsize
    logits = 2 * 4 * batch * vocabulary
    most = 0  # of one layer: layers run one after the other
    for run in runs_of(layout):
        width = sum(run.wiring.storage.sources.values()) + config.cached_width
        exact = batch * (layout.method.sinks + run.ring + 1) * width * item
        if run.wiring.fast.direct is not None:
            block = _whole_body_bytes(run, batch, item)
        elif run.static_loops:  # as keys or values are looked up, multiplied and rotated
            tokens = batch * run.slots_here
            at_a_time = min(read_at_a_time(tokens), tokens)
            block = 3 * at_a_time * config.num_kv_heads * config.head_dim * item
        else:
            per_token = width * (4 + item) + 4 * config.num_heads
            block = batch * min(run.reading, run.slots_here) * per_token
        carry_width = sum(run.wiring.chain.carry.values())
        carried = batch * min(run.carried, run.slots_here) * carry_width * item
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
    weights: str | None = None,
) -> Plan:
    """Plan one device of `mesh` for `batch` rows of at most `context` tokens, weights and
    exact tokens in `dtype`, bodies in the device's form (`kvqjax.cache.layout.stored_form`), the
    layers' matrices as `weights` "int8" or "int4" codes if so wanted. Rows are rounded up to what
    the mesh can share out."""
    method = parse(method)
    rules = _rules(config, method, mesh)
    rows = -(-batch // mesh.data)
    layout = CacheLayout(
        shape=config.kv_shape, method=method, capacity=context, dtype=dtype, form=form
    )
    layout = rules.cache_layout(layout, rows * mesh.data)
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, rows * mesh.data))
    total, read, multiplied = _weights(config, rules, dtype, weights)
    constants = [run.wiring.constants(run.count, dtype) for run in runs_of(layout)]
    vocabulary = config.vocab_size // rules.size(rules.vocabulary)
    return Plan(
        weights=total,
        read=read,
        multiplied=multiplied,
        constants=array_bytes(constants),
        cache=array_bytes(rules.shares(cache, rules.cache(cache))),
        workspace=_workspace(rules.local_layout(layout), rows, vocabulary),
        state=cache,
    )


def headroom(total: int, room: float | int) -> str:
    """Say whether `total` bytes fit `room` bytes: "yes", "tight" (less than TIGHT of it is left),
    "no"."""
    spare = room - total
    if spare < 0:
        return "no"
    return "tight" if spare < TIGHT * room else "yes"


def largest(fits: Callable[[int], bool], step: int = 1, most: int = 2**24) -> int:
    """Find the largest multiple of `step`, at most `most`, for which `fits` holds; 0 if none.
    `fits` holds below any number for which it holds."""
    low = 0
    high = most // step
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step


def step_bounds(
    planned: Plan,
    config: ModelConfig,
    context: int,
    batch: int,
    device: Device,
    mesh: MeshSize = ALONE,
) -> tuple[float, float]:
    """Compute lower bounds on one decode step at a full context: (seconds to read a device's
    weights, constants and cache once, seconds to compute its part at the dense 16-bit peak). An
    embedding table that is not the head is looked up, not read; communication between devices is
    not counted. Only the experts of one token count: rows that choose others read more.

    Operations, two per multiply-accumulate: every weight once per row, scores and weighted sum over
    what a layer sees of the context (of a chunk at least the token itself), and what the method
    spends to bring cached tokens back (arXiv 2508.10395, section 3.4, for XQuant)."""
    read = planned.read + planned.constants + planned.cache
    seen = 0  # tokens that all layers together see
    for index in range(config.num_layers):
        shape = config.layer(index)
        seen += 1 if shape.common_chunked else min(context, shape.window or context)
    attention = 4 * config.query_width * seen
    cached = (attention + planned.book.flops * context) / (mesh.seq * mesh.model)
    operations = -(-batch // mesh.data) * (2 * planned.multiplied + cached)
    return read / (device.bandwidth * 1e9), operations / (device.tflops * 1e12)
