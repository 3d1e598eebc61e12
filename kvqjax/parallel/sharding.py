"""A model and its cache on a mesh of devices: which axis of which array is split over which mesh axis, said once.

One `shard_map` runs the whole step; a device holds its part of everything and runs the code of a single device on it:

- rows of the batch over `batch`; query heads, MLP, experts and vocabulary over `width`; blocks of the body, dealt in
  turn, over `sequence`. Two sums over `width` per layer (after the output projection and after the MLP), as usual.
- Of experts, a device holds a share of whole ones and computes the tokens that chose them; every device routes every
  token of its rows, since all hold it. A shared expert is split as an MLP is.
- Attention to the body gives (out, lse) of the tokens that lie here; the log-sum-exp merge over `sequence` is the only
  collective inside attention.
- A method whose codecs see each KV head by itself also splits keys and values over `kv_heads`, the leading part of
  `width`. Devices along the rest of `width` (more devices than KV heads) share the tokens of their KV heads: the body
  is dealt over them too, their queries are gathered before attention, and each keeps its own heads' output.
- A method that mixes heads needs all channels of a token on one device: `kv_heads` is empty, so all of `width` shares
  tokens. Its key and value projections are split over `width` all the same, and what they give is gathered; whole on
  every device they are for a method that rematerialises keys and values (XQuant).
- Sinks, window and new tokens are on every device of a row and KV head, which all encode what is due; the owner of a
  block stores it.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvqjax._arguments import named
from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache
from kvqjax.methods import MethodLike, parse
from kvqjax.methods.rotation import CONSTANTS as ROTATIONS
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.recurrent import GIVEN
from kvqjax.model.weight_codes import CodedWeight, place_codes
from kvqjax.model.weight_trees import as_multiplied
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.rules import Rules, shares_heads

__all__ = ["lying_as", "of_constants", "on_parts", "over_mesh", "over_parts", "rules_for", "rules_on", "sent", "shard"]

AxisNames = str | tuple[str, ...] | None


def _mesh(shape: tuple[int, ...], devices) -> Mesh | AbstractMesh:
    names = ("data", "seq", "kv", "group")
    devices = jax.devices() if devices is None else devices
    # A plan asks what lies where on chips that are not here.
    if not len(devices):
        return AbstractMesh(shape, names)
    if len(devices) < math.prod(shape):
        raise UserError(f"the mesh wants {math.prod(shape)} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[: math.prod(shape)]).reshape(shape), names)


def _divided(config: KVShape) -> dict[str, int]:
    """What a mesh's `model` must divide beside the KV heads."""
    parts = {f"{config.num_heads} heads": config.num_heads}
    if not isinstance(config, ModelConfig):
        return parts
    experts = config.experts
    if config.recurrent is not None:
        parts[f"{config.recurrent.key_heads} key heads of recurrent layers"] = config.recurrent.key_heads
    if config.dense_layers:
        parts[f"MLP width {config.mlp_width}"] = config.mlp_width
    if experts is not None:
        parts[f"{experts.count} experts"] = experts.count
    if experts is not None and experts.shared_width:
        parts[f"shared MLP width {experts.shared_width}"] = experts.shared_width
    return parts


