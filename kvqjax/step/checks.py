"""What public functions do around their work, and which of the new tokens are valid.

    check_...                          check arguments: one line for each mistake
    run_constants, with_own_constants  find the calibrated constants that a cache takes
    kept_program, run_step             outside jit, run as one program, which is compiled once
    Padding                            where the valid tokens of every row stand

Shapes and dtypes are static, so those of tracers are checked too. Numbers in `counts` are checked
where they are known.

Callers say in one of two ways which new tokens are valid:

    counts Int[B]       the first counts[b] tokens of row b
    a mask Bool[B, T]   any single run of tokens of each row, such as rows padded on the left

Inside a step, every row begins with its first valid token, because positions follow what its cache
holds. Rows that begin with padding are rolled by one gather on the way in, and their outputs are
rolled back on the way out."""

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvqjax._arguments import check_integers, check_within, is_known, named
from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, check_cache
from kvqjax.methods import Method
from kvqjax.methods.rotation import CONSTANTS as FITTED
from kvqjax.methods.spec import calibrated_part
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.ops.finite import leading
from kvqjax.parallel.rules import Rules
from kvqjax.parallel.sharding import over_mesh


class Padding(NamedTuple):
    """Where the valid tokens of every row stand.

    Attributes:
        counts: How many valid tokens each row has.
        start: The place of the first valid token. None: all rows begin at place 0.
        torn: Which rows have a mask that is not a single run. Of such a mask only the first run
            counts. None: there can be no such row.
    """

    counts: Int[Array, " B"]
    start: Int[Array, " B"] | None = None
    torn: Bool[Array, " B"] | None = None

    def begun(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Roll every row so that its first valid token stands at place 0."""
        if self.start is None:
            return x
        return _rolled(x, self.start)

    def begun_mask(self, mask: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
        """Roll a mask of the tokens that each token sees as `begun` rolls tokens, on both axes."""
        by_seen = self.begun(mask).swapaxes(1, 2)
        return self.begun(by_seen).swapaxes(1, 2)

    def as_given(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Roll every row back to where the caller's tokens stand."""
        if self.start is None:
            return x
        return _rolled(x, -self.start)

    def flagged(self, overflow: Bool[Array, " B"]) -> Bool[Array, " B"]:
        """Raise the overflow flags of rows whose mask is not a single run."""
        if self.torn is None:
            return overflow
        return overflow | self.torn


def _rolled(x: Shaped[Array, "B T ..."], by: Int[Array, " B"]) -> Shaped[Array, "B T ..."]:
    """Roll every row to the left: the entry at place (t + by[b]) mod T of row b comes to place
    t."""
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


def check_accepted(counts: Any, attended: Int[Array, " B"] | Bool[Array, "B T"]) -> None:
    """Raise UserError where more tokens of a row would be stored than were valid.

    Args:
        counts: how many are stored, or a mask of them; known.
        attended: how many were valid when the layers attended, or a mask of them; known.
    """
    stored = known_counts(counts)
    valid = known_counts(attended)
    beyond = stored > valid
    if beyond.any():
        row = int(beyond.argmax())  # the first such row
        raise UserError(
            f"counts: {stored[row]} tokens of row {row} would be stored; {valid[row]} were valid"
        )


def accepted_part(
    counts: Int[Array, " B"] | Bool[Array, "B T"], attended: Int[Array, " B"] | Bool[Array, "B T"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Clip how many tokens are stored to how many were valid.

    Args:
        counts: as in `check_accepted`.
        attended: as there.

    Returns:
        How many are stored, and which rows' flags are raised: those that were clipped, and those of
        which a mask is not a single run.
    """
    stored = padding_of(counts)
    valid = padding_of(attended)
    beyond = stored.counts > valid.counts
    count = jnp.minimum(stored.counts, valid.counts)
    return count, stored.flagged(valid.flagged(beyond))


def check_numbers(counts: Any, batch: int, length: int | None) -> None:
    """Raise UserError for counts of new tokens, or a mask of them, that cannot be.

    Numbers that a trace hides are not checked. They are clipped where tokens are appended, and
    raise the row's flag there.

    Args:
        counts: how many of each row's new tokens are valid, or a mask of the valid ones.
        batch: how many rows there are.
        length: how many new tokens each row is given. None: that is not known yet, and counts are
            not compared with it.
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
        raise UserError(
            f"counts is a mask of shape {list(mask.shape)}; wanted [{batch}, {length}]: {meaning}"
        )
    if not is_known(mask):
        return
    valid = np.asarray(mask)
    # Where a run of valid tokens begins: a valid token without a valid one before it.
    before = np.pad(valid, ((0, 0), (1, 0)))[:, :-1]
    begins = valid & ~before
    torn = begins.sum(1) > 1
    if torn.any():
        row = int(torn.argmax())
        places = np.flatnonzero(begins[row]).tolist()
        written = ", ".join(str(place) for place in places[:4])
        if len(places) > 4:
            written += ", ..."
        raise UserError(
            f"counts: row {row} of the mask has valid tokens in {len(places)} runs, from places "
            f"{written} on; a row has one run"
        )


def known_counts(counts: Any) -> np.ndarray:
    """Count the valid tokens of each row, from counts or a mask that are known."""
    numbers = np.asarray(counts)  # with jnp this would be traced inside a user's loop
    if is_mask(numbers):
        return numbers.sum(1)
    return numbers


def known_mask(counts: Any, length: int) -> np.ndarray:
    """Mark the valid ones of `length` tokens of each row, from counts or a mask that are known."""
    numbers = np.asarray(counts)
    if is_mask(numbers):
        return numbers
    return np.arange(length)[None] < numbers[:, None]


def check_model(model: Any, name: str = "model") -> None:
    """Raise UserError for what is no Model. `name` is what the message calls it."""
    if not isinstance(model, Model):
        raise UserError(f"{name} is {named(model)}; wanted a Model, such as kvqjax.load('demo')")


def check_model_or_shape(model: Any) -> None:
    """Raise UserError for what is neither a Model nor a KVShape."""
    if not isinstance(model, Model | KVShape):
        raise UserError(
            f"model is {named(model)}; wanted a Model, such as kvqjax.load('demo'), or a KVShape"
        )


def check_rules(sharding: Any) -> None:
    """Raise UserError for what are no rules of a mesh; None passes."""
    if not isinstance(sharding, Rules | None):
        raise UserError(
            f"sharding is {named(sharding)}; wanted the rules of a mesh, such as cache.layout.rules"
        )


def check_both(model: Any, cache: Any) -> None:
    """Raise UserError unless the cache is one of this model."""
    check_model(model)
    check_cache(cache)
    if cache.layout.shape != model.config.kv_shape:
        raise UserError("the cache was made for a model of another config")
    if cache.layout.dtype != str(model.params["embed"].dtype):
        raise UserError(
            f"the cache is kept in {cache.layout.dtype}, the model is {model.params['embed'].dtype}"
        )


def check_new_tokens(model: Any, tokens: Any, counts: Any, cache: Any) -> None:
    """Raise UserError unless these are T new tokens for every row of a cache of this model, and
    their counts."""
    check_both(model, cache)
    rows = cache.batch
    why = f"T new tokens for each of the cache's {rows} rows"
    check_integers("tokens", tokens, (rows, "T"), why)
    check_numbers(counts, cache.batch, tokens.shape[1])
    _check_valid(tokens, counts, model.config.vocab_size)


def _check_valid(tokens: Any, counts: Any, vocabulary: int) -> None:
    """Raise UserError for a known id of a valid token outside the vocabulary."""
    if not is_known(tokens, counts):
        return
    # Ids that a device is still computing are not waited for: a loop of eager steps could not run
    # ahead of the device then. Such ids are clipped, and raise the row's flag, as inside jit.
    if not (_is_ready(tokens) and _is_ready(counts)):
        return
    ids = np.asarray(tokens)
    ids = np.where(known_mask(counts, ids.shape[1]), ids, 0)
    check_ids("tokens", ids, vocabulary)


def _is_ready(array: Any) -> bool:
    """Say whether an array is computed; those of numpy always are."""
    return not hasattr(array, "is_ready") or array.is_ready()


def check_ids(name: str, ids: Any, vocabulary: int) -> None:
    """Raise UserError for a known token id outside a vocabulary of this size."""
    check_within(name, ids, 0, vocabulary - 1, f"from 0 to {vocabulary - 1}, the model's token ids")


def check_pending(model: Any, cache: Any, pending: Any, counts: Any) -> None:
    """Raise UserError unless `pending` is what `attend` returns for this model and cache.

    Args:
        model: wanted as a Model.
        cache: wanted as a cache of it.
        pending: wanted as a tuple: the sources [L_run, B, T, W] of every run by name, then those of
            every stack of recurrent layers.
        counts: how many of the T tokens each row stores, or a mask of them.
    """
    check_both(model, cache)
    # Of every stack of layers: how many there are, and the width of each source.
    stacks = [(run.count, run.wiring.storage.sources) for run in runs_of(cache.layout)]
    shape = cache.layout.shape.recurrent
    if shape is not None:
        widths = shape.widths | dict.fromkeys(("decay", "beta"), shape.value_heads)
        layers = len(shape.layers) // len(cache.states)  # of a stack
        stacks += [(layers, widths)] * len(cache.states)
    if not isinstance(pending, tuple) or len(pending) < len(stacks):
        kind = "a dict of sources for every run"
        raise UserError(f"pending is {named(pending)}; wanted a tuple of {len(stacks)}, {kind}")
    length = None
    pairs = zip(stacks, pending, strict=False)
    for number, ((layers, widths), sources) in enumerate(pairs):
        for name, width in widths.items():
            source_shape = None
            if isinstance(sources, dict):
                source_shape = getattr(sources.get(name), "shape", None)
            # The first source that has four axes says what T is for all others.
            if length is None and source_shape is not None and len(source_shape) == 4:
                length = source_shape[2]
            stack_shape = (layers, cache.batch, length, width)
            if source_shape != stack_shape:
                text = "nothing" if source_shape is None else f"shape {list(source_shape)}"
                sizes = f"[{layers}, {cache.batch}, T, {width}]"
                raise UserError(
                    f"pending[{number}][{name!r}]: {text} given, wanted {sizes} with one T for all"
                )
    check_numbers(counts, cache.batch, length or 0)


def check_entries(constants: Any) -> None:
    """Raise UserError for calibrated constants that are not a dict for each run of layers; None
    passes."""
    if constants is None:
        return
    if isinstance(constants, tuple | list) and all(isinstance(x, Mapping) for x in constants):
        return
    hint = ""
    if isinstance(constants, Artifact):
        hint = "; write constants=artifact.constants"
    raise UserError(
        f"constants is {named(constants)}; wanted those of an artifact, a tuple of dicts{hint}"
    )


def _calibration(method: Method, model: str, group: str, shape: list[int]) -> str:
    """Say in a message how to make the artifact of a method.

    Args:
        method: The method, which lacks an array of its constants.
        model: What `--model` takes for the model; "" where that is not known.
        group: The group of constants that the array belongs to.
        shape: The array's shape for the layers of a run."""
    folder = re.sub(r"[^a-z0-9]+", "-", str(method).lower()).strip("-")
    source = shlex.quote(model) if model else "MODEL"
    command = f"kvqjax calibrate --model {source} --cache {shlex.quote(str(method))} --out {folder}"
    remedy = "kvqjax.calibrate.from_tensors makes it, and constants= takes it"
    if group == FITTED:  # on a model's weights, which a shape has not
        remedy = f"constants= takes orthogonal matrices of your own, {shape} for these layers"
    of_shape = "" if model else f"; for a KVShape {remedy}"
    text = f"`{command}` makes it; `--artifact {folder}` or model.with_artifact(load_artifact({folder!r})) takes it"
    return text + of_shape


def run_constants(entries, layout: CacheLayout, model: str = "") -> tuple[dict, ...]:
    """Give every run its calibrated constants.

    Args:
        entries: constants of every run, or of every stack of layers, as an artifact holds them;
            empty where there are none.
        model: what --model takes for the model, for the message.

    Returns:
        The constants of every run.

    Raises:
        UserError: at trace time, for missing or misshapen constants.
    """
    check_entries(entries)
    runs = runs_of(layout)
    entries = entries or tuple({} for _ in runs)
    if len(entries) != len(runs):
        # Constants of stacked layers also serve a cache that stores each layer by itself.
        stacks = runs_of(dataclasses.replace(layout, layers="scan"))
        if len(entries) == len(stacks):
            entries = _cut_into_layers(entries, [stack.count for stack in stacks])
    if len(entries) != len(runs):
        raise UserError(
            f"constants for {len(entries)} runs of layers given, the method has {len(runs)}"
        )
    for run, constants in zip(runs, entries, strict=True):
        for group, names in run.wiring.wanted().items():
            for name, shape in names.items():
                expected = (run.count, *shape)
                array = constants.get(group, {}).get(name)
                if array is not None and array.shape == expected:
                    continue
                if array is None:
                    cause = f"layer {run.first} needs the calibrated constant {group}.{name}"
                else:
                    cause = f"constant {group}.{name} has shape {array.shape}, wanted {expected}"
                remedy = _calibration(layout.method, model, group, list(expected))
                raise UserError(f"{cause}: {remedy}")
    return entries


def _cut_into_layers(entries, counts: list[int]) -> tuple[dict, ...]:
    """Cut the constants of stacks of layers into those of each layer. A stack has `counts` layers."""
    layers = []
    for constants, count in zip(entries, counts, strict=True):
        for index in range(count):
            layers.append(jax.tree.map(lambda a, i=index: a[i : i + 1], constants))
    return tuple(layers)


def with_own_constants(model: Model, method: Method) -> Model:
    """Reduce a model that holds several artifacts to the constants for caches of one method.

    Args:
        model: any model.

    Returns:
        The model with the constants of the method's own artifact. Without one, those of the newest
        artifact that was calibrated for the same codecs and layers; else none.
    """
    if not model.others:
        return model
    part = calibrated_part(method, config=model.config)
    by_method = []  # constants of artifacts of this very method
    by_part = []  # and of those whose codecs and layers are the same
    artifacts = zip(model.calibrated, (model.constants, *model.others), strict=True)
    for artifact_method, constants in artifacts:
        if artifact_method == method:
            by_method.append(constants)
        if calibrated_part(artifact_method, config=model.config) == part:
            by_part.append(constants)
    constants = [*by_method, *by_part, ()][0]
    return model.replace(constants=constants, others=(), calibrated=())


@jax.custom_jvp
def _for_inference(tree):
    """Return `tree`, and refuse to differentiate through it: a cache stores rounded numbers."""
    return tree


@_for_inference.defjvp
def _no_gradient(primals, tangents):
    raise UserError(
        "forward, attend, commit, prefill, attend_layer and append are for inference: a cache holds rounded numbers "
        "and has no gradient; train on kvqjax.model.decoder.logits"
    )


def kept_program(
    function: Callable, static_argnums: tuple[int, ...] = (), static_argnames: tuple[str, ...] = ()
) -> Callable:
    """Wrap a function of arrays and trees.

    Args:
        function: any pure function.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.

    Returns:
        A function that does the same. Outside a trace it is compiled once for its shapes and static
        arguments. Inside a trace it is called as it is. It raises UserError where a gradient is
        asked for.
    """

    # Tokens, counts and codes are 32-bit numbers whatever jax_enable_x64 says.
    @functools.wraps(function)
    @jax.enable_x64(False)
    def plain(*arguments, **options):
        guarded = []
        for place, argument in enumerate(arguments):
            is_static = place in static_argnums
            guarded.append(argument if is_static else _for_inference(argument))
        return function(*guarded, **options)

    compiled = jax.jit(plain, static_argnums=static_argnums, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*arguments, **options):
        leaves = jax.tree.leaves((arguments, options))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return plain(*arguments, **options)
        return compiled(*arguments, **options)

    return call


def _placed(step, model: Model, cache: Cache, *arguments, out: tuple[str, ...], **options):
    """Call `step(model, cache, *arguments, **options)` on one device, or on every device's part of
    the model's mesh. `out` names what it returns, for the mesh."""
    model = with_own_constants(model, cache.layout.method)

    def as_int32(x):
        return x.astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.integer) else x

    arguments = jax.tree.map(as_int32, arguments)
    step = functools.partial(step, **options)
    if model.rules is None:
        return step(model, cache, *arguments)
    return over_mesh(step, model, cache, *arguments, out=out)


run_step = kept_program(_placed, static_argnums=(0,), static_argnames=("out", "within", "last"))
