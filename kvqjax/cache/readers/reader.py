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
    """One layer's queries on its body: `q` with their rotation, without the D^-1/2, and in the body's frame. `shared`
    are the values as heads share them, where this call sums those (`kvqjax.cache.reading.shared_values`)."""

    ask: Ask
    q: Float[Array, "B T H D"]
    view: LayerView
    tokens: NewTokens
    shared: SharedValues | None

    @property
    def kv_heads(self) -> int:
        return self.view.run.shape.num_kv_heads


# Attends to a body: (attention, what flows on to the layer above).
Attend = Callable[[BodyCall, Carry], tuple[Partial, Carry]]
