"""A step of a model and its cache on a mesh of devices, by the rules of kvqjax/parallel/rules.py.

One `shard_map` runs the whole step. A device holds a part of every array and runs the code of a
single device on it. `batch`, `width`, `sequence` and `kv_heads` are fields of `Rules`:

- Rows of the batch are split over `batch`; query heads, MLP, experts and vocabulary over `width`. A
  layer takes two sums over `width`: after the output projection and after the MLP.
- Blocks of the body are dealt over `sequence` in turn. A device attends to its own blocks, which
  gives (out, lse). The log-sum-exp merge over `sequence` is the only collective inside attention.
- A device holds whole experts, and computes those of its rows' tokens that chose them. All devices
  along `width` hold the same tokens and route them alike. A shared expert is split as an MLP is.
- If a method's codecs see each KV head by itself, keys and values are split over `kv_heads`, the
  first part of `width`. With more devices than KV heads, devices along the rest of `width` have the
  same KV heads and share their tokens: the body is dealt over them too, their queries are gathered
  before attention, and each keeps the output of its own heads.
- If a method mixes heads, a device needs all channels of a token. Then `kv_heads` is empty, and all
  devices along `width` share tokens. The key and value projections are still split over `width`,
  and keys and values are gathered. A method that rematerialises keys and values (XQuant) has whole
  projections on every device instead.
- Sinks, window and new tokens are on every device that has a row's KV head. All these devices
  encode the tokens that leave the window, and the device that owns their block stores them.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvqjax._arguments import named
from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache
from kvqjax.methods import MethodLike, parse
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.recurrent import GIVEN
from kvqjax.model.weight_codes import CodedWeight, place_codes
from kvqjax.model.weight_trees import as_multiplied
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.rules import Rules, shares_heads

AxisNames = str | tuple[str, ...] | None


def _mesh(shape: tuple[int, ...], devices) -> Mesh | AbstractMesh:
    """Make the mesh of the first of `devices` (None: of jax.devices()). Raises UserError for too
    few."""
    names = ("data", "seq", "kv", "group")
    count = math.prod(shape)
    if devices is None:
        devices = jax.devices()
    # Plans are made for chips that are not here.
    if not len(devices):
        return AbstractMesh(shape, names)
    if len(devices) < count:
        raise UserError(f"the mesh wants {count} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[:count]).reshape(shape), names)


def _divided(config: KVShape) -> dict[str, int]:
    """List the numbers, by their names in messages, that a mesh's `model` must divide. KV heads are
    not among them."""
    parts = {f"{config.num_heads} heads": config.num_heads}
    if not isinstance(config, ModelConfig):
        return parts
    experts = config.experts
    if config.recurrent is not None:
        key_heads = config.recurrent.key_heads
        parts[f"{key_heads} key heads of recurrent layers"] = key_heads
    if config.dense_layers:
        parts[f"MLP width {config.mlp_width}"] = config.mlp_width
    if experts is not None:
        parts[f"{experts.count} experts"] = experts.count
    if experts is not None and experts.shared_width:
        parts[f"shared MLP width {experts.shared_width}"] = experts.shared_width
    return parts


def rules_for(config: KVShape, method: MethodLike, size: MeshSize, devices=None) -> Rules:
    """Choose the rules for a model and the caches of a method.

    Args:
        config: the model's, or the shape of a model of another library.
        size: of the mesh.
        devices: the first `size.devices` of these are used; None: of jax.devices(); empty: a plan
            without devices.

    Returns:
        The rules. A vocabulary that `size.model` does not divide is not split.

    Raises:
        UserError: for heads, MLP or experts that cannot be split over `size.model`, and for too few
            devices.
    """
    kv = config.num_kv_heads
    model = size.model
    divided = _divided(config)
    if any(number % model for number in divided.values()) or (kv % model and model % kv):
        numbers = " and ".join(divided)
        raise UserError(
            f"mesh model={model} must divide {numbers}, and divide or be a multiple of {kv} KV heads"
        )
    # More devices than KV heads: several of them have the same head, and share its tokens.
    parts = min(model, kv)
    rules = Rules(mesh=_mesh((size.data, size.seq, parts, model // parts), devices))
    # A vocabulary that cannot be split evenly lies on every device: padding it would change the
    # logits' shape.
    if not isinstance(config, ModelConfig) or config.vocab_size % model:
        rules = dataclasses.replace(rules, vocabulary=())
    shape = config.kv_shape if isinstance(config, ModelConfig) else config.alone
    layout = CacheLayout(shape=shape, method=parse(method), capacity=1, dtype="float32")
    if not shares_heads(layout, parts):
        # A method that mixes heads needs all channels of a token on one device. If it caches the
        # projections' results, projections are split and results gathered. If it caches their input
        # (XQuant), every device multiplies cached tokens by whole projections.
        sources = [run.wiring.storage.sources.keys() for run in runs_of(layout)]
        caches_results = all({"k", "v"} <= names for names in sources)
        columns = rules.width if caches_results and config.kv_width % model == 0 else ()
        rules = dataclasses.replace(
            rules, kv_heads=(), projections=columns, sequence=("seq", "kv", "group")
        )
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
    """Choose the rules for caches of a model of another library, on that model's own mesh.

    Args:
        mesh: the model's mesh, of axes of any kind (Auto, Explicit).
        batch_axis: the mesh axis, or axes, that split rows.
        head_axis: the mesh axis, or axes, that split KV heads. Only the first of them do so: as
            many as divide the number of KV heads, and none for a method that mixes heads. The
            others split the body's tokens.
        sequence_axis: the mesh axis, or axes, that split the body's tokens.

    Returns:
        The rules, for `init_cache` and `load_cache`.

    Raises:
        UserError: for a `mesh` that is none, an axis that it does not have, and an axis that is
            named twice.
    """
    if not isinstance(mesh, Mesh):
        raise UserError(
            f"mesh is {named(mesh)}; wanted a jax.sharding.Mesh, such as jax.make_mesh gives"
        )
    batch = _axes(mesh, batch_axis)
    heads = _axes(mesh, head_axis)
    sequence = _axes(mesh, sequence_axis)
    used = (*batch, *heads, *sequence)
    for axis in used:
        if used.count(axis) > 1:
            raise UserError(
                f"mesh axis {axis!r} is named twice; it splits rows, heads or the sequence"
            )
    layout = CacheLayout(shape=shape.alone, method=parse(method), capacity=1, dtype="float32")
    rules = Rules(mesh=mesh, batch=batch, width=heads, projections=(), vocabulary=())
    # The largest number of head axes that can split KV heads; 0 always can.
    for count in range(len(heads), -1, -1):
        parts = rules.size(heads[:count])
        if shape.num_kv_heads % parts == 0 and shares_heads(layout, parts):
            break
    return dataclasses.replace(rules, kv_heads=heads[:count], sequence=(*sequence, *heads[count:]))


def _axes(mesh: Mesh, names: AxisNames) -> tuple[str, ...]:
    """Return the axes that one name, several or none stand for. Raises UserError for an axis that
    the mesh lacks."""
    if names is None:
        axes = ()
    elif isinstance(names, str):
        axes = (names,)
    else:
        axes = tuple(names)
    for axis in axes:
        if axis not in mesh.axis_names:
            known = ", ".join(map(repr, mesh.axis_names))
            raise UserError(f"the mesh has no axis {axis!r}; it has {known}")
    return axes


def _restored(result, layout: CacheLayout):
    """Put the layout of the whole cache back into the caches in a result."""

    def is_cache(x) -> bool:
        return isinstance(x, Cache)

    def with_layout(x):
        return x.replace(layout=layout) if is_cache(x) else x

    return jax.tree.map(with_layout, result, is_leaf=is_cache)


def of_constants(rules: Rules, constants):
    """Return the specs of calibrated constants [L, ...]. Where KV heads are split, the axis behind
    the layers is that of heads or channels (`shares_heads`), and is split with them."""
    by_head = PartitionSpec(None, rules.kv_heads)

    def spec_of(x) -> PartitionSpec:
        return by_head if x.ndim > 1 else PartitionSpec()

    return jax.tree.map(spec_of, constants)


def on_parts(function: Callable, rules: Rules, cache: Cache, *arguments, specs: tuple, out):
    """Run `function(cache, *arguments)` on every device's part of cache and arguments.

    Args:
        function: gives results whose caches have the layout of a part.
        rules: of the mesh.
        cache: the whole cache.
        arguments: pytrees of whole arrays.
        specs: of the arguments.
        out: specs of the results.

    Returns:
        The results, whose caches have the layout of the whole.
    """
    # Inside, a cache's layout is that of the device's part, so that code for one device runs
    # unchanged.
    layout = cache.layout

    def local(cache, *arguments):
        part = cache.replace(layout=rules.local_layout(layout))
        return _restored(function(part, *arguments), layout)

    return over_parts(local, rules, cache, *arguments, specs=(rules.cache(cache), *specs), out=out)


def lying_as(x, like, rules: Rules):
    """Split `x` over the mesh's Explicit axes as `like`, an array of the same shape, is split."""
    place = jax.typeof(like).sharding
    if rules.explicit and place.mesh.axis_names:
        return jax.sharding.reshard(x, place)
    return x


