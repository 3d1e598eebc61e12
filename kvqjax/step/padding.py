"""Which of the new tokens are valid. Callers say so in one of two ways:

    counts Int[B]       the first counts[b] tokens of row b
    a mask Bool[B, T]   any single run of tokens of each row, such as rows padded on the left

Inside a step, every row begins with its first valid token, because positions follow what its cache holds. Rows that
begin with padding are rolled by one gather on the way in, and their outputs are rolled back on the way out."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvqjax._arguments import check_integers, check_within, is_known
from kvqjax._errors import UserError
from kvqjax.ops.finite import leading

__all__ = [
    "Padding",
    "accepted_part",
    "check_accepted",
    "check_numbers",
    "is_mask",
    "known_counts",
    "known_mask",
    "padding_of",
]


class Padding(NamedTuple):
    """Where the valid tokens of every row stand.

    Attributes:
        counts: How many valid tokens each row has.
        start: The place of the first valid token. None: all rows begin at place 0.
        torn: Which rows have a mask that is not a single run. Of such a mask only the first run counts. None: there can
            be no such row.
    """

    counts: Int[Array, " B"]
    start: Int[Array, " B"] | None = None
    torn: Bool[Array, " B"] | None = None

    def begun(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Roll every row so that its first valid token stands at place 0."""
        return x if self.start is None else _rolled(x, self.start)

    def begun_mask(self, mask: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
        """Roll a mask of the tokens that each token sees as `begun` rolls tokens, on both axes."""
        return self.begun(self.begun(mask).swapaxes(1, 2)).swapaxes(1, 2)

    def as_given(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Roll every row back to where the caller's tokens stand."""
        return x if self.start is None else _rolled(x, -self.start)

    def flagged(self, overflow: Bool[Array, " B"]) -> Bool[Array, " B"]:
        """Raise the overflow flags of rows whose mask is not a single run."""
        return overflow if self.torn is None else overflow | self.torn


def _rolled(x: Shaped[Array, "B T ..."], by: Int[Array, " B"]) -> Shaped[Array, "B T ..."]:
    """Roll every row to the left: the entry at place (t + by[b]) mod T of row b comes to place t."""
    length = x.shape[1]
    index = (jnp.arange(length)[None] + by[:, None]) % length
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def is_mask(counts: Any) -> bool:
    """Say whether `counts` is a mask of valid tokens."""
    return getattr(counts, "dtype", None) == jnp.bool_


def padding_of(counts: Int[Array, " B"] | Bool[Array, "B T"]) -> Padding:
    """Tell where the valid tokens stand, from their counts or from their mask, without checks."""
    if not is_mask(counts):
        return Padding(counts.astype(jnp.int32))
    total = counts.sum(1, dtype=jnp.int32)
    if counts.shape[1] == 1:
        return Padding(total)  # a decode step: there is nothing to roll
    start = jnp.argmax(counts, axis=1).astype(jnp.int32)  # the first True; 0 in a row without one
    first_run = leading(_rolled(counts, start))  # how long it is
    return Padding(first_run, start, first_run != total)


def check_accepted(counts: Any, given: Int[Array, " B"] | Bool[Array, "B T"]) -> None:
    """Raise UserError where more tokens of a row would be stored than were valid.

    Args:
        counts: how many are stored, or a mask of them; known.
        given: how many were valid when the layers attended, or a mask of them; known.
    """
    stored, valid = known_counts(counts), known_counts(given)
    if (beyond := stored > valid).any():
        row = int(beyond.argmax())
        raise UserError(f"counts: {stored[row]} tokens of row {row} would be stored; {valid[row]} were valid")


def accepted_part(
    counts: Int[Array, " B"] | Bool[Array, "B T"], given: Int[Array, " B"] | Bool[Array, "B T"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Clip how many tokens are stored to how many were valid.

    Args:
        counts: as in `check_accepted`.
        given: as there.

    Returns:
        How many are stored, and which rows' flags are raised: those that were clipped, and those of which a mask is
        not a single run.
    """
    stored, valid = padding_of(counts), padding_of(given)
    beyond = stored.counts > valid.counts
    return jnp.minimum(stored.counts, valid.counts), stored.flagged(valid.flagged(beyond))


def check_numbers(counts: Any, batch: int, length: int | None) -> None:
    """Raise UserError for counts of new tokens, or a mask of them, that cannot be.

    Numbers that a trace hides are not checked. They are clipped where tokens are appended, and raise the row's flag
    there.

    Args:
        counts: how many of each row's new tokens are valid, or a mask of the valid ones.
        batch: how many rows there are.
        length: how many new tokens each row is given. None: that is not known yet, and counts are not compared with it.
    """
    if is_mask(counts) and counts.ndim != 1:
        _check_mask(counts, batch, counts.shape[-1] if length is None else length)
        return
    check_integers("counts", counts, (batch,), "how many of the new tokens of each row are valid")
    if length is not None:
        check_within("counts", counts, 0, length, f"from 0 to the {length} new tokens given")


def _check_mask(mask: Any, batch: int, length: int) -> None:
    """Do `check_numbers` for a mask."""
    if mask.shape != (batch, length):
        meaning = "which of the new tokens of each row are valid"
        raise UserError(f"counts is a mask of shape {list(mask.shape)}; wanted [{batch}, {length}]: {meaning}")
    if not is_known(mask):
        return
    valid = np.asarray(mask)
    # Where a run of valid tokens begins: a valid token without a valid one before it.
    begins = valid & ~np.pad(valid, ((0, 0), (1, 0)))[:, :-1]
    if (torn := begins.sum(1) > 1).any():
        row = int(torn.argmax())
        places = np.flatnonzero(begins[row]).tolist()
        raise UserError(
            f"counts: row {row} of the mask has valid tokens in {len(places)} runs, from places "
            f"{', '.join(map(str, places[:4]))}{', ...' * (len(places) > 4)} on; a row has one run"
        )


def known_counts(counts: Any) -> np.ndarray:
    """Count the valid tokens of each row, from counts or a mask that are known."""
    numbers = np.asarray(counts)  # with jnp this would be traced inside a user's loop
    return numbers.sum(1) if is_mask(numbers) else numbers


def known_mask(counts: Any, length: int) -> np.ndarray:
    """Mark the valid ones of `length` tokens of each row, from counts or a mask that are known."""
    numbers = np.asarray(counts)
    return numbers if is_mask(numbers) else np.arange(length)[None] < numbers[:, None]
