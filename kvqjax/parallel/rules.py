"""Which axis of which array is split over which axis of a mesh (kvqjax/parallel/sharding.py), said once."""

import dataclasses
import functools
import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run
from kvqjax.methods.layer_cache import Wiring
from kvqjax.methods.rotation import CONSTANTS as ROTATIONS
from kvqjax.model.config import KVShape, ModelConfig, RecurrentConfig
from kvqjax.model.weight_trees import MATRICES, OF_EXPERTS, is_unrolled
from kvqjax.ops.packing.base import CHANNELS, TOKENS

__all__ = ["Rules", "shares_heads"]

Axes = tuple[str, ...]


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

    @property
    def explicit(self) -> frozenset[str]:
        """Mesh axes whose kind is Explicit: every array's type says how it lies along them."""
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)

    def splits_as(self, other: "Rules | None") -> bool:
        """Whether a row of a cache lies on one mesh as by other rules, whatever splits rows."""
        part = lambda rules: (rules.mesh, rules.sequence, rules.kv_heads)  # noqa: E731
        return other is not None and part(self) == part(other)

    def parameter(self, name: str) -> PartitionSpec:
        """Of a parameter by its name in the tree ("embed", "layers/q"); axes as in kvqjax/model/decoder.py."""
        layer = name.removeprefix("layers/")
        if name in ("embed", "head"):
            return PartitionSpec(*((self.vocabulary, None) if name == "embed" else (None, self.vocabulary)))
        recurrent = layer.startswith("delta_") and layer != "delta_norm"  # split by heads
        if layer in ("q", "q_gate", "gate", "up", "shared_gate", "shared_up"):
            return PartitionSpec(None, None, self.width)
        if recurrent and name in MATRICES and layer != "delta_o":
            return PartitionSpec(None, None, self.width)
        if layer in ("o", "down", "shared_down") or layer in OF_EXPERTS or recurrent:
            return PartitionSpec(None, self.width)
        if layer in ("k", "v"):
            return PartitionSpec(None, None, self.projections)
        if layer in ("q_bias", "k_bias", "v_bias"):
            # A key bias lies as the keys that are cached, so that a read of some block needs no exchange for it.
            axes = {"q_bias": self.width, "k_bias": self.kv_heads, "v_bias": self.projections}
            return PartitionSpec(None, axes[layer])
        if layer == "score_sinks":  # as the query heads that attend on a device
            return PartitionSpec(None, self.kv_heads)
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

    def run(self, state: Run, plan: RunLayout) -> Run:
        """Specs of one run's arrays."""
        exact = PartitionSpec(None, self.batch, None, self.kv_heads)
        shared = {TOKENS: self.sequence, CHANNELS: self.kv_heads, None: None}

        def field(source: str, name: str, stored):
            axes = plan.wiring.storage.codecs[source].fields[name].packing.axes
            # Any row may have any page, so that every device has a part of each.
            rows = None if plan.page else self.batch
            spec = PartitionSpec(None, rows, *(shared[axis] for axis in axes))
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
        runs = tuple(self.run(s, p) for s, p in zip(cache.runs, runs_of(cache.layout), strict=True))
        kept = dict.fromkeys(cache.kept, rows)
        states = tuple({name: self.state(name) for name in state} for state in cache.states)
        pages = None if cache.pages is None else rows
        return cache.replace(runs=runs, lengths=rows, overflow=rows, finite=rows, kept=kept, states=states, pages=pages)

    def state(self, name: str) -> PartitionSpec:
        """Of a part of recurrent layers' states, which are split by heads, as their weights are. Devices that share out
        the sequence all hold the same."""
        heads = (self.width,) if name == "delta" else (None, self.width)
        return PartitionSpec(None, self.batch, *heads)

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
            recurrent=self._local_recurrent(config),
            split=self.width if self.size(self.width) > 1 else (),
            gathered=rest if self.size(rest) > 1 else (),
        )

    def _local_recurrent(self, shape: KVShape) -> RecurrentConfig | None:
        return None if shape.recurrent is None else shape.recurrent.shared_out(self.size(self.width))

    def local_layout(self, layout: CacheLayout) -> CacheLayout:
        axes = self.sequence if layout.dealt > 1 else ()
        shape = _share(layout.shape, self.size(self.kv_heads))
        shape = dataclasses.replace(shape, recurrent=self._local_recurrent(layout.shape))
        heads = self.width if self.size(self.width) > 1 else ()
        return dataclasses.replace(layout, shape=shape, dealt_over=axes, heads_over=heads, rules=None)

    def cache_layout(self, layout: CacheLayout, batch: int) -> CacheLayout:
        """The layout of a cache of `batch` rows that is dealt as these rules say. Raises UserError when the method
        mixes what they split, or they cannot share out the rows."""
        # A device knows the attention mass of its own heads and tokens only, and nothing exchanges it.
        if layout.method.keep is not None and self.mesh.size > 1:
            raise UserError(f"{layout.method}: tokens can be evicted on one device only, not on a mesh")
        if layout.pool is not None and self.size(self.batch) > 1:
            raise UserError(f"{self.size(self.batch)} devices share out the rows, and none has the pages of all rows")
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
        local = runs_of(dataclasses.replace(layout, shape=_share(layout.shape, parts)))
    except UserError:
        return False
    return all(_is_share(a.wiring, b.wiring, parts) for a, b in zip(runs_of(layout), local, strict=True))


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
