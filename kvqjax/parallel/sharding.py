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
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvqjax._errors import UserError
from kvqjax.cache.state import Cache, CacheLayout, Run, RunPlan, plan
from kvqjax.methods import MethodLike, parse
from kvqjax.methods.rotation import CONSTANTS as ROTATIONS
from kvqjax.methods.wiring import Wiring
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.decoder import is_unrolled
from kvqjax.model.experts import BY_EXPERT
from kvqjax.model.loading import CODED_WEIGHTS, Model

__all__ = ["MeshSize", "Rules", "over_mesh", "rules_for", "shard", "shares_heads"]

Axes = tuple[str, ...]

MOST_DEVICES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSize:
    """Devices along each direction: rows, blocks of the sequence, and heads with MLP and vocabulary."""

    data: int = 1
    seq: int = 1
    model: int = 1

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise UserError(f"mesh {name}={size}; at least 1 device is wanted")
            if size > MOST_DEVICES:
                raise UserError(f"mesh {name}={size}; at most {MOST_DEVICES} devices are possible")

    @classmethod
    def parse(cls, text: str) -> "MeshSize":
        """Read "data=2,model=4"; what is not named is 1."""
        sizes: dict[str, int] = {}
        for item in filter(None, text.split(",")):
            name, _, count = item.partition("=")
            if name not in ("data", "seq", "model") or name in sizes or not count.isdigit():
                raise UserError(f"mesh {text!r}: {item!r} is not one of data=N, seq=N, model=N")
            sizes[name] = int(count)
        return cls(**sizes)

    @property
    def devices(self) -> int:
        return self.data * self.seq * self.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axes to mesh axes. `kv_heads` is a leading part of `width`; the rest of `width` ends `sequence`.
    `projections` splits the columns of the key and value projections: as `kv_heads`, or as `width`."""

    mesh: Mesh | AbstractMesh
    batch: Axes = ("data",)
    sequence: Axes = ("seq", "group")
    kv_heads: Axes = ("kv",)
    projections: Axes = ("kv",)
    width: Axes = ("kv", "group")
    vocabulary: Axes = ("kv", "group")

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def parameter(self, name: str) -> PartitionSpec:
        """Of a parameter by its name in the tree ("embed", "layers/q"); axes as in kvqjax/model/decoder.py."""
        layer = name.removeprefix("layers/")
        if name in ("embed", "head"):
            return PartitionSpec(*((self.vocabulary, None) if name == "embed" else (None, self.vocabulary)))
        if layer in ("q", "gate", "up", "shared_gate", "shared_up"):
            return PartitionSpec(None, None, self.width)
        if layer in ("o", "down", "shared_down") or layer in BY_EXPERT:
            return PartitionSpec(None, self.width)
        if layer in ("k", "v"):
            return PartitionSpec(None, None, self.projections)
        if layer in ("q_bias", "k_bias", "v_bias"):
            # A key bias lies as the keys that are cached, so that a read of some block needs no exchange for it.
            axes = {"q_bias": self.width, "k_bias": self.kv_heads, "v_bias": self.projections}
            return PartitionSpec(None, axes[layer])
        return PartitionSpec()

    def placement(self, name: str) -> NamedSharding:
        """Where a parameter lies: the `sharding` that `kvqjax.load` takes."""
        return NamedSharding(self.mesh, self.parameter(name))

    @property
    def everywhere(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shares(self, tree, specs):
        """Shapes of what one device holds of `tree`."""

        def share(spec, x):
            return jax.ShapeDtypeStruct(NamedSharding(self.mesh, spec).shard_shape(x.shape), x.dtype)

        return jax.tree.map(lambda spec, part: jax.tree.map(functools.partial(share, spec), part), specs, tree)

    def parameters(self, params: dict) -> dict:
        """Specs of a params pytree."""
        specs = {name: self.parameter(name) for name in params if name != "layers"}
        if is_unrolled(params):  # the same without the layers' axis
            own = lambda name: PartitionSpec(*self.parameter(f"layers/{name}")[1:])  # noqa: E731
            return specs | {"layers": [{name: own(name) for name in layer} for layer in params["layers"]]}
        return specs | {"layers": {name: self.parameter(f"layers/{name}") for name in params["layers"]}}

    def run(self, state: Run, plan: RunPlan) -> Run:
        """Specs of one run's arrays."""
        exact = PartitionSpec(None, self.batch, None, self.kv_heads)
        lanes = PartitionSpec(None, self.batch, self.sequence, self.kv_heads)
        tokens = PartitionSpec(None, self.batch, self.kv_heads, self.sequence)

        by_head = PartitionSpec(None, self.batch, self.kv_heads, self.sequence, None)

        def field(source: str, name: str, stored):
            about = plan.wiring.storage.codecs[source].fields[name]
            spec = by_head if about.heads else tokens if about.along_lanes else lanes
            return tuple(spec for _ in stored)

        return Run(
            body={s: {n: field(s, n, stored) for n, stored in fields.items()} for s, fields in state.body.items()},
            sinks=dict.fromkeys(state.sinks, exact),
            window=dict.fromkeys(state.window, exact),
            flushed=tuple(PartitionSpec(self.batch) for _ in state.flushed),
        )

    def cache(self, cache: Cache) -> Cache:
        """Specs of a cache."""
        rows = PartitionSpec(self.batch)
        runs = tuple(self.run(s, p) for s, p in zip(cache.runs, plan(cache.layout), strict=True))
        kept = dict.fromkeys(cache.kept, rows)
        return cache.replace(runs=runs, lengths=rows, overflow=rows, finite=rows, kept=kept)

    def places(self, cache: Cache) -> Cache:
        """Where each array of a cache lies."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.cache(cache))

    def local_config(self, config: ModelConfig) -> ModelConfig:
        """What one device computes: the KV heads it caches and the query heads that attend to them."""
        rest = self.width[len(self.kv_heads) :]
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size(self.kv_heads),
            num_kv_heads=config.num_kv_heads // self.size(self.kv_heads),
            split=self.width if self.size(self.width) > 1 else (),
            gathered=rest if self.size(rest) > 1 else (),
        )

    def local_layout(self, layout: CacheLayout) -> CacheLayout:
        axes = self.sequence if layout.dealt > 1 else ()
        shape = _share(layout.shape, self.size(self.kv_heads))
        heads = self.width if self.size(self.width) > 1 else ()
        return dataclasses.replace(layout, shape=shape, dealt_over=axes, heads_over=heads)

    def cache_layout(self, layout: CacheLayout, batch: int) -> CacheLayout:
        """The layout of a cache of `batch` rows that is dealt as these rules say. Raises UserError when the method
        mixes what they split, or they cannot share out the rows."""
        if layout.method.keep is not None and self.mesh.size > 1:
            raise UserError(f"{layout.method}: tokens can be evicted on one device only, not on a mesh")
        if batch % self.size(self.batch):
            raise UserError(f"{batch} rows cannot be split over {self.size(self.batch)} devices")
        if not shares_heads(layout, self.size(self.kv_heads)):
            raise UserError(f"{layout.method} mixes KV heads, and this model is split for a method that does not")
        return dataclasses.replace(layout, dealt=self.size(self.sequence))


def _share(shape: KVShape, parts: int) -> KVShape:
    """The shape of one of `parts` devices that share out the heads."""
    return dataclasses.replace(shape, num_heads=shape.num_heads // parts, num_kv_heads=shape.num_kv_heads // parts)


def shares_heads(layout: CacheLayout, parts: int) -> bool:
    """Whether `parts` devices can each cache their own KV heads: every stored field is as wide on a part of the heads
    as its share of the whole, and nothing is calibrated on, or carried for, all heads together. Fitted rotations are a
    head's own."""
    if parts == 1:
        return True
    try:
        local = plan(dataclasses.replace(layout, shape=_share(layout.shape, parts)))
    except UserError:
        return False
    return all(_is_share(a.wiring, b.wiring, parts) for a, b in zip(plan(layout), local, strict=True))


