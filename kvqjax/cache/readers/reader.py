"""What every reader is given: one layer's queries on its body."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from kvqjax.cache.reading import Ask
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.methods.layer_cache import SharedValues
from kvqjax.ops.attention import Partial

__all__ = ["Attend", "BodyCall", "Carry"]

Carry = dict[str, Array]  # what flows from layer to layer, [B, slots, W] per name; empty for layers that stand alone


class BodyCall(NamedTuple):
    """One layer's queries on its body.

    Attributes:
        ask: What decided which reader is called.
        q: The queries, rotated by RoPE and into the body's frame, and not yet multiplied by D^-1/2.
        view: The layer.
        tokens: What all layers know of the new tokens.
        shared: Where given, the reader sums values that all heads share, and the caller maps the sums to heads
            (`kvqjax.cache.reading.shared_values`). None: the reader sums the heads' own values."""

    ask: Ask
    q: Float[Array, "B T H D"]
    view: LayerView
    tokens: NewTokens
    shared: SharedValues | None

    @property
    def kv_heads(self) -> int:
        return self.view.run.shape.num_kv_heads


# A reader: from its call and the layer below's carry to (attention to the body, this layer's carry).
Attend = Callable[[BodyCall, Carry], tuple[Partial, Carry]]
