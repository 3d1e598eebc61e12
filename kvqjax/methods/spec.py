"""`Method`: the frozen, hashable, printable description of a compressed cache, layer by layer.

A layer spec is a frozen dataclass with `build(config) -> Wiring`. A method gives every layer one,
with exceptions by layer number. `str(method)` is the text that the CLI, artifacts and reports
share, and `parse` reads it back.

`Keep` says which tokens a cache keeps when it may not keep all of them. It can be added to every
method, and no method depends on it:

    streaming:512   the newest 512 tokens that left the window (StreamingLLM, arXiv 2309.17453: sinks + recent)

Sinks and window are kept in addition. Tokens are chosen per row, for all layers and heads together.
They keep their positions, and leave the body in whole groups (kvqjax.cache.eviction).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from kvqjax._arguments import check_fields, check_integer, named, typed, whole_number
from kvqjax._errors import UserError
from kvqjax._options import check_names
from kvqjax.methods.layer_cache import Wiring
from kvqjax.model.config import KVShape

MOST_LAYERS = 4096  # layers that an option may name; a slip must not fill the memory with overrides
# Fields of layer specs that no constant depends on: when tokens are encoded, and what a reader has
# in memory.
UNCALIBRATED = ("window", "unit", "clocks", "copy")


# ---- Which tokens are kept ----

RULES = ("streaming",)
KEEP_WANTED = f"wanted a rule ({', '.join(RULES)}) and a count of tokens, such as streaming:512"


@dataclasses.dataclass(frozen=True)
class Keep:
    """`budget` tokens of each row stay in the body, chosen by `rule`."""

    rule: str
    budget: int

    def __post_init__(self):
        check_fields(self)
        if self.rule not in RULES or self.budget < 1:
            raise UserError(f"keep={self}; {KEEP_WANTED}")

    def __str__(self) -> str:
        return f"{self.rule}:{self.budget}"


def read_keep(text: str | Keep) -> Keep:
    """Read `rule:tokens`. Raises UserError on anything else."""
    if isinstance(text, Keep):
        return text
    if not isinstance(text, str):
        raise UserError(f"keep is {named(text)}; {KEEP_WANTED}")
    rule, _, budget = text.partition(":")
    tokens = whole_number(budget)
    if tokens is None:
        raise UserError(f"keep={text}; {KEEP_WANTED}")
    return Keep(rule, tokens)


# ---- Layer specs and methods ----


@runtime_checkable
class LayerSpec(Protocol):
    """Anything frozen and hashable that can build a layer's wiring for a model."""

    def build(self, config: KVShape) -> Wiring: ...


