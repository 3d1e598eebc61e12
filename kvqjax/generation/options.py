"""What `generate`, `stream`, `Session`, `Engine.submit`, the server and the shell have in common:
how tokens are drawn, and what ends a row."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax
import numpy as np
from jaxtyping import Float, Int

from kvqjax._arguments import MOST, MOST_SEED, check_integer, named, typed, whole_number
from kvqjax._errors import UserError
from kvqjax.generation.bound import BoundRow, bind, read_grammar
from kvqjax.generation.prompt_ids import end_ids, token_ids
from kvqjax.generation.text import stop_strings
from kvqjax.model.loading import Model

MOST_BIAS = 100.0  # of a logit, as in the OpenAI protocol
MOST_PENALTY = 2.0  # for presence and frequency, as in the OpenAI protocol
NO_LIMIT = -1  # top_k of vLLM's users
RANDOM = -1  # a seed of llama-server's users


class GenerateFields(TypedDict, total=False):
    """The fields of `GenerateOptions`, as keyword arguments are typed."""

    stop: str | Sequence[str]
    eos_ids: Sequence[int] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    beyond_trained: bool
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int | str, int | float] | None
    grammar: Mapping[str, Any] | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of a generation, checked. `kvqjax.generate` says what each of them means.

    Raises:
        UserError: an option that cannot be."""

    stop: str | Sequence[str] = ()
    eos_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    beyond_trained: bool = False
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int | str, int | float] | None = None
    grammar: Mapping[str, Any] | str | None = None

    def __post_init__(self):
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            self._set(name, typed(name, getattr(self, name), float))
        check_integer("top_k", self.top_k, NO_LIMIT)
        check_integer("min_tokens", self.min_tokens, 0)
        check_integer("seed", self.seed, RANDOM, MOST_SEED)
        penalty_limits = f"from -{MOST_PENALTY:g} to {MOST_PENALTY:g}"
        limits = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more, and finite"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0, and finite"),
            "presence_penalty": (abs(self.presence_penalty) <= MOST_PENALTY, penalty_limits),
            "frequency_penalty": (abs(self.frequency_penalty) <= MOST_PENALTY, penalty_limits),
        }
        for name, (fits, words) in limits.items():
            if not fits:
                raise UserError(f"{name}={getattr(self, name)}; it must be {words}", parameter=name)
        for name in ("eos_ids", "stop_token_ids"):
            ids = getattr(self, name)
            self._set(name, None if ids is None else token_ids(name, ids))
        if self.ignore_eos and self.eos_ids:
            raise UserError(
                "ignore_eos and eos_ids exclude each other; stop_token_ids end a row in any case",
                parameter="ignore_eos",
            )
        self._set("stop", stop_strings(self.stop))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("grammar", read_grammar(self.grammar))
        if self.grammar is not None and self.min_tokens:
            cause = "grammar and min_tokens exclude each other: a grammar says where an answer ends"
            raise UserError(cause, parameter="min_tokens")
        if self.top_k == NO_LIMIT:
            self._set("top_k", 0)
        if self.seed == RANDOM:
            self._set("seed", _random_seed())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    def check_tokenizer(self, model: Model) -> None:
        """Raise UserError for stop strings of a model whose tokens have no text."""
        if self.stop and not model.has_tokenizer:
            raise UserError(
                "stop strings need a tokenizer, and this model has none", parameter="stop"
            )

    def ends(self, model: Model, max_new_tokens: int) -> Int[np.ndarray, " N"]:
        """Choose the tokens that end a row of at most `max_new_tokens`.

        Raises:
            UserError: an id that the model lacks, or more `min_tokens` than a row may have.
        """
        if self.min_tokens > max_new_tokens:
            raise UserError(
                f"min_tokens={self.min_tokens} is more than the {max_new_tokens} new tokens asked for",
                parameter="min_tokens",
            )
        eos = end_ids(model, () if self.ignore_eos else self.eos_ids)
        further = end_ids(model, self.stop_token_ids, "stop_token_ids")
        ends = np.asarray(list(dict.fromkeys([*eos.tolist(), *further.tolist()])), np.int32)
        if self.min_tokens and len(ends) >= model.config.vocab_size:
            raise UserError(
                f"min_tokens={self.min_tokens}, and every token of the model is an end token"
            )
        return ends

    def bound_row(self, model: Model, ends: Sequence[int] | np.ndarray) -> BoundRow | None:
        """Bind a row that `ends` end to the grammar; None without one. Raises UserError for a
        grammar that no answer can meet."""
        assert self.grammar is None or isinstance(self.grammar, str)  # read at the beginning
        return bind(model, self.grammar, ends)

    def bias(self, model: Model) -> Float[np.ndarray, " V"] | None:
        """Lay out `logit_bias` over the vocabulary; None without one.

        Raises:
            UserError: a token that the model lacks.
        """
        if not self.logit_bias:
            return None
        bias = np.zeros((model.config.vocab_size,), np.float32)
        for token, value in self.logit_bias.items():
            bias[check_integer("a token of logit_bias", token, 0, len(bias) - 1)] = value
        return bias


# What functions that lack one of these options say of it.
GENERATE = {
    field.name: "it is an option of generate and stream"
    for field in dataclasses.fields(GenerateOptions)
}


def _biases(numbers: Any) -> dict[int, float] | None:
    """Read a bias of the logits. JSON has texts for token ids."""
    if numbers is None:
        return None
    if not isinstance(numbers, Mapping):
        raise UserError(
            f"logit_bias={named(numbers)}; wanted token ids with a number each, such as {{50: -100}}",
            parameter="logit_bias",
        )
    biases = {}
    for token, value in numbers.items():
        number = whole_number(token) if isinstance(token, str) else token
        if number is None:
            raise UserError(
                f"logit_bias has {named(token)}; wanted the id of a token", parameter="logit_bias"
            )
        bias = typed(f"logit_bias of token {token}", value, float)
        if abs(bias) > MOST_BIAS:
            raise UserError(
                f"logit_bias of token {token} is {bias}; it must be from -{MOST_BIAS:g} to {MOST_BIAS:g}",
                parameter="logit_bias",
            )
        biases[check_integer("a token of logit_bias", number, 0, MOST)] = bias
    return biases


def _random_seed() -> int:
    """Draw a seed."""
    if (
        jax.process_count() > 1
    ):  # every host would draw another one, and rows would differ between them
        raise UserError("seed=-1 would differ between hosts; name a seed")
    return secrets.randbits(32)
