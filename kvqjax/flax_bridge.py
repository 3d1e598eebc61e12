"""A cache in a variable of Flax, for models written in `flax.nnx` or `flax.linen`.

In nnx a module holds the cache, and every attention layer calls its own part. The last one stores
the new tokens:

    self.cache = CacheModule(kvq.init_cache(shape, "kivi:bits=2", batch=2, capacity=4096))

    self.cache.start(valid=mask)              # once a call of the model, where not all new tokens are valid
    out = self.cache[i].attend(q, k, v)       # in layer i, from layer 0 up

In linen a variable of the top module holds it, and a `ForwardPass` is one call of the model:

    kv = ForwardPass(linen_cache(self), mask, store=True)
    out = kv[i].attend(q, k, v)               # in layer i, from layer 0 up

Without `store=True`, `kv.append()` stores the new tokens, or the accepted part of a draft.

The variable's value is an ordinary cache: `kvq.crop`, `kvq.ledger` and all others take and return
it. Nothing here computes anything: `kvq.attend_layer` and `kvq.append` do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.step.checks import check_entries
from kvqjax.step.layers import New, append, append_accepted, attend_layer
from kvqjax.step.views import new_positions

__all__ = ["CacheModule", "ForwardPass", "linen_cache", "read", "write"]


def __dir__() -> list[str]:
    return __all__


def read(variable: nnx.Variable | linen.Variable) -> Cache:
    """The cache that a variable of nnx or linen holds."""
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable.value


def write(variable: nnx.Variable | linen.Variable, cache: Cache) -> None:
    """Let a variable of nnx or linen hold this cache."""
    if isinstance(variable, nnx.Variable):
        variable.set_value(cache)
    else:
        variable.value = cache


def linen_cache(
    module: linen.Module, cache: Cache | None = None, name: str = "kv"
) -> linen.Variable:
    """The variable `name` of the module's "cache" collection. It must be passed to `apply`
    (`variables["cache"]`, with mutable=["cache"]), unless `cache` says with what to begin."""

    def first() -> Cache:
        if cache is None:
            raise UserError(
                f'no cache given: pass {{"cache": {{{name!r}: kvq.init_cache(...)}}}} to init or apply'
            )
        return cache

    return module.variable("cache", name, first)


class ScoreArguments(TypedDict, total=False):
    """The options that every `attend` here hands on to `kvq.attend_layer`, where each is
    described."""

    softcap: float | None
    sinks: Float[Array, " sinks"] | None
    mask: Bool[Array, "B T T"] | None
    return_lse: bool


# With `return_lse` the logarithms of softmax denominators too.
Attended = Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]


class _Attends(Protocol):
    def attend(
        self, layer: int, q: Any, k: Any, v: Any, **options: Unpack[ScoreArguments]
    ) -> Attended: ...


class _Layer(NamedTuple):
    """One layer of what attends: `attend` without the layer's number."""

    of: _Attends
    layer: int

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Unpack[ScoreArguments],
    ) -> Attended:
        """Attention output of this layer, which must come after the layer below it. The options are
        those of `kvq.attend_layer`; with `return_lse=True` the logarithms come too."""
        return self.of.attend(self.layer, q, k, v, **options)


