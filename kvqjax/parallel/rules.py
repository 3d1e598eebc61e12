"""The rules by which axes of arrays are split over axes of a mesh.

A logical axis is the meaning of an array's axis: rows, body tokens, KV heads, query heads,
vocabulary. `Rules` maps each logical axis to mesh axes, and gives a `PartitionSpec` for every
parameter and for every array of a cache. The mesh for this library's models has four axes. `kv` and
`group` together have `model` devices (`MeshSize`):

    mesh axis    data      seq                kv                    group
    splits       rows      blocks of the      KV heads, and with    the query heads and the MLP of a part along `kv`,
                           body, in turn      them query heads      and the blocks of its KV heads' body

`kvqjax/parallel/sharding.py` chooses the rules and runs a step under them. `local_config` and
`local_layout` describe one device's part, so that code for a single device runs on it unchanged. A
method that mixes KV heads needs all channels of a token on one device. Then `kv_heads` is empty,
and `sequence` has the axis `kv` too (`shares_heads`).
"""

import dataclasses
import functools
import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run
from kvqjax.methods.layer_cache import Wiring
from kvqjax.model.config import KVShape, ModelConfig, RecurrentConfig
from kvqjax.model.weight_trees import MATRICES, OF_EXPERTS, LayerMatrices, is_unrolled, stack_of
from kvqjax.ops.packing.base import CHANNELS, TOKENS

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The mesh axes over which each logical axis is split.

    `kv_heads` is the first part of `width`. The axes of `width` that are not in it are the last
    ones of `sequence`: devices along these have the same KV heads and share the tokens of the body.

    Attributes:
        mesh: the devices, or an abstract mesh for plans without devices.
        batch: splits rows of tokens, cache and logits.
        sequence: splits the body. Its blocks are dealt to the devices in turn.
        kv_heads: splits sinks, window and the channels of the body.
        projections: splits the columns of the key and value projections: as `kv_heads`, as `width`,
            or not at all.
        width: splits query heads, MLP, whole experts and the heads of recurrent layers.
        vocabulary: splits the embedding, the head and logits.
    """

    mesh: Mesh | AbstractMesh
    batch: Axes = ("data",)
    sequence: Axes = ("seq", "group")
    kv_heads: Axes = ("kv",)
    projections: Axes = ("kv",)
    width: Axes = ("kv", "group")
    vocabulary: Axes = ("kv", "group")

    def size(self, axes: Axes) -> int:
        """Count the devices along some mesh axes; 1 for none."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def explicit(self) -> frozenset[str]:
        """Mesh axes of the kind Explicit: the type of an array says how it is split over them."""
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)

    def splits_as(self, other: "Rules | None") -> bool:
        """Say whether both rules split a single row of a cache alike. Their `batch` may differ."""
        if other is None:
            return False
        return (
            self.mesh == other.mesh
            and self.sequence == other.sequence
            and self.kv_heads == other.kv_heads
        )

    def parameter(self, name: str) -> PartitionSpec:
        """Say how a parameter is split.

        Args:
            name: its name in the tree: "embed", "layers/q". Axes are those of
                kvqjax/model/decoder.py, with the layers in front of a layer's parameters.

        Returns:
            The spec. A parameter that no rule names lies on every device: norms, routers, biases of
            outputs.
        """
        layer = name.removeprefix("layers/")
        if name == "embed":
            return PartitionSpec(self.vocabulary, None)
        if name == "head":
            return PartitionSpec(None, self.vocabulary)
        recurrent = layer.startswith("delta_") and layer != "delta_norm"  # split by heads
        # Matrices that lead into heads or into the MLP are split by columns, those that lead out of
        # them by rows. A device then multiplies its own columns by its own rows, and one sum over
        # `width` completes the product.
        if layer in ("q", "q_gate", "k_up", "v_up", "gate", "up", "shared_gate", "shared_up"):
            return PartitionSpec(None, None, self.width)
        if recurrent and name in MATRICES and layer != "delta_o":
            return PartitionSpec(None, None, self.width)
        # Experts are never cut: their axis comes first and is split. The first axis of a recurrent
        # layer's vectors and kernels is that of heads or channels.
        if layer in ("o", "down", "shared_down") or layer in OF_EXPERTS or recurrent:
            return PartitionSpec(None, self.width)
        if layer in ("k", "v"):
            return PartitionSpec(None, None, self.projections)
        if layer in ("q_bias", "k_bias", "v_bias"):
            # A key bias is split as cached keys are: reading a block adds it without an exchange
            # between devices. A value bias is split as the columns of its projection are, since it
            # is added before heads are gathered.
            axes = {"q_bias": self.width, "k_bias": self.kv_heads, "v_bias": self.projections}
            return PartitionSpec(None, axes[layer])
        if layer == "score_sinks":  # as the query heads that attend on a device
            return PartitionSpec(None, self.kv_heads)
        return PartitionSpec()

    def placement(self, name: str) -> NamedSharding:
        """Say where a parameter lies: the `sharding` that `kvqjax.load` takes."""
        return NamedSharding(self.mesh, self.parameter(name))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shares(self, tree, specs):
        """Return the shapes of one device's part of `tree`. A spec of `specs` applies to one array
        or to several."""

        def share(spec, x):
            part = NamedSharding(self.mesh, spec).shard_shape(x.shape)
            return jax.ShapeDtypeStruct(part, x.dtype)

        def shares_of(spec, parameter):
            # A parameter may be several arrays, codes with scales or rows of a stack, which are all
            # split alike.
            return jax.tree.map(functools.partial(share, spec), parameter)

        return jax.tree.map(shares_of, specs, tree)

    def parameters(self, params: dict) -> dict:
        """Return the specs of a params pytree, of any form of layers."""
        specs: dict = {name: self.parameter(name) for name in params if name != "layers"}

        def of_stack(name: str) -> PartitionSpec:
            return self.parameter(f"layers/{name}")

        def of_layer(name: str) -> PartitionSpec:
            # An array of one layer has the axes of a stack except for the first one, that of
            # layers.
            return PartitionSpec(*of_stack(name)[1:])

        if is_unrolled(params):
            layer_specs = []
            for layer in params["layers"]:
                layer_specs.append({name: of_layer(name) for name in layer})
            specs["layers"] = layer_specs
            return specs
        specs["layers"] = {}
        for name, parameter in params["layers"].items():
            # `LayerMatrices` are one array per layer, to all of which one spec applies.
            is_apart = isinstance(stack_of(parameter), LayerMatrices)
            specs["layers"][name] = of_layer(name) if is_apart else of_stack(name)
        return specs

    def run(self, state: Run, plan: RunLayout) -> Run:
        """Return the specs of one run's arrays.

        Args:
            state: the run's arrays; only their structure is read.
            plan: the run's static plan.

        Returns:
            A `Run` with a spec in place of every array.
        """
        # Sinks and window [L, B, tokens, W] are on every device that has a row's KV head. Each of
        # these devices encodes the tokens that leave the window, and the device that owns their
        # block stores them.
        exact = PartitionSpec(None, self.batch, None, self.kv_heads)
        # A packing says what the axes of its arrays behind [L, B] count.
        shared = {TOKENS: self.sequence, CHANNELS: self.kv_heads, None: None}

        def field(source: str, name: str, stored):
            axes = plan.wiring.storage.codecs[source].fields[name].packing.axes
            # Any row may have any page, so pages are not split over `batch`.
            rows = None if plan.page else self.batch
            spec = PartitionSpec(None, rows, *(shared[axis] for axis in axes))
            return tuple(spec for _ in stored)

        body: dict = {}
        for source, fields in state.body.items():
            body[source] = {}
            for name, stored in fields.items():
                body[source][name] = field(source, name, stored)
        return Run(
            body=body,
            sinks=dict.fromkeys(state.sinks, exact),
            window=dict.fromkeys(state.window, exact),
            flushed=tuple(PartitionSpec(self.batch) for _ in state.flushed),
        )

    def cache(self, cache: Cache) -> Cache:
        """Return the specs of a cache: a `Cache` with a spec in place of every array."""
        rows = PartitionSpec(self.batch)
        plans = runs_of(cache.layout)
        runs = tuple(self.run(run, plan) for run, plan in zip(cache.runs, plans, strict=True))
        kept = dict.fromkeys(cache.kept, rows)
        states = []
        for state in cache.states:
            states.append({name: self.state(name) for name in state})
        pages = None if cache.pages is None else rows
        return cache.replace(
            runs=runs,
            lengths=rows,
            overflow=rows,
            finite=rows,
            kept=kept,
            states=tuple(states),
            pages=pages,
        )

    def state(self, name: str) -> PartitionSpec:
        """Say how a part of the states of recurrent layers is split: by heads, as the layers'
        weights are. Devices along `seq` all hold the same state."""
        # "delta" is [layers, B, Hv, Dk, Dv]. Inputs of the convolutions are [layers, B, kernel - 1,
        # W].
        heads = (self.width,) if name == "delta" else (None, self.width)
        return PartitionSpec(None, self.batch, *heads)

    def places(self, cache: Cache) -> Cache:
        """Say where each array of a cache lies."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.cache(cache))

    def local_config(self, config: ModelConfig) -> ModelConfig:
        """Describe what one device computes.

        Args:
            config: the whole model's.

        Returns:
            The config with the KV heads that the device caches and all query heads that attend to
            them. Its `split` and `gathered` name the mesh axes along which the decoder sums and
            gathers; they have no axes along which there is one device only.
        """
        # Devices along the rest of `width` have the same KV heads and share their tokens. Each of
        # them attends with the query heads of all of them, which are gathered before
        # (`decoder.whole_heads`). So the number of query heads is divided by `kv_heads` alone.
        axes = self.width[len(self.kv_heads) :]
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size(self.kv_heads),
            num_kv_heads=config.num_kv_heads // self.size(self.kv_heads),
            recurrent=self._local_recurrent(config),
            split=self.width if self.size(self.width) > 1 else (),
            gathered=axes if self.size(axes) > 1 else (),
        )

    def _local_recurrent(self, shape: KVShape) -> RecurrentConfig | None:
        """Describe one device's heads of the recurrent layers; None where the model has no such
        layers."""
        if shape.recurrent is None:
            return None
        return shape.recurrent.shared_out(self.size(self.width))

    def local_layout(self, layout: CacheLayout) -> CacheLayout:
        """Describe one device's part of a cache. The layout has no rules, so that a step on the
        part does not split it again. Along its `heads_over`, devices with different heads agree on
        which tokens are finite."""
        axes = self.sequence if layout.dealt > 1 else ()
        shape = _share(layout.shape, self.size(self.kv_heads), self._local_recurrent(layout.shape))
        heads = self.width if self.size(self.width) > 1 else ()
        return dataclasses.replace(
            layout, shape=shape, dealt_over=axes, heads_over=heads, rules=None
        )

    def cache_layout(self, layout: CacheLayout, batch: int) -> CacheLayout:
        """Return the layout of a cache that is split by these rules.

        Args:
            layout: of the cache on one device.
            batch: the cache's rows.

        Returns:
            The layout, with the number of devices over which the body's blocks are dealt.

        Raises:
            UserError: for a method that evicts tokens or mixes the KV heads that are split, rows in
                pages that are split, and rows that the devices cannot share out evenly.
        """
        # Positions of evicted tokens are not dealt over devices as blocks of a body are.
        if layout.method.keep is not None and self.mesh.size > 1:
            raise UserError(
                f"{layout.method}: tokens can be evicted on one device only, not on a mesh"
            )
        if layout.pool is not None and self.size(self.batch) > 1:
            raise UserError(
                f"{self.size(self.batch)} devices share out the rows, and none has the pages of all rows"
            )
        if batch % self.size(self.batch):
            rows = "1 row" if batch == 1 else f"{batch} rows"
            raise UserError(f"{rows} cannot be split over {self.size(self.batch)} devices")
        if not shares_heads(layout, self.size(self.kv_heads)):
            raise UserError(
                f"{layout.method} mixes KV heads, and this model is split for a method that does not"
            )
        return dataclasses.replace(layout, dealt=self.size(self.sequence))


@functools.lru_cache(maxsize=64)
def _share(shape: KVShape, parts: int, recurrent: RecurrentConfig | None) -> KVShape:
    """Return the shape of one of `parts` devices that share out the heads, with the recurrent
    layers of one device. Kept, because planning asks for the same one for every length."""
    return dataclasses.replace(
        shape,
        num_heads=shape.num_heads // parts,
        num_kv_heads=shape.num_kv_heads // parts,
        recurrent=recurrent,
    )


def shares_heads(layout: CacheLayout, parts: int) -> bool:
    """Say whether every device can cache KV heads of its own. To find out, the wirings of a part of
    the heads are built and compared with those of all heads.

    Args:
        layout: of the whole cache.
        parts: number of devices over which KV heads are split; it divides the number of KV heads.

    Returns:
        True if every stored field of a part is `parts` times narrower than that of all heads, there
        is no carry, and the first axis of every calibrated constant is `parts` times shorter.
    """
    if parts == 1:
        return True
    try:
        shape = _share(layout.shape, parts, layout.shape.recurrent)
        local = runs_of(dataclasses.replace(layout, shape=shape))
    except UserError:  # a codec that cannot be built for so few channels
        return False
    runs = zip(runs_of(layout), local, strict=True)
    return all(_is_share(whole.wiring, part.wiring, parts) for whole, part in runs)


def _is_share(parent: Wiring, part: Wiring, parts: int) -> bool:
    """Say whether `parts` wirings like `part`, side by side, store what `parent` stores."""

    def widened(wiring: Wiring, times: int):
        """Return the widths of sources, and the fields, both `times` as wide."""
        widths = {source: width * times for source, width in wiring.storage.sources.items()}
        fields = {}
        for source, codec in wiring.storage.codecs.items():
            for name, field in codec.fields.items():
                fields[source, name] = dataclasses.replace(
                    field, width=field.width * times, heads=field.heads * times
                )
        return widths, fields

    def constants(wiring: Wiring, times: int) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the shapes of calibrated constants, with the first axis `times` as long. A single
        number is an axis of one: all heads share it."""
        longer: dict[tuple[str, str], tuple[int, ...]] = {}
        for group, shapes in wiring.wanted().items():
            for name, shape in shapes.items():
                longer[group, name] = (times * math.prod(shape[:1]), *shape[1:])
        return longer

    # A constant of which each head has its own part has heads or channels on its first axis alone.
    by_head = not parent.chain.carry and constants(parent, 1) == constants(part, parts)
    return by_head and widened(parent, 1) == widened(part, parts)
