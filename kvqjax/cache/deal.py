"""A body's blocks dealt over devices in turn, so that short rows use all of them: block j of `block` tokens lies on
device j mod `parts`, and a device keeps its blocks in order.

Outside `shard_map` a dealt cache is only moved about (`axes` is empty); inside, `axes` names the mesh axes that number
the devices, and the functions below say what of a row lies here. Undealt bodies (`parts` = 1) pass through unchanged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["Deal"]


class Deal(NamedTuple):
    """`parts` devices share a body in blocks of `block` tokens; `axes` are theirs, inside `shard_map`."""

    parts: int = 1
    block: int = 1
    axes: tuple[str, ...] = ()

    def _here(self) -> Int[Array, ""]:
        if not self.axes:
            raise ValueError("a cache dealt over devices is read and written on its mesh only")
        return jax.lax.axis_index(self.axes)

    def place(self, token: Int[Array, ""] | int) -> tuple[Bool[Array, ""] | None, Int[Array, ""] | int]:
        """Whether body token `token` lies here (None: everything does), and its number among those that do."""
        if self.parts == 1:
            return None, token
        turn = token // self.block
        return jnp.equal(turn % self.parts, self._here()), turn // self.parts * self.block + token % self.block

    def tokens(self, local: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The body tokens that the `local`-th ones here are."""
        if self.parts == 1:
            return local
        return (local // self.block * self.parts + self._here()) * self.block + local % self.block

    def share(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """How many of the first `tokens` body tokens lie here."""
        if self.parts == 1:
            return tokens
        whole, here = tokens // self.block, self._here()
        rest = jnp.where(whole % self.parts == here, tokens % self.block, 0)
        return (whole - here + self.parts - 1) // self.parts * self.block + rest

    def most(self, tokens: int) -> int:
        """The most of a row's first `tokens` body tokens that lie on one device."""
        return -(-tokens // (self.block * self.parts)) * self.block if self.parts > 1 else tokens