class ForwardPass:
    """One call of a model over the cache in a variable: gives each layer the new tokens of the
    layer below it, and keeps them all until `append` stores them. Make it and use it up inside one
    trace (one call of a jitted function). `kv[i].attend(q, k, v)` is `kv.attend(i, q, k, v)`.
    `jax.checkpoint` and scans over layers want values that they can see:
    `kvq.layers(read(variable), ...)` gives them.

    The first `counts[b]` of the new tokens of row b are valid; or those that a mask Bool[B, T] in
    place of the counts marks, any single run of each row (left padding). `constants` are an
    artifact's. `within` as in `kvq.attend_layer`. With `store` the last layer's `attend` appends by
    itself. `keys` and `values` are what `attend` was given, one array a layer: the data of
    `kvq.calibrate.from_tensors`."""

    def __init__(
        self,
        variable: nnx.Variable | linen.Variable,
        counts: Int[Array, " B"] | Bool[Array, "B T"],
        *,
        constants: Any = None,
        within: str = "chunk",
        store: bool = False,
    ):
        self._variable, self.counts, self._store = variable, counts, store
        self._options = {"constants": constants, "within": within}
        self._new: list[New] = []
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def __getitem__(self, layer: int) -> _Layer:
        return _Layer(self, layer)

    def positions(self, length: int) -> Int[Array, "B T"]:
        """Positions of `length` new tokens of each row, where they stand: models that rotate
        queries and keys themselves need them. Those of tokens that are not valid mean nothing."""
        length = check_integer("length", length)
        return new_positions(read(self._variable), self.counts, length)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Unpack[ScoreArguments],
    ) -> Attended:
        """Attention output of one layer, which must come after the layer below it. The options are
        those of `kvq.attend_layer`; with `return_lse=True` the logarithms come too."""
        cache = read(self._variable)
        out, new = _attend_next(
            cache, self._new, layer, q, k, v, self.counts, **self._options, **options
        )
        self._new.append(new)
        self.keys.append(k)
        self.values.append(v)
        if self._store and len(self._new) == cache.layout.shape.num_layers:
            self.append()
        return out

    def append(self, counts: Int[Array, " B"] | Bool[Array, "B T"] | None = None) -> None:
        """Store the new tokens in the variable's cache, or only the first `counts[b]` valid ones of
        row b: the accepted part of a draft. More than were valid are refused, as in
        `kvq.commit_layers`."""
        cache = read(self._variable)
        write(
            self._variable,
            append_accepted(cache, self._new, counts, self.counts, self._options["constants"]),
        )
        self._new = []


def _attend_next(
    cache: Cache, below: Sequence[New], layer: int, *tokens, **options
) -> tuple[Attended, New]:
    """Attend in the layer that comes after those whose new tokens are given. Raises UserError for
    another one."""
    check_integer("layer", layer, 0)
    if layer != len(below):
        raise UserError(
            f"layer {layer} attends after {len(below)} layers; each attends once, from 0 up"
        )
    outputs = attend_layer(cache, layer, *tokens, below=below[-1] if below else None, **options)
    return (outputs[0] if len(outputs) == 2 else outputs[:2]), outputs[-1]


class PendingTokens(nnx.Variable):
    """The valid new tokens of the call in progress, and the tokens of the layers that have
    attended."""


class CacheModule(nnx.Module):
    """A cache as a module of nnx: `cache[i].attend(q, k, v)` in layer i, from layer 0 up. The last
    layer's call stores the new tokens. All state is in Variables, so that it goes through `nnx.jit`
    and `nnx.remat` with the model.

    `cache.kv` is the variable that holds the cache: `read(cache.kv)` and `write(cache.kv, ...)`.
    `constants` are an artifact's."""

    def __init__(self, cache: Cache, *, constants: Any = None):
        check_entries(constants)
        self.kv = nnx.Cache(cache)
        # A copy: a caller that donates this module would give away the artifact's arrays.
        self.constants = nnx.Variable(jax.tree.map(jnp.copy, constants))
        self.pending = PendingTokens((None, ()))

    def start(
        self,
        counts: Int[Array, " B"] | None = None,
        *,
        valid: Bool[Array, "B T"] | None = None,
    ) -> None:
        """Begin a call of the model: which of its new tokens are valid, as in `kvq.layers`. Without
        it all are. What a call left that ended between two layers is dropped."""
        if counts is not None and valid is not None:
            raise UserError("start takes either counts= or valid=, not both")
        self.pending.set_value((valid if counts is None else counts, ()))

    def __getitem__(self, layer: int) -> _Layer:
        return _Layer(self, layer)

    def positions(self, length: int) -> Int[Array, "B T"]:
        """Positions of `length` new tokens of each row, as those of a `ForwardPass`."""
        length = check_integer("length", length)
        return new_positions(read(self.kv), self._counts(length), length)

    def _counts(self, length: int) -> Array:
        counts = self.pending.get_value()[0]
        return jnp.full(read(self.kv).batch, length, jnp.int32) if counts is None else counts

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Unpack[ScoreArguments],
    ) -> Attended:
        """Attention output of one layer, which must come after the layer below it. The options are
        those of `kvq.attend_layer`; with `return_lse=True` the logarithms come too."""
        cache, constants = read(self.kv), self.constants.get_value()
        counts, (valid, below) = self._counts(q.shape[1]), self.pending.get_value()
        out, new = _attend_next(
            cache, below, layer, q, k, v, counts, constants=constants, **options
        )
        if len(below) + 1 < cache.layout.shape.num_layers:
            self.pending.set_value((valid, (*below, new)))
        else:
            write(self.kv, append(cache, [*below, new], counts, constants=constants))
            self.pending.set_value((None, ()))
        return out