def over_parts(function: Callable, rules: Rules, *arguments, specs: tuple, out):
    """Run `function(*arguments)` on every device's part of the arguments, which are first split as
    `specs` say."""
    arguments = tuple(sent(x, rules, spec) for x, spec in zip(arguments, specs, strict=True))
    mapped = jax.shard_map(
        function, mesh=rules.mesh, in_specs=specs, out_specs=out, check_vma=False
    )
    return mapped(*arguments)


def sent(tree, rules: Rules, specs):
    """Split the arrays of a program over the mesh's Explicit axes as `specs` say. `shard_map`
    itself splits its arguments over Auto axes, but not over Explicit ones."""
    explicit = rules.explicit
    if not explicit:
        return tree

    def send(spec, part):
        # JAX refuses to reshard along Auto axes, so these are left out of the spec.
        groups = []
        for axes in spec:
            names = axes if isinstance(axes, tuple) else (axes,)
            groups.append(tuple(axis for axis in names if axis in explicit))
        sharding = NamedSharding(rules.mesh, PartitionSpec(*groups))
        return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), part)

    return jax.tree.map(send, specs, tree)


def over_mesh(function: Callable, model, cache: Cache, *arguments, out: tuple[str, ...]):
    """Run `function(model, cache, *arguments)` on every device's part of model, cache and
    arguments.

    Args:
        function: a step for one device.
        model: with rules.
        cache: the whole cache.
        arguments: arrays [B, ...], or tuples of pending sources.
        out: names of the results: "logits" [B, V], "chunk" [B, T, V], "cache" or "pending".

    Returns:
        The results; a single one by itself.
    """
    rules = model.rules
    rows = PartitionSpec(rules.batch)
    source = PartitionSpec(None, rules.batch, None, rules.kv_heads)
    of_heads = PartitionSpec(None, rules.batch, None, rules.width)
    # Sources of layers of attention, run by run, then those of recurrent layers.
    pending = [dict.fromkeys(run.wiring.storage.sources, source) for run in runs_of(cache.layout)]
    pending += [dict.fromkeys(GIVEN, of_heads) for _ in cache.states]
    specs = {
        "logits": PartitionSpec(rules.batch, rules.vocabulary),
        "chunk": PartitionSpec(rules.batch, None, rules.vocabulary),
        "cache": rules.cache(cache),
        "pending": tuple(pending),
    }

    def local(cache, model, *arguments):
        # The part of a model has no rules, so that the step does not split it again.
        local_model = model.replace(config=rules.local_config(model.config), rules=None)
        return function(local_model, cache, *arguments)

    constants = of_constants(rules, model.constants)
    placed = model.replace(params=rules.parameters(model.params), constants=constants)
    in_specs = [placed]
    for x in arguments:
        in_specs.append(specs["pending"] if isinstance(x, tuple) else rows)
    results = tuple(specs[name] for name in out)
    if len(results) == 1:
        (results,) = results
    return on_parts(local, rules, cache, model, *arguments, specs=tuple(in_specs), out=results)


