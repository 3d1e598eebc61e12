"""HIGGS on its own: keys and values coded by Hadamard transform and vector grid, no predictor (arXiv 2411.17525; the
baseline of arXiv 2501.19392, Table 1)."""

import dataclasses

import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.codecs import CENTRES, Uniform, centred
from kvqjax.codecs.higgs import Higgs, mixed_form, summed_form
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.layer_cache import MixedKeys, SharedValues, Wiring
from kvqjax.methods.rotation import turning
from kvqjax.methods.spec import Method, method_factory, value_or
from kvqjax.model.config import KVShape

__all__ = ["HiggsLayer", "higgs"]

GROUPS = ("auto", "head", "width")
READING = 1024  # tokens decoded at a time; with the 256 of a block an operation's fixed cost counts


# ---- The method and its options ----


@method_factory
def higgs(
    *,
    bits: int = 2,
    key_bits: int | None = None,
    value_bits: int | None = None,
    dim: int = 2,
    group: str = "auto",
    seed: int | None = None,
    scales: str = "bfloat16",
    rope: str = "pre",
    window: int = 0,
    buffer: int = 128,
    sinks: int = 4,
    centre: str = "auto",
    norm: str = "plain",
    rotate: str = "none",
    value_rotate: str = "same",
) -> Method:
    """HIGGS (arXiv 2411.17525; a baseline of arXiv 2501.19392, Table 1): keys and values go through a Hadamard
    transform and get the nearest points of a grid that is optimal for Gaussian vectors. `group` channels of a token
    share a scale.

    - `bits` per number, in vectors of `dim` numbers: 2 to 4 in 1 or 2 dimensions, 2 or 3 in 4, 2 in 6. `key_bits` and
      `value_bits` override `bits`.
    - `group` channels share a scale: "auto" (up to 1024), "head", "width" or a number. `scales` is its dtype, `seed`
      turns on fixed random signs.
    - `buffer` tokens leave the window together, beyond the newest `window`; `sinks` first tokens stay exact.
    - `rope="pre"` stores keys before RoPE, "post" after it. `centre` takes off the keys: "auto" the model's key bias,
      where it has one and keys are before RoPE; "mean" a calibrated mean (kvqjax.codecs.centring); "none" nothing.
    - `norm`: "plain", "corrected" (what is decoded keeps its length) or "unbiased" (scores along a key keep theirs).
    - `rotate` and `value_rotate` as in `kivi`: a rotation takes the place of the codec's own transform.

    A channel takes `bits + 16 / group` bits: with the defaults, Llama-3.1-8B stores 2.016 bits per channel. Raises
    UserError for values that are not listed here.
    """
    if group not in GROUPS and not group.isdigit():
        raise UserError(f"group={group!r}; known: {', '.join(GROUPS)} or a number of channels")
    if centre not in CENTRES:
        raise UserError(f"centre={centre!r}; known: {', '.join(CENTRES)}")
    rotations = turning(rotate, value_rotate, rope)
    shared = {"dim": dim, "seed": seed, "dtype": scales, "norm": norm}
    key, value = (
        Higgs(bits=value_or(b, bits), rotated=rotation not in ("none", "pairs"), **shared)
        for b, rotation in zip((key_bits, value_bits), rotations.values(), strict=True)
    )
    centre = "none" if centre == "auto" and rope == "post" else centre
    timing = {"rope": rope, "window": window, "unit": buffer}
    layer = HiggsLayer(key=key, value=value, group=group, centre=centre, **timing, **rotations)
    return Method(name="higgs", layer=layer, sinks=sinks)


# ---- One layer ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiggsLayer:
    """Keys and values of one layer."""

    key: Higgs
    value: Higgs | Uniform  # uniform in TurboQuant as vLLM has it
    group: str = "auto"  # channels that share a scale: "head", "width", "auto" or a number
    rope: str = "post"
    window: int = 0
    unit: int = 32
    centre: str = "none"
    key_rotation: str = "none"
    value_rotation: str = "none"

    def build(self, config: KVShape) -> Wiring:
        sizes = {"auto": None, "head": config.head_dim, "width": config.kv_width}
        size = sizes[self.group] if self.group in sizes else int(self.group)
        key, value = dataclasses.replace(self.key, group=size), self.value
        if isinstance(value, Uniform):
            value = dataclasses.replace(value, group=value.group if size is None else size)
        else:
            value = dataclasses.replace(value, group=size)
        layer = KeysAndValues(
            key=centred(key, self.centre),
            value=value,
            rope=self.rope,
            window=self.window,
            unit=self.unit,
            unbiased=self.centre == "auto",
            key_rotation=self.key_rotation,
            value_rotation=self.value_rotation,
        )
        summed = None if not isinstance(value, Higgs) or value.rotated else _summed_points(value, config)
        # Keys that are read mixed come without what `centre` took off them.
        moved = self.centre == "mean" or (self.centre == "auto" and config.known_key_bias)
        form = None if moved else mixed_form(key, config.num_kv_heads, config.head_dim)
        mixed = None if form is None else MixedKeys(*form)
        return layer.build(config).having(fast={"reading": READING, "summed": summed, "mixed": mixed})


def _summed_points(spec: Higgs, config: KVShape) -> SharedValues:
    """Sum values as grid points times scales, and transform each query head's sum."""
    width, points, transformed = summed_form(spec, config.kv_width)

    def read(weights, constants, payload, sources):
        return points(payload["v"])

    def finish(weights, constants, means):
        heads = config.num_kv_heads
        values = transformed(means).reshape(*means.shape[:2], heads, -1, heads, config.head_dim)
        same_head = jnp.eye(heads, dtype=bool)[None, None, :, None, :, None]
        return jnp.where(same_head, values, 0).sum(4).reshape(*means.shape[:3], config.head_dim)

    return SharedValues(width, FEW_QUERIES, read, finish)
