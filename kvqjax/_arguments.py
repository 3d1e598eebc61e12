"""Checks arguments of public functions: types of options, and ranges of whole numbers (counts,
rows, layers, lengths).

One that is known and wrong is refused in one line. A number that a trace hides is clipped, and the
caller is told in which entries that was needed: it raises the row's `overflow` flag for them."""

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError

MOST = 2**31 - 1  # positions, counts and token ids are 32-bit numbers
MOST_SEED = 2**32 - 1  # numpy takes no more, and JAX drops the higher bits
LONG = 80  # characters: a value that is written longer is named by its type


def named(value: Any) -> str:
    """Say in a message what was given: a short value as it is written, an array's dtype and shape,
    of anything else the type."""
    if isinstance(value, jax.Array | np.ndarray):
        text = f"{value.dtype}{list(value.shape)}"
        return f"a traced {text}" if isinstance(value, jax.core.Tracer) else text
    if isinstance(value, str | bool | int | float | None):
        text = repr(value)
        if len(text) < LONG:
            return text
    return f"a {type(value).__name__}"


def whole_number(text: str) -> int | None:
    """Read digits as a number of at most 18 of them; None for any other text. `isdigit` accepts
    digits that `int` does not read, and `int` refuses thousands of digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _written(value: Any) -> str:
    """Do as `named`, and write out a short tuple or list too."""
    text = repr(value) if isinstance(value, tuple | list) else named(value)
    if len(text) < LONG and "\n" not in text:
        return text
    return f"a {type(value).__name__}"


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a word",
    type(None): "None",
}


def _as(value: Any, kind: Any) -> Any:
    """Give a value as an option of type `kind`. Raises TypeError for one of another type,
    OverflowError for a number that is too large or none."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise TypeError
        if Ellipsis in parts:  # tuple[int, ...]
            parts = [parts[0]] * len(value)
        if len(parts) != len(value):
            raise TypeError
        return tuple(_of_any(x, part) for x, part in zip(value, parts, strict=True))
    if not isinstance(kind, type):
        return value  # a protocol or a function: its user checks it
    if kind in (int, float) and isinstance(value, bool | np.bool_):
        raise TypeError  # a bool is an int to Python, and never what was meant
    if kind is int:
        number = operator.index(value)
        if abs(number) > MOST:
            raise OverflowError
        return number
    if kind is float:
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise TypeError
        if not math.isfinite(float(value)):
            raise OverflowError
        return float(value)
    if not isinstance(value, kind):
        raise TypeError
    return value