def rules_for(config: KVShape, method: MethodLike, size: MeshSize, devices=None) -> Rules:
    """Rules for a model, or for the shape of another one, and the caches of `method` on `size.devices` devices (the
    first of jax.devices()). An empty list of devices stands for ones that are only planned with.

    Raises UserError when heads, MLP or experts cannot be split over `size.model`, or devices are missing. A vocabulary
    that it does not divide is not split."""
    kv, model, divided = config.num_kv_heads, size.model, _divided(config)
    if any(number % model for number in divided.values()) or (kv % model and model % kv):
        numbers = " and ".join(divided)
        raise UserError(f"mesh model={model} must divide {numbers}, and divide or be a multiple of {kv} KV heads")
    # More devices than KV heads: several of them have the same head, and share its tokens.
    parts = min(model, kv)
    rules = Rules(mesh=_mesh((size.data, size.seq, parts, model // parts), devices))
    # A vocabulary that cannot be split evenly lies on every device: padding it would change the logits' shape.
    if not isinstance(config, ModelConfig) or config.vocab_size % model:
        rules = dataclasses.replace(rules, vocabulary=())
    shape = config.kv_shape if isinstance(config, ModelConfig) else config.alone
    layout = CacheLayout(shape=shape, method=parse(method), capacity=1, dtype="float32")
    if not shares_heads(layout, parts):
        # A method that mixes heads needs a token's channels on one device. Its projections are still split where they
        # give what is cached; a method that caches their input (XQuant) multiplies cached tokens by all of them.
        stored = all({"k", "v"} <= run.wiring.storage.sources.keys() for run in runs_of(layout))
        columns = rules.width if stored and config.kv_width % model == 0 else ()
        rules = dataclasses.replace(rules, kv_heads=(), projections=columns, sequence=("seq", "kv", "group"))
    return rules


def rules_on(
    mesh: Mesh,
    shape: KVShape,
    method: MethodLike,
    *,
    batch_axis: AxisNames = None,
    head_axis: AxisNames = None,
    sequence_axis: AxisNames = None,
) -> Rules:
    """Rules for caches of another model's shape on that model's own mesh, whatever its axes are called.

    Args:
        mesh: the model's mesh, of axes of any kind (Auto, Explicit).
        shape: the model's shape.
        method: of the caches.
        batch_axis: the mesh axis, or axes, that split rows.
        head_axis: those that split KV heads, as far as they divide them and the method keeps heads apart; along the
            rest of them, which may be all, the body's tokens are split.
        sequence_axis: those that split the body's tokens.

    Returns:
        The rules, for `init_cache` and `load_cache`.

    Raises:
        UserError: for what is no mesh, an axis that it has not, and an axis that is named twice.
    """
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh is {named(mesh)}; wanted a jax.sharding.Mesh, such as jax.make_mesh gives")
    batch, heads, sequence = (_axes(mesh, x) for x in (batch_axis, head_axis, sequence_axis))
    for axis in (used := (*batch, *heads, *sequence)):
        if used.count(axis) > 1:
            raise UserError(f"mesh axis {axis!r} is named twice; it splits rows, heads or the sequence")
    layout = CacheLayout(shape=shape.alone, method=parse(method), capacity=1, dtype="float32")
    rules = Rules(mesh=mesh, batch=batch, width=heads, projections=(), vocabulary=())
    for count in range(len(heads), -1, -1):  # as many of the axes as keep heads apart
        parts = rules.size(heads[:count])
        if shape.num_kv_heads % parts == 0 and shares_heads(layout, parts):
            break
    return dataclasses.replace(rules, kv_heads=heads[:count], sequence=(*sequence, *heads[count:]))


def _axes(mesh: Mesh, names: AxisNames) -> tuple[str, ...]:
    """Axes of a mesh, of one name, several or none."""
    axes = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    for axis in axes:
        if axis not in mesh.axis_names:
            raise UserError(f"the mesh has no axis {axis!r}; it has {', '.join(map(repr, mesh.axis_names))}")
    return axes


def _restored(result, layout: CacheLayout):
    """A result whose caches carry the whole layout again."""
    is_cache = lambda x: isinstance(x, Cache)  # noqa: E731
    return jax.tree.map(lambda x: x.replace(layout=layout) if is_cache(x) else x, result, is_leaf=is_cache)


def of_constants(rules: Rules, constants):
    """Specs of calibrated constants: rotations are a head's own, all others are on every device."""

    def spec(path, _):
        of_heads = any(getattr(key, "key", None) == ROTATIONS for key in path)
        return PartitionSpec(None, rules.kv_heads) if of_heads else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, constants)


def on_parts(function: Callable, rules: Rules, cache: Cache, *arguments, specs: tuple, out):
    """`function(cache, *arguments)` on every device's part of them; `specs` are the arguments', `out` the results'."""
    # Inside, a cache's layout is that of the device's part, so that code for one device runs unchanged.
    layout = cache.layout

    def local(cache, *arguments):
        return _restored(function(cache.replace(layout=rules.local_layout(layout)), *arguments), layout)

    return over_parts(local, rules, cache, *arguments, specs=(rules.cache(cache), *specs), out=out)


def lying_as(x, like, rules: Rules):
    """`x` sent to where `like`, an array of its shape, lies along the mesh's Explicit axes."""
    place = jax.typeof(like).sharding
    return jax.sharding.reshard(x, place) if rules.explicit and place.mesh.axis_names else x


def over_parts(function: Callable, rules: Rules, *arguments, specs: tuple, out):
    """`function(*arguments)` on every device's part of them, which are sent to where their `specs` say first."""
    arguments = tuple(sent(x, rules, spec) for x, spec in zip(arguments, specs, strict=True))
    return jax.shard_map(function, mesh=rules.mesh, in_specs=specs, out_specs=out, check_vma=False)(*arguments)


def sent(tree, rules: Rules, specs):
    """Arrays of a program that lie as their `specs` say along the mesh's Explicit axes. Along those whose kind is Auto
    JAX itself sends what `shard_map` takes, and along no other."""
    explicit = rules.explicit
    if not explicit:
        return tree

    def send(spec, part):
        # JAX refuses to reshard along Auto axes.
        groups = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
        along = PartitionSpec(*(tuple(axis for axis in axes if axis in explicit) for axes in groups))
        return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(rules.mesh, along)), part)

    return jax.tree.map(send, specs, tree)


