"""CommVQ (arXiv 2506.18879): keys before RoPE in a RoPE-commutative codebook, values in learned
additive codes.

Attention reads keys block by block: it gathers C_A + j C_B once per KV head, rotates, and takes one
product for all query heads. The commuted form of section 4.3 would gather once per *query* head.

Values v_n = gain_n (bits_n @ E) are summed as bits, which all heads share, and multiplied by E once
per query: N W multiplications per cached token become H N. With T new tokens at once decoding costs
N W + T H D and summing bits T H N, so long chunks decode.
"""

import dataclasses
import math

import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.codecs.commvq_tpu import columns
from kvqjax.codecs.commvq_values import CommVQValues
from kvqjax.methods.keys_values import keys_and_values
from kvqjax.methods.layer_cache import Clock, SharedValues, Wiring, shared_until, through_heads
from kvqjax.methods.spec import Method, method_factory, value_or
from kvqjax.model.config import KVShape
from kvqjax.ops.packing.base import PLANE

# ---- The method and its options ----


@method_factory
def commvq(
    *,
    bits: int = 1,
    rounds: int | None = None,
    levels: int = 64,
    group: int = 0,
    hidden: int = 0,
    window: int = 128,
    unit: int = 128,
    sinks: int = 0,
    centre: str = "auto",
) -> Method:
    """CommVQ (arXiv 2506.18879, sections 4.1 and 4.2). Keys before RoPE are sums of vectors of a
    codebook, which RoPE can rotate in place of keys. Values are sums of learned vectors. Codebooks
    and the values' encoder are calibrated.

    - `bits` per channel, 1 to 4 (1 and 2 in the paper).
    - `rounds` of the key codebook. None: round(bits * g / log2(levels)), which is 11 and 21 at head
      dimension 128, 5 and 11 at 64.
    - `levels` of each round, a power of two up to 256. `group` rotation pairs share a code (0: a
      whole head).
    - `hidden` units of the value encoder (0: one per logit, 4096 at most).
    - `window` newest and `sinks` first tokens stay exact, and `unit` tokens leave the window
      together. `window=0` is the published rule: the whole buffer is encoded when it holds 128
      tokens.
    - `centre="auto"` codes keys without the model's key bias, where it has one; "none" with it.

    With the defaults, Llama-3.1-8B stores 1.031 bits per channel. Raises UserError for values that
    are not listed here.
    """
    if centre not in ("auto", "none"):
        raise UserError(f"centre={centre!r}; known: auto, none")
    options = {"bits": bits, "rounds": rounds, "levels": levels, "group": group, "hidden": hidden}
    options["unbiased"] = centre == "auto"
    return Method(
        name="commvq", layer=CommVQLayer(**options, window=window, unit=unit), sinks=sinks
    )


# ---- One layer ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommVQLayer:
    """One layer, whose codecs depend on the model's head dimension."""

    bits: int
    rounds: int | None = None  # None: the number that `bits` allow
    levels: int = 64
    group: int = 0  # rotation pairs that share a code; 0: those of a head
    hidden: int = 0
    window: int = 128
    unit: int = 128
    unbiased: bool = False  # as in KeysAndValues

    def __post_init__(self):
        if self.unit % PLANE or self.unit < PLANE:
            raise UserError(f"unit={self.unit}; tokens leave the window in multiples of {PLANE}")
        # The codecs refuse what no model can have; the head dimension, which groups divide, is the
        # model's.
        CommVQKeys(head_dim=2, rounds=value_or(self.rounds, 1), levels=self.levels)
        self.value()

    def key(self, config: KVShape) -> CommVQKeys:
        """Choose the key codec: R rounds with R log2(levels) / g as near to `bits` as possible."""
        pairs = self.group or config.head_dim // 2
        rounds = value_or(self.rounds, max(1, round(self.bits * pairs / math.log2(self.levels))))
        return CommVQKeys(
            head_dim=config.head_dim, rounds=rounds, levels=self.levels, group=self.group
        )

    def value(self) -> CommVQValues:
        """Choose the value codec."""
        return CommVQValues(bits=self.bits, hidden=self.hidden)

    def build(self, config: KVShape) -> Wiring:
        codecs = {
            "k": self.key(config).build(config.kv_width),
            "v": self.value().build(config.kv_width),
        }
        wiring = keys_and_values(
            config, codecs, (Clock(("k", "v"), self.window, self.unit),), "pre", self.unbiased
        )
        shared = _summed_bits(self.bits * config.kv_width, config)
        return wiring.having(maps={"prepare": _prepare}, fast={"shared": shared})


def _prepare(constants):
    """Add the key codebook as TPUs read it. Programs that do not read it never compute it."""
    return constants | {"k": constants["k"] | {"columns": columns(constants["k"]["codebook"])}}


def _summed_bits(count: int, config: KVShape) -> SharedValues:
    """Reorder the value product (section 4.3, equation 22): sum N = `count` bits per token, then
    multiply."""

    def read(weights, constants, payload, sources):
        return payload["v"]["bits"].astype(jnp.float32) * jnp.swapaxes(
            payload["v"]["gain"], -1, -2
        ).astype(jnp.float32)

    def finish(weights, constants, means):
        return through_heads(
            means, constants["v"]["codebook"].astype(jnp.float32), config, precision="highest"
        )

    return SharedValues(count, shared_until(count, count * config.kv_width, config), read, finish)