@functools.lru_cache(maxsize=256)
def wiring_of(spec: LayerSpec, shape: KVShape) -> Wiring:
    """Build a layer's wiring. Kept, because planning asks for the same one for every length."""
    return spec.build(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A description of how every layer caches. Methods are equal when they cache alike, whatever
    their names are."""

    name: str = dataclasses.field(compare=False)
    layer: LayerSpec
    sinks: int = 0  # tokens at the start of a row that stay exact
    # (layer, spec) pairs that differ from `layer`. A negative number counts from the last layer.
    overrides: tuple[tuple[int, LayerSpec], ...] = ()
    keep: Keep | None = None  # bounds the body's tokens
    # Layers at each end that overrides protect. A model must have layers between them.
    boundary: int = dataclasses.field(default=0, compare=False)

    def __post_init__(self):
        check_integer("sinks", self.sinks, 0)
        check_integer("boundary", self.boundary, 0)
        if not isinstance(self.layer, LayerSpec):
            raise UserError(
                f"layer is {named(self.layer)}; wanted a layer spec, such as KeysAndValues(...)"
            )
        pairs = self.overrides if isinstance(self.overrides, tuple) else (None,)
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], LayerSpec)):
                raise UserError(
                    f"overrides is {named(self.overrides)}; wanted a tuple of (layer, layer spec) pairs"
                )
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise UserError(
                f"keep is {named(self.keep)}; wanted a Keep, such as Keep('streaming', 512)"
            )

    def __str__(self) -> str:
        return self.name

    def layers(self, config: KVShape) -> tuple[LayerSpec, ...]:
        """List the spec of every layer of a model."""
        specs = [self.layer] * config.num_layers
        if self.boundary and 2 * self.boundary >= config.num_layers:
            raise UserError(
                f"{self.name}: boundary={self.boundary} exact layers at each end are all {config.num_layers} of this "
                "model, and nothing would be compressed; say a smaller boundary"
            )
        for index, spec in self.overrides:
            if not -config.num_layers <= index < config.num_layers:
                raise UserError(
                    f"{self.name}: layer {index} does not exist in a model of {config.num_layers} layers"
                )
            specs[index] = spec
        return tuple(specs)


def calibrated_part(method: Method, config: KVShape) -> Method:
    """Reduce a method to its codecs and layers. Methods that are equal in this take each other's
    constants.

    Args:
        method: whose constants are asked for.
        config: the model's shape. Whether keys are kept without their bias counts only for models
            that have one.

    Returns:
        The method with sinks, windows, units and `keep` at their defaults.
    """
    left_out = UNCALIBRATED if config.known_key_bias else (*UNCALIBRATED, "unbiased")

    def bare(spec: Any) -> Any:
        """Set the fields that are left out to their defaults, also in the two layers of a
        `Pair`."""
        for name in ("key", "value"):
            layer = getattr(spec, name, None)
            # Codecs, which have a `build` too, have none of the fields that are left out.
            if isinstance(layer, LayerSpec):
                spec = dataclasses.replace(spec, **{name: bare(layer)})
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(spec)
            if field.name in left_out
        }
        return dataclasses.replace(spec, **defaults)

    overrides = tuple((number, bare(spec)) for number, spec in method.overrides)
    return dataclasses.replace(
        method, layer=bare(method.layer), sinks=0, overrides=overrides, keep=None
    )


def first_layers(name: str, count: int) -> range:
    """Number the first `count` layers, which the option `name` protects. Raises UserError for no
    count of layers."""
    if not 0 <= count <= MOST_LAYERS:
        raise UserError(f"{name}={count} first layers; wanted a count from 0 to {MOST_LAYERS}")
    return range(count)


def value_or(value: Any, default: Any) -> Any:
    """Give an option's value, or `default` for None. A 0 is a value: the codec that gets it refuses
    it."""
    return default if value is None else value


def option_text(value: Any) -> str:
    """Write an option's value as policies do."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def method_factory(function: Callable[..., Method]) -> Callable[..., Method]:
    """Make a method's factory of a function that builds the method.

    The method is named after the call that made it. Options at their defaults are left out of the
    name, but not the bits. Every factory also has the option `keep` ("streaming:512"), which
    `function` does not see.

    Args:
        function: returns a method for options that are keyword-only and have annotations and
            defaults.

    Returns:
        The factory. It raises UserError for an option that it does not have, for a value of another
        type than the annotation says, and in place of every ValueError of `function`. The message
        begins with the factory's name.
    """
    signature = inspect.signature(function)
    keep_option = inspect.Parameter(
        "keep", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None
    )
    parameters = signature.replace(
        parameters=[*signature.parameters.values(), keep_option]
    ).parameters

    @functools.wraps(function)
    def make(*, keep: str | Keep | None = None, **options: Any) -> Method:
        check_names(function.__name__, options, parameters)
        options = {
            k: typed(f"{function.__name__}: {k}", v, parameters[k].annotation)
            for k, v in options.items()
        }
        try:
            method = function(**options)
            kept_tokens = None if keep is None else read_keep(keep)
        except (
            ValueError
        ) as error:  # a UserError of a codec does not say which method was asked for
            raise UserError(f"{function.__name__}: {error}") from error
        written = {
            k: v for k, v in (options | {"keep": keep}).items() if v != parameters[k].default
        }
        if "bits" in parameters and not {"key_bits", "value_bits"} <= written.keys():
            written["bits"] = options.get("bits", parameters["bits"].default)
        # In the order of the factory's parameters, so that equal calls have equal names.
        text = ",".join(f"{k}={option_text(written[k])}" for k in parameters if k in written)
        name = function.__name__ + (f":{text}" if text else "")
        return dataclasses.replace(method, name=name, keep=kept_tokens)

    make.__dict__["__signature__"] = signature.replace(parameters=list(parameters.values()))
    return make
