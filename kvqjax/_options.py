"""Options by name: a misspelt one is answered with the nearest, one of another library with what to
write here. And numbers of tokens and bytes as people write them."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from kvqjax._errors import UserError, suggest

P = ParamSpec("P")
R = TypeVar("R")

# What users of other libraries write -> what to write here. Looked up only where a function has no
# option of the name.
HABITS = {
    "do_sample": "sampling is on where temperature is above 0",
    "eos_token_id": "write eos_ids=[...]",
    "generation_config": "write **model.sampling_defaults() for the checkpoint's own sampling",
    "load_in_4bit": "write weights='int4'",
    "max_cache_len": "write capacity=N",
    "max_length": "max_new_tokens counts the new tokens of a row, capacity all of them",
    "min_new_tokens": "write min_tokens=N",
    "num_beams": "write beam_search(model, prompts, beams=N)",
    "num_return_sequences": "give the prompt N times: every row draws for itself",
    "pad_token_id": "leave it out: rows may differ in length, nothing is padded",
    "past_key_values": "write generate(model, more, cache=out.cache), or forward with a cache of init_cache",
    "torch_dtype": "write dtype=...",
}


def check_names(
    function: str,
    options: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise UserError for the first given option that `function` has not. `elsewhere` says who has
    options that it lacks."""
    for name in options:
        if name not in known:
            if hint := elsewhere.get(name) or HABITS.get(name):
                raise UserError(f"{function} has no option {name!r}: {hint}")
            raise UserError(f"unknown option of {function} {name!r}{suggest(name, known)}")


def named_options(
    function: Callable[P, R], *, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Callable[P, R]:
    """`function` with a UserError for options it has not. Signature and help stay its own."""
    known = tuple(inspect.signature(function).parameters)
    # That of the class, of its __init__.
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        check_names(name, options, known, elsewhere)
        return function(*arguments, **options)

    return call


def with_parameters(
    added: Iterable[inspect.Parameter],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name keyword arguments, which are a function's `**options`, in its signature and help."""

    def widened(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        named = [
            part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(parameters=[*named, *added])  # pyrefly: ignore
        return function

    return widened


def with_fields(options: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the fields of a dataclass keyword arguments of a function, whose `**options` they
    are."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return with_parameters(
        [
            inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
            for field in dataclasses.fields(options)
        ]
    )


def token_count(text: str | int, least: int = 1, most: int = 2**24) -> int:
    """A number of tokens: 4096, "4096", "128k" (of 1024) or "1m" (of 1024 * 1024). Raises
    UserError."""
    parts = re.fullmatch(r"(\d{1,18})([km]?)", str(text).strip().lower())
    if isinstance(text, bool) or parts is None:
        raise UserError(f"{text!r} is no number of tokens; wanted one such as 4096, 128k or 1m")
    count = int(parts[1]) * {"": 1, "k": 2**10, "m": 2**20}[parts[2]]
    if not least <= count <= most:
        raise UserError(f"{text} tokens; wanted {least} to {most}")
    return count


# Unit of a number of bytes, in lower case -> bytes. A letter alone is a power of 1024, as most
# programs have it.
BYTES = {
    "b": 1,
    **{
        f"{letter}{end}": 2 ** (10 * power)
        for power, letter in enumerate("kmgt", 1)
        for end in ("", "ib")
    },
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


def byte_count(text: str | int, least: int = 1, most: int = 2**50) -> int:
    """A number of bytes: 4096, "512MiB" or "512M" (powers of 1024), "2GB" (of 1000). Raises
    UserError."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if isinstance(text, bool) or parts is None or (parts[2] or "b") not in BYTES:
        raise UserError(
            f"{text!r} is no number of bytes; wanted one such as 4096, 512MiB, 2G or 2GB"
        )
    count = float(parts[1]) * BYTES[parts[2] or "b"]
    if not least <= count <= most:  # of hundreds of digits it is infinite
        raise UserError(f"{str(text)[:40]} bytes; wanted {least} to {most}")
    return int(count)
