"""A cache in a variable of Flax, for models written in `flax.nnx` or `flax.linen`.

    cache = nnx.Cache(kvq.init_cache(shape, "kivi:bits=2", batch=2, capacity=4096))

    kv = ForwardPass(cache, counts)                  # once a call of the model
    out = kv.attend(self.layer, q, k, v)      # in every attention module, from layer 0 up
    kv.append()                               # after the last one

The variable's value is an ordinary cache: `kvq.crop`, `kvq.ledger` and all others take and return it. Nothing here
computes anything: `kvq.attend_layer` and `kvq.append` do.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.step.layers import New, append, attend_layer
from kvqjax.step.padding import check_numbers, padding_of

__all__ = ["ForwardPass", "linen_cache", "read", "write"]


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


def linen_cache(module: linen.Module, cache: Cache | None = None, name: str = "kv") -> linen.Variable:
    """The variable `name` of the module's "cache" collection. It must be passed to `apply` (`variables["cache"]`, with
    mutable=["cache"]), unless `cache` says with what to begin."""

    def first() -> Cache:
        if cache is None:
            raise UserError(f'no cache given: pass {{"cache": {{{name!r}: kvq.init_cache(...)}}}} to init or apply')
        return cache

    return module.variable("cache", name, first)


class ForwardPass:
    """One call of a model over the cache in a variable: gives each layer the new tokens of the layer below it, and
    keeps them all until `append` stores them. Make it and use it up inside one trace (one call of a jitted function).

    The first `counts[b]` of the new tokens of row b are valid; or those that a mask Bool[B, T] in place of the counts
    marks, any single run of each row (left padding). `constants` are an artifact's. `within` as in
    `kvq.attend_layer`. `keys` and `values` are what `attend` was given, one array a layer: the data of
    `kvq.calibrate.from_tensors`."""

    def __init__(
        self,
        variable: nnx.Variable | linen.Variable,
        counts: Int[Array, " B"] | Bool[Array, "B T"],
        *,
        constants: Any = None,
        within: str = "chunk",
    ):
        self._variable, self.counts = variable, counts
        self._options = {"constants": constants, "within": within}
        self._new: list[New] = []
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def positions(self, length: int) -> Int[Array, "B T"]:
        """Positions of `length` new tokens of each row, where they stand: models that rotate queries and keys
        themselves need them. Those of tokens that are not valid mean nothing."""
        length, cache = check_integer("length", length), read(self._variable)
        check_numbers(self.counts, cache.batch, length)
        return padding_of(self.counts).as_given(cache.lengths[:, None] + jnp.arange(length)[None])

    def attend(
        self, layer: int, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"]
    ) -> Float[Array, "B T H D"]:
        """Attention output of one layer, which must come after the layer below it; see `kvq.attend_layer`."""
        check_integer("layer", layer, 0)
        if layer != len(self._new):
            raise UserError(f"layer {layer} attends after {len(self._new)} layers; each attends once, from 0 up")
        below = self._new[-1] if self._new else None
        out, new = attend_layer(read(self._variable), layer, q, k, v, self.counts, below=below, **self._options)
        self._new.append(new)
        self.keys.append(k)
        self.values.append(v)
        return out

    def append(self, counts: Int[Array, " B"] | Bool[Array, "B T"] | None = None) -> None:
        """Store the new tokens in the variable's cache, or only the first `counts[b]` valid ones of row b: the accepted
        part of a draft."""
        counts = self.counts if counts is None else counts
        cache = append(read(self._variable), self._new, counts, constants=self._options["constants"])
        write(self._variable, cache)
        self._new = []
