"""Programs compiled ahead of time for chips that are not there (kvqjax/hardware/chips.py), to hold
the planner to its promises.

What is compiled is the decode loop of `generate`, a whole prompt or a chunk of one: weights,
constants and cache as arguments, the cache donated."""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from kvqjax._errors import UserError
from kvqjax.cache import CacheLayout, allocate_cache, runs_of
from kvqjax.cache.layout import stored_form
from kvqjax.cache.runs import bound_for
from kvqjax.cache.state import bounded
from kvqjax.generation.loop import decode_steps, unbegun
from kvqjax.generation.sampling import make_sampling
from kvqjax.hardware.chips import chip_devices
from kvqjax.hardware.devices import target_name
from kvqjax.hardware.planner import ALONE, parameter_shapes
from kvqjax.methods import Method
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import as_multiplied, unrolled
from kvqjax.pallas_kernels.chips import family
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import rules_for
from kvqjax.step.forward import forward
from kvqjax.step.prompt import prefill_donated


class Compiled(NamedTuple):
    """Bytes per device of a compiled decode loop, by XLA's own account, and how long compiling
    took. `cache_copied` is what of the donated state is not updated in place."""

    arguments: int
    temporaries: int
    cache_copied: int
    seconds: float


def layout_for(config: ModelConfig, method: Method, context: int, chip: str) -> CacheLayout:
    """The layout of a cache of 16-bit numbers as a chip of `DEVICES` reads it best: bfloat16, or
    float16 on a T4, which has no other. GPUs want every layer by itself."""
    target = target_name(chip)
    return CacheLayout(
        shape=config.kv_shape,
        method=method,
        capacity=context,
        dtype="float16" if chip == "t4" else "bfloat16",
        layers="unroll" if family(target) == "gpu" else "scan",
        form=stored_form(target),
        target=target,
    )


def abstract_model(config: ModelConfig, layout: CacheLayout, weights: str | None = None) -> Model:
    """A model of shapes in the layout's dtype and form, its calibrated constants as a calibrated
    model has them, the layers' matrices as `weights` codes ("int8", "int4") if so wanted."""
    constants = tuple(run.wiring.constants(run.count, layout.dtype) for run in runs_of(layout))
    params = parameter_shapes(config, layout.dtype, weights)
    if layout.layers == "unroll":
        params = jax.eval_shape(unrolled, params)
    return Model(params, constants, config=config)


def _placed(tree, mesh, specs):
    """Shapes of `tree` on the mesh, by a prefix of specs."""

    def place(spec, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(
        lambda spec, part: jax.tree.map(functools.partial(place, spec), part), specs, tree
    )


def _model_and_cache(
    config: ModelConfig,
    method: Method,
    context: int,
    batch: int,
    rules: Rules,
    chip: str,
    weights: str | None = None,
):
    """A model and a cache as shapes on the mesh of `rules`."""
    layout = rules.cache_layout(layout_for(config, method, context, chip), batch)
    model = abstract_model(config, layout, weights)
    cache = jax.eval_shape(lambda: allocate_cache(layout, batch))
    params = _placed(model.params, rules.mesh, rules.parameters(model.params))
    constants = _placed(model.constants, rules.mesh, PartitionSpec())
    single_device = rules.mesh.size == 1

    def lie(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    model = model.replace(
        params=as_multiplied(params, lie),
        constants=constants,
        rules=None if single_device else rules,
    )
    return model, _placed(cache, rules.mesh, rules.cache(cache))


def decode_arguments(
    config: ModelConfig,
    method: Method,
    context: int,
    batch: int,
    rules: Rules,
    chip: str = "cpu",
    weights: str | None = None,
):
    """Describe the arguments of `decode_steps` as shapes on the mesh of `rules`."""
    model, cache = _model_and_cache(config, method, context, batch, rules, chip, weights)

    def inputs(cache):
        return unbegun(cache), make_sampling(), jnp.zeros((1,), jnp.int32), jnp.int32(0)

    state, *options = _placed(jax.eval_shape(inputs, cache), rules.mesh, PartitionSpec())
    return model, state.replace(cache=cache), *options


def prompt_arguments(
    config: ModelConfig, method: Method, context: int, new: int, batch: int, rules: Rules, chip: str
):
    """Describe the arguments of `prefill` and `forward`, for `new` tokens per row, as shapes on the
    mesh of `rules`."""
    model, cache = _model_and_cache(config, method, context, batch, rules, chip)
    tokens = jax.ShapeDtypeStruct((batch, new), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return model, *_placed((tokens, counts), rules.mesh, PartitionSpec()), cache


def lower_prompt(
    config: ModelConfig, method: Method, context: int, batch: int, chip: str
) -> Lowered:
    """The exact prefill of `batch` prompts of `context` tokens, lowered for one device of a chip,
    the cache donated."""
    rules = rules_for(config, method, ALONE, chip_devices(chip))
    arguments = prompt_arguments(config, method, context, context, batch, rules, chip)
    return prefill_donated.lower(*arguments)


def lower_chunk(
    config: ModelConfig, method: Method, context: int, new: int, batch: int, chip: str
) -> Lowered:
    """`new` tokens of each row through a cache that has room for `context` tokens more,
    likewise."""
    rules = rules_for(config, method, ALONE, chip_devices(chip))
    arguments = prompt_arguments(config, method, context + new, new, batch, rules, chip)
    return jax.jit(forward, static_argnames="last", donate_argnames="cache").lower(
        *arguments, last=True
    )


def lower_decode(
    config: ModelConfig,
    method: Method,
    context: int,
    batch: int,
    chip: str,
    mesh: MeshSize = ALONE,
    held: Sequence[int] = (),
    weights: str | None = None,
) -> Lowered:
    """The greedy decode loop of `batch` rows, lowered for a mesh of a chip's devices. Weights are
    in 16 bits, or the layers' matrices `weights` codes. Rows hold at most `held` tokens each, if
    not the whole context."""
    rules = rules_for(config, method, mesh, chip_devices(chip, mesh.devices))
    model, state, *options = decode_arguments(config, method, context, batch, rules, chip, weights)
    if held:
        bound = bound_for(layout_for(config, method, context, chip), held)
        state = state.replace(cache=bounded(state.cache, bound))
    return decode_steps.lower(model, state, *options)


def compile_decode(
    config: ModelConfig,
    method: Method,
    context: int,
    batch: int,
    chip: str,
    mesh: MeshSize = ALONE,
    weights: str | None = None,
) -> Compiled:
    """Compile what `lower_decode` gives and ask the compiler for its bytes. Seconds are those of
    XLA alone."""
    lowered = lower_decode(config, method, context, batch, chip, mesh, weights=weights)
    start = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    seconds = time.perf_counter() - start
    if memory is None:
        raise UserError(f"the compiler for {chip} says nothing of memory")
    copied = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes, copied, seconds)