def over_mesh(function: Callable, model, cache: Cache, *arguments, out: tuple[str, ...]):
    """`function(model, cache, *arguments)` on every device's part. `arguments` are arrays with rows in front, or
    pending sources; `out` names the results: "logits" [B, V], "chunk" [B, T, V], "cache" or "pending"."""
    rules = model.rules
    rows = PartitionSpec(rules.batch)
    source = PartitionSpec(None, rules.batch, None, rules.kv_heads)
    of_heads = PartitionSpec(None, rules.batch, None, rules.width)
    specs = {
        "logits": PartitionSpec(rules.batch, rules.vocabulary),
        "chunk": PartitionSpec(rules.batch, None, rules.vocabulary),
        "cache": rules.cache(cache),
        "pending": (
            *(dict.fromkeys(run.wiring.storage.sources, source) for run in runs_of(cache.layout)),
            *(dict.fromkeys(GIVEN, of_heads) for _ in cache.states),
        ),
    }

    def local(cache, model, *arguments):
        # Without rules: the step that runs inside must not split its part again.
        local_model = model.replace(config=rules.local_config(model.config), rules=None)
        return function(local_model, cache, *arguments)

    constants = of_constants(rules, model.constants)
    placed = model.replace(params=rules.parameters(model.params), constants=constants)
    in_specs = (placed, *(specs["pending"] if isinstance(x, tuple) else rows for x in arguments))
    results = tuple(specs[name] for name in out)
    results = results[0] if len(results) == 1 else results
    return on_parts(local, rules, cache, model, *arguments, specs=in_specs, out=results)


def _placed(parameter, sharding: NamedSharding):
    """A parameter where its rule says, as an array, as codes, or as rows of either."""
    coded = lambda x: isinstance(x, CodedWeight)  # noqa: E731
    place = lambda x: (place_codes if coded(x) else jax.device_put)(x, sharding)  # noqa: E731
    return jax.tree.map(place, parameter, is_leaf=coded)


def shard(whole: Model, method: MethodLike, *, data: int = 1, seq: int = 1, model: int = 1) -> Model:
    """The model placed on a mesh of data * seq * model devices for caches of `method`: see `rules_for`. Large
    models are better loaded in place: `load(name, sharding=rules_for(...))`."""
    rules = rules_for(whole.config, method, MeshSize(data=data, seq=seq, model=model))
    params = jax.tree.map(
        lambda spec, x: _placed(x, NamedSharding(rules.mesh, spec)), rules.parameters(whole.params), whole.params
    )
    constants, others = jax.device_put((whole.constants, whole.others), rules.everywhere)
    return whole.replace(params=as_multiplied(params), constants=constants, others=others, rules=rules)