def _is_share(whole: Wiring, part: Wiring, parts: int) -> bool:
    def widened(wiring: Wiring, times: int):
        fields = {
            (source, name): dataclasses.replace(field, width=field.width * times, heads=field.heads * times)
            for source, codec in wiring.storage.codecs.items()
            for name, field in codec.fields.items()
        }
        return {source: width * times for source, width in wiring.storage.sources.items()}, fields

    alone = not (whole.chain.carry or whole.wanted().keys() - {ROTATIONS})
    return alone and widened(whole, 1) == widened(part, parts)


def _mesh(shape: tuple[int, ...], devices) -> Mesh | AbstractMesh:
    names = ("data", "seq", "kv", "group")
    devices = jax.devices() if devices is None else devices
    if not len(devices):
        return AbstractMesh(shape, names)
    if len(devices) < math.prod(shape):
        raise UserError(f"the mesh wants {math.prod(shape)} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[: math.prod(shape)]).reshape(shape), names)


def _divided(config: ModelConfig) -> dict[str, int]:
    """What a mesh's `model` must divide beside the KV heads."""
    experts = config.experts
    parts = {f"{config.num_heads} heads": config.num_heads}
    if config.dense_layers:
        parts[f"MLP width {config.mlp_width}"] = config.mlp_width
    if experts is not None:
        parts[f"{experts.count} experts"] = experts.count
    if experts is not None and experts.shared_width:
        parts[f"shared MLP width {experts.shared_width}"] = experts.shared_width
    return parts


def rules_for(config: ModelConfig, method: MethodLike, size: MeshSize, devices=None) -> Rules:
    """Rules for a model and the caches of `method` on `size.devices` devices (the first of jax.devices()). An empty
    list of devices stands for ones that are only planned with.

    Raises UserError when heads, MLP or experts cannot be split over `size.model`, or devices are missing. A vocabulary
    that it does not divide is not split."""
    kv, model, divided = config.num_kv_heads, size.model, _divided(config)
    if any(number % model for number in divided.values()) or (kv % model and model % kv):
        named = " and ".join(divided)
        raise UserError(f"mesh model={model} must divide {named}, and divide or be a multiple of {kv} KV heads")
    parts = min(model, kv)
    rules = Rules(mesh=_mesh((size.data, size.seq, parts, model // parts), devices))
    if config.vocab_size % model:
        rules = dataclasses.replace(rules, vocabulary=())
    layout = CacheLayout(shape=config.kv_shape, method=parse(method), capacity=1, dtype="float32")
    if not shares_heads(layout, parts):
        stored = all({"k", "v"} <= run.wiring.storage.sources.keys() for run in plan(layout))
        columns = rules.width if stored and config.kv_width % model == 0 else ()
        rules = dataclasses.replace(rules, kv_heads=(), projections=columns, sequence=("seq", "kv", "group"))
    return rules


def _restored(result, layout: CacheLayout):
    """A result whose caches carry the whole layout again."""
    is_cache = lambda x: isinstance(x, Cache)  # noqa: E731
    return jax.tree.map(lambda x: x.replace(layout=layout) if is_cache(x) else x, result, is_leaf=is_cache)


def over_mesh(function: Callable, model, cache: Cache, *arguments, out: tuple[str, ...]):
    """`function(model, cache, *arguments)` on every device's part. `arguments` are arrays with rows in front, or
    pending sources; `out` names the results: "logits" [B, V], "chunk" [B, T, V], "cache" or "pending"."""
    rules, layout = model.rules, cache.layout
    rows = PartitionSpec(rules.batch)
    source = PartitionSpec(None, rules.batch, None, rules.kv_heads)
    specs = {
        "logits": PartitionSpec(rules.batch, rules.vocabulary),
        "chunk": PartitionSpec(rules.batch, None, rules.vocabulary),
        "cache": rules.cache(cache),
        "pending": tuple(dict.fromkeys(run.wiring.storage.sources, source) for run in plan(layout)),
    }

    def local(model, cache, *arguments):
        inside = model.replace(config=rules.local_config(model.config), rules=None)
        result = function(inside, cache.replace(layout=rules.local_layout(layout)), *arguments)
        return _restored(result, layout)

    def of_constant(path, _):
        own = any(getattr(key, "key", None) == ROTATIONS for key in path)
        return PartitionSpec(None, rules.kv_heads) if own else PartitionSpec()

    constants = jax.tree_util.tree_map_with_path(of_constant, model.constants)
    placed = model.replace(params=rules.parameters(model.params), constants=constants)
    given = tuple(specs["pending"] if isinstance(x, tuple) else rows for x in arguments)
    results = tuple(specs[name] for name in out)
    results = results[0] if len(results) == 1 else results
    return jax.shard_map(
        local, mesh=rules.mesh, in_specs=(placed, specs["cache"], *given), out_specs=results, check_vma=False
    )(model, cache, *arguments)


def shard(whole: Model, method: MethodLike, *, data: int = 1, seq: int = 1, model: int = 1) -> Model:
    """The model placed on a mesh of data * seq * model devices for caches of `method`: see `rules_for`. Large
    models are better loaded in place: `load(name, sharding=rules_for(...))`."""
    rules = rules_for(whole.config, method, MeshSize(data=data, seq=seq, model=model))
    if whole.weights in CODED_WEIGHTS:
        raise UserError(f"weights {whole.weights!r} cannot be split over a mesh")
    params = jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(rules.mesh, spec)), rules.parameters(whole.params), whole.params
    )
    constants = jax.device_put(whole.constants, rules.everywhere)
    return whole.replace(params=params, constants=constants, rules=rules)