def _placed(parameter, sharding: NamedSharding):
    """Place a parameter on the mesh. It may be an array, codes with scales, or a tree of either."""

    def is_coded(x) -> bool:
        return isinstance(x, CodedWeight)

    def place(x):
        return place_codes(x, sharding) if is_coded(x) else jax.device_put(x, sharding)

    return jax.tree.map(place, parameter, is_leaf=is_coded)


def shard(
    whole: Model, method: MethodLike, *, data: int = 1, seq: int = 1, model: int = 1
) -> Model:
    """Place a model on a mesh of devices. Large models are better loaded in place:
    `load(name, sharding=rules_for(...))`.

    Args:
        whole: the model.
        method: of the caches.
        data: devices over which rows are split.
        seq: devices over which blocks of the body are split.
        model: devices over which heads, MLP and vocabulary are split.

    Returns:
        The model on data * seq * model devices.

    Raises:
        UserError: as `rules_for` does.
    """
    rules = rules_for(whole.config, method, MeshSize(data=data, seq=seq, model=model))

    def place(spec, parameter):
        return _placed(parameter, NamedSharding(rules.mesh, spec))

    params = jax.tree.map(place, rules.parameters(whole.params), whole.params)
    constants, others = jax.device_put((whole.constants, whole.others), rules.everywhere)
    return whole.replace(
        params=as_multiplied(params), constants=constants, others=others, rules=rules
    )
