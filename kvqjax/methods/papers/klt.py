"""Transform coding of keys and values by calibrated second moments (kvqjax.codecs.klt), values as
what the keys of their own layer do not say of them.

    k_hat = mean_k + z_k B_k
    v_hat = mean_v + z_k F + z_v B_v        F fitted to coded keys (kvqjax.calibrate.klt)

Attention sums values linearly, so no value is ever decoded:

    sum_n p_n v_hat_n = mean_v + (sum_n p_n z_k,n) F + (sum_n p_n z_v,n) B_v

These are two sums of coefficients, and the matrices are applied once a query. Nothing flows from
layer to layer. Keys before RoPE say more of values than rotated ones do, and they are what is
stored.

On SmolLM2-135M keys of the same layer take half off what coded values lose of attention's output,
at no bit (2026-11-28).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs.base import for_heads
from kvqjax.codecs.klt import FIT, KEY_SLOPE, VALUE_SLOPE, Klt, kept_of, times, turned_back
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.methods.keys_values import READING, KeysAndValues, keys_and_values
from kvqjax.methods.layer_cache import (
    Calibration,
    Clock,
    Coefficients,
    Fast,
    SharedValues,
    Wiring,
)
from kvqjax.methods.spec import Method, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.pallas_kernels.adapters import klt_form

VALUES = ("keys", "alone")
HEADS = {"own": 1, "all": 0}  # of `heads` -> that of kvqjax.codecs.klt


@method_factory
def klt(
    *,
    bits: float = 2.0,
    key_bits: float | None = None,
    value_bits: float | None = None,
    values: str = "keys",
    heads: str | int = "all",
    key_slope: float = KEY_SLOPE,
    value_slope: float = VALUE_SLOPE,
    scale: str = "token",
    window: int = 0,
    buffer: int = 128,
    sinks: int = 4,
) -> Method:
    """Transform coding (as KVTC, arXiv 2511.01815, does for stored caches): keys before RoPE and
    values are turned into uncorrelated coefficients, and those of more variance get more bits.

    - `bits` per channel on average, any number from 0.125 to 6; `key_bits` and `value_bits`
      override it.
    - `values="keys"` codes what the coded keys of the same layer do not predict of values, "alone"
      codes values themselves.
    - `heads="all"` transforms all KV heads together, "own" each by itself, a number so many
      neighbours. Within heads, a mesh can split a cache by KV heads.
    - `key_slope` and `value_slope` say how fast bits fall from the first coefficient to the last
      (kvqjax.codecs.klt).
    - `scale="token"` stores a scale of 8 bits for each token and transform, "none" does not.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens
      stay exact.

    Calibration measures means and covariances, and fits values to coded keys. With the defaults,
    Llama-3.1-8B stores 2.008 bits per channel. Raises UserError for values that are not listed
    here.
    """
    if values not in VALUES:
        raise UserError(f"values={values!r}; known: {', '.join(VALUES)}")
    together = HEADS.get(str(heads), heads)
    if not str(together).isdecimal() or (int(together) == 0 and heads != "all"):
        raise UserError(f"heads={heads}; known: own, all, or a number of neighbouring heads")
    shared: dict[str, Any] = {"scale": scale, "heads": int(together)}
    layer = (Transformed if values == "keys" else KeysAndValues)(
        key=Klt(bits=value_or(key_bits, bits), slope=key_slope, **shared),
        value=Klt(bits=value_or(value_bits, bits), slope=value_slope, **shared),
        rope="pre",
        window=window,
        unit=buffer,
    )
    return Method(name="klt", layer=layer, sinks=sinks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformed(KeysAndValues):
    """A layer whose keys and values are coded by transforms, values as what its keys do not
    predict."""

    def build(self, config: KVShape) -> Wiring:
        if config.latent is not None:
            raise UserError(
                "it is calibrated on keys and values by head; this model caches a latent that all heads share"
            )
        key, value = (
            for_heads(spec, config.num_kv_heads, config.head_dim) for spec in (self.key, self.value)
        )
        # Nothing makes layers of other codecs.
        assert isinstance(key, Klt)
        assert isinstance(value, Klt)
        if key.channels != value.channels:
            raise UserError(
                "its keys and values are transformed over different heads; values=alone allows that"
            )
        return _wired(self, key, value, config)


def _wired(layer: Transformed, key: Klt, value: Klt, config: KVShape) -> Wiring:
    """Make the cache of a layer whose values are what its keys do not predict."""
    width = config.kv_width
    codecs = {"k": key.build(width), "v": value.build(width)}
    clock = Clock(("k", "v"), layer.window, layer.unit)
    base = keys_and_values(config, codecs, (clock,), layer.rope)
    read_keys, read_values = key.coefficients(width), value.coefficients(width)

    def encode(constants, tile, carry):
        keys = codecs["k"].encode(constants["k"], tile["k"])
        predicted = _predicted(constants["v"], read_keys(keys))
        values = codecs["v"].encode(constants["v"], tile["v"].astype(jnp.float32) - predicted)
        payload = {"k": keys, "v": values}
        return payload, decode(constants, payload, carry)[0], carry

    def decode(constants, payload, carry):
        z = read_keys(payload["k"])
        k = turned_back(constants["k"]["back"], z, constants["k"]["mean"])
        v = codecs["v"].decode(constants["v"], payload["v"]) + _predicted(constants["v"], z)
        return {"k": k, "v": v}, carry

    groups, size = value.groups(width)
    kept = kept_of(key.ranks(width))
    numbers = groups * (kept + kept_of(value.ranks(width)))

    def read(weights, constants, payload, sources):
        """Read both sources' coefficients of a block, group by group: [B, n, G (R_k + R_v)]."""
        z = jnp.concatenate([read_keys(payload["k"]), read_values(payload["v"])], -1)
        return z.reshape(*z.shape[:2], -1)

    def finish(weights, constants, means):
        """Turn means of the coefficients of all groups into values of each query head's own KV
        head."""
        # Every query head has the sums of all groups. Those of its own group are kept.
        by_group = means.reshape(*means.shape[:2], groups, -1, groups, numbers // groups)
        own_group = jnp.moveaxis(jnp.diagonal(by_group, axis1=2, axis2=4), -1, 2)
        return _values_of_heads(constants["v"], own_group, config)

    def finish_groups(constants, means):
        """Turn means of the coefficients of each query head's own group into its values."""
        by_group = means.reshape(*means.shape[:2], groups, -1, numbers // groups)
        return _values_of_heads(constants["v"], by_group, config)

    read_last = {"k": key.coefficients_last(width), "v": value.coefficients_last(width)}

    read_by_source = {"k": read_keys, "v": read_values}

    def matrices(constants):
        """Give the matrices that make keys of coefficients, and the keys' mean."""
        of_keys = constants["k"]
        return of_keys["back"].astype(jnp.float32), of_keys["mean"].reshape(groups, size)

    coefficients = Coefficients(
        groups,
        numbers // groups,
        lambda codes: {part: read_last[part](codes[part]) for part in read_last},
        lambda source, codes: read_by_source[source](codes),
        matrices,
        finish_groups,
    )
    return Wiring(
        base.storage,
        base.maps._replace(encode=encode, decode=decode),
        fast=Fast(
            packed=klt_form(key, value, config),
            before_rope=True,
            reading=READING,
            summed=SharedValues(numbers, FEW_QUERIES, read, finish),
            coefficients=coefficients,
        ),
        calibration=Calibration({"v": {"from_keys": (groups, kept, size)}}, fit=FIT),
    )


def _values_of_heads(
    constants: dict, means: Float[Array, "B T G X N"], config: KVShape
) -> Float[Array, "B T H D"]:
    """Turn means of coefficients into values.

    Args:
        constants: of values.
        means: of the coefficients of group G's keys and values, for each of the X query heads of
            the group.

    Returns:
        The values of every query head.
    """
    batch, length, groups = means.shape[:3]
    matrices = jnp.concatenate([constants["from_keys"], constants["back"]], 1)
    # A query head gets the channels of all KV heads of its group. X counts the query heads of the
    # group's first KV head, then those of the next.
    v = turned_back(matrices, jnp.swapaxes(means, 2, 3), constants["mean"])  # [B, T, X, W]
    heads = config.num_kv_heads // groups  # KV heads of a group
    v = v.reshape(batch, length, heads, -1, groups, heads, config.head_dim)
    # Those of its own KV head are kept: [B, T, Q, G, D, heads] -> [B, T, G, heads, Q, D]
    v = jnp.diagonal(v, axis1=2, axis2=5).transpose(0, 1, 3, 5, 2, 4)
    return v.reshape(batch, length, -1, config.head_dim)


def _predicted(constants: dict, z: Float[Array, "*lead G R"]) -> Float[Array, "*lead W"]:
    """Predict values from the coefficients of coded keys: z F. The mean of values is that of their
    codec."""
    predicted = times(z, constants["from_keys"])
    return predicted.reshape(*z.shape[:-2], -1)