def _kinds(annotation: Any) -> tuple:
    """List the types that an annotation allows."""
    if isinstance(annotation, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _of_any(value: Any, annotation: Any) -> Any:
    """Give a value as one of an annotation's types, the first that it fits."""
    raised: Exception = TypeError()
    for kind in _kinds(annotation):
        try:
            return _as(value, kind)
        except (TypeError, ValueError, jax.errors.JAXTypeError):
            continue
        except OverflowError as error:
            raised = error
    raise raised


def typed(name: str, value: Any, annotation: Any) -> Any:
    """Give an option's value as its annotation says: numpy's numbers as Python's, whole ones as
    floats where those are wanted.

    Args:
        name: how the message calls it, with what it belongs to: "kivi: bits".
        value: what was given.
        annotation: a type, a union of types, or a tuple of types; anything else is not checked.

    Raises:
        UserError: the value is of another type, is NaN or infinite, or is a whole number beyond 32
            bits.
    """
    try:
        return _of_any(value, annotation)
    except (TypeError, OverflowError) as error:
        kinds = _kinds(annotation)
        names = [WORDS.get(kind) or getattr(kind, "__name__", str(kind)) for kind in kinds]
        wanted = " or ".join(names)
        if isinstance(error, OverflowError):
            wanted += f" of at most {MOST}" if int in kinds else " that is finite"
        raise UserError(f"{name}={_written(value)}; wanted {wanted}", parameter=name) from None


def check_fields(instance: Any) -> None:
    """Bring the fields of a frozen dataclass to the types that they are annotated with. Raises
    UserError as `typed`."""
    for name, annotation in _annotations(type(instance)).items():
        value = getattr(instance, name)
        fits = typed(f"{type(instance).__name__}: {name}", value, annotation)
        if fits is not value:
            object.__setattr__(instance, name, fits)


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    """Give the types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def is_known(*arrays: Any) -> bool:
    """Say whether every array has numbers that this process can read: no tracer, nothing abstract,
    no part on another host."""
    for array in arrays:
        if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
            return False
        if not getattr(array, "is_fully_addressable", True):
            return False
    return True


def reading(known: bool) -> AbstractContextManager:
    """Compute at once, also inside a user's trace: results of known numbers can then be read. Do
    nothing if a number is unknown."""
    return jax.ensure_compile_time_eval() if known else nullcontext()


def check_integer(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Give a whole number as an int.

    Args:
        name: how the message calls it.
        value: a Python or numpy integer, or an array of one that is known.
        least, most: the range, both ends included.

    Raises:
        UserError: `value` is no whole number (True is none), or lies outside the range.
    """
    number = None
    # A bool is an int to Python and an index to numpy, and never what was meant.
    if not isinstance(value, bool | np.bool_):
        with suppress(TypeError, jax.errors.JAXTypeError):
            number = operator.index(value)
    if number is None or not least <= number <= most:
        limits = f"from {least} to {most}"
        # The upper limit is named where it is one that users can meet.
        if most == MOST and (number is None or number < least):
            limits = f"of at least {least}"
        raise UserError(
            f"{name}={_written(value)}; it must be a whole number {limits}", parameter=name
        )
    return number


def check_counts(**counts: Any) -> None:
    """Raise UserError for a named number that is not whole, below 1 or above 2**31 - 1; None stands
    for a default and passes."""
    for name, count in counts.items():
        if count is not None:
            check_integer(name, count)


def check_integers(name: str, value: Any, shape: tuple, why: str) -> None:
    """Raise UserError unless `value` is an array of integers of this shape, in which a letter
    stands for any length of at least 1."""
    shape_text = "[" + ", ".join(map(str, shape)) + "]"
    if not isinstance(value, jax.Array | np.ndarray):
        entries = value if isinstance(value, list | tuple) else [value]
        hint = ""
        if any(isinstance(entry, str) for entry in entries):
            hint = "; model.encode(text) gives the ids of a text, and generate takes text"
        raise UserError(
            f"{name} is {named(value)}; wanted an array of integers {shape_text}: {why}{hint}"
        )
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise UserError(f"{name} is of type {value.dtype}; wanted integers {shape_text}")
    fits = value.ndim == len(shape)
    for actual, wanted in zip(value.shape, shape, strict=False):
        any_length = isinstance(wanted, str)
        fits = fits and (actual == wanted or (any_length and actual >= 1))
    if not fits:
        raise UserError(f"{name} has shape {list(value.shape)}; wanted {shape_text}: {why}")


def _text(value) -> str:
    """Write out an array of a few numbers; of a longer one the least and the greatest."""
    array = np.asarray(value)
    if array.size <= 16:
        return str(array.tolist())
    return f"numbers from {array.min()} to {array.max()}"


def check_within(name: str, value: Any, least: int, most: int, limits: str) -> None:
    """Raise UserError for an integer of the array `value` that is known and lies outside `least` to
    `most`, both included. `limits` is the range in words: "from 0 to the 8 new tokens given"."""
    if not is_known(value):
        return
    numbers = np.asarray(value)  # with jnp these would be traced inside a user's loop
    if numbers.size and not least <= int(numbers.min()) <= int(numbers.max()) <= most:
        raise UserError(f"{name}={_text(numbers)}; each must lie {limits}")


def clipped(value: Int[Array, "..."], least, most) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """Clip integers into the range from `least` to `most`, both included: (them as int32, which
    were changed)."""
    if value.dtype.itemsize == 8:  # numbers beyond 32 bits must not wrap into the range
        value = jnp.clip(value, -MOST, MOST)
    number = value.astype(jnp.int32)
    fits = jnp.clip(number, least, most)
    return fits, fits != number


def check_index(
    name: str, value: Any, size: int, kind: str
) -> tuple[int | Int[Array, ""], bool | Bool[Array, ""]]:
    """Give the number of one of `size` things that stand in a row, and whether it had to be
    clipped.

    Args:
        name: how the message calls the number.
        value: a Python or numpy integer, or an array of one; negative numbers do not count from the
            end.
        size: how many there are.
        kind: what they are, for the message.

    Returns:
        (an int where it is known, else an int32 scalar clipped into the range, whether it was
        clipped).

    Raises:
        UserError: `value` is no integer, or a known one of nothing.
    """
    if isinstance(value, jax.core.Tracer):
        check_integers(name, value, (), f"the number of one of {kind}")
        return clipped(value, 0, size - 1)
    try:
        return check_integer(name, value, 0, size - 1), False
    except UserError as error:
        raise UserError(f"{error}: there are {size} {kind}") from None
