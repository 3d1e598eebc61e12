"""A wiring made to fit a layout: compute dtype, stored form, kernels, and clocks that it can have.

A layer's spec builds a wiring (one layer's cache as a value) that knows no cache. `fitted` then goes through these
steps, in this order:

    _resolved       "compute" becomes the cache's dtype
    _in_form        fields get the form in which bodies are stored: heads (GPUs), lines and stripes (CPUs), or planes
    _with_kernels   the packed form is told which chip's kernels may read it
    _check_clocks   windows and units that no body can have are refused
    _by_groups      with eviction, there is one clock of at least 32 tokens

A packed form (`Fast.packed`) is a body that something reads as it is stored: a Pallas kernel or, for uniform codes, the
plain sums. A direct form (`Fast.direct`) is one that XLA reads at once, stored head by head."""

import contextlib
import dataclasses
import functools

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.codecs.uniform import GroupError
from kvqjax.methods import parse
from kvqjax.methods.grammar import read_text
from kvqjax.methods.layer_cache import Wiring
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.model.config import KVShape
from kvqjax.model.rope import following
from kvqjax.ops.packing.words import PLANE, split_bits
from kvqjax.pallas_kernels.adapters import Packed
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.forms import form_of
from kvqjax.pallas_kernels.packed import PackedSpec
from kvqjax.pallas_kernels.predicted import PredictedSpec

__all__ = ["fitted"]

LEAST_STRIPED = 4096  # slots: of shorter bodies, sums save less time than they take to compile
MOST_TOKENS = 2**30  # sums of two such counts are still int32


def fitted(spec: LayerSpec, layout: CacheLayout, first: int, shape: KVShape) -> Wiring:
    """Build the wiring of layers of one spec for a layout.

    Args:
        spec: The layers' spec.
        layout: All that is static about the cache.
        first: The number of the first of these layers, for messages.
        shape: What the cache must know of the model, for these layers.

    Returns:
        The wiring.

    Raises:
        UserError: The spec does not fit the model, or its clocks do not fit its codecs or the layout's eviction."""
    try:
        # The form is chosen first: kernels read planes, so that a body in another form may use none.
        wiring = _in_form(_resolved(spec.build(shape), layout.dtype), layout, shape)
        if wiring.fast.packed is not None:
            wiring = wiring.having(fast={"packed": _with_kernels(wiring.fast.packed, layout)})
        # A body's block holds consecutive positions, whose cosines a CPU makes from those of the first one.
        if family(layout.target) == "cpu" and wiring.fast.before_rope:
            wiring = wiring.having(fast={"waves": functools.partial(following, config=shape)})
    except ValueError as error:
        hint = _fitting_group(error, layout, first, shape) if isinstance(error, GroupError) else ""
        raise UserError(f"{layout.method} does not fit layer {first} of this model: {error}{hint}") from error
    _check_clocks(wiring, str(layout.method))
    return _by_groups(wiring, layout.method)


def _fitting_group(error: GroupError, layout: CacheLayout, first: int, shape: KVShape) -> str:
    """Name an option of the method with which the layer can be built; "" where none is known."""
    for size in error.fitting:
        for option in ("group", "value_group"):
            with contextlib.suppress(ValueError):
                method = parse(read_text(str(layout.method)) | {option: size})
                _resolved(method.layers(layout.shape)[first].build(shape), layout.dtype)
                return f"; {option}={size} does"
    return ""


def _resolved(wiring: Wiring, dtype: str) -> Wiring:
    """Give fields of dtype "compute", and what a kernel is told of them, the cache's compute dtype."""

    def fix(codec):
        fields = codec.fields.items()
        return codec._replace(
            fields={
                name: dataclasses.replace(field, dtype=dtype) if field.dtype == "compute" else field
                for name, field in fields
            }
        )

    wiring = wiring.having(storage={"codecs": {name: fix(codec) for name, codec in wiring.storage.codecs.items()}})
    packed = wiring.fast.packed
    # The other kernels' specs have no compute dtype.
    if packed is None or not isinstance(packed.spec, ExactSpec | PredictedSpec):
        return wiring
    return wiring.having(fast={"packed": packed._replace(spec=dataclasses.replace(packed.spec, dtype=dtype))})


def _in_form(wiring: Wiring, layout: CacheLayout, shape: KVShape) -> Wiring:
    """Give fields the form that they are stored in, and drop the readers that cannot read it.

    Args:
        wiring: With the cache's dtype.
        layout: The cache's layout.
        shape: The layer's shape.

    Returns:
        The wiring, with a direct form or a packed one, never both."""
    if layout.form == "stripes":
        wiring = _striped(wiring, layout, shape)
    # Bodies that XLA cannot read at once keep the packings of their codecs, also in a cache of form "heads".
    if layout.form != "heads" or wiring.fast.direct is None:
        return wiring.having(fast={"direct": None})

    def by_head(codec):
        fields = codec.fields.items()
        return codec._replace(fields={name: field.by_head(shape.num_kv_heads) for name, field in fields})

    codecs = {name: by_head(codec) for name, codec in wiring.storage.codecs.items()}
    # What reads packed words expects planes.
    return wiring.having(storage={"codecs": codecs}, fast={"packed": None})


def _striped(wiring: Wiring, layout: CacheLayout, shape: KVShape) -> Wiring:
    """Store codes of keys in lines and of values in stripes where sums of kvqjax.pallas_kernels.few_queries read them:
    uniform ones of long bodies that keep all tokens.

    Args:
        wiring: With the cache's dtype.
        layout: The cache's layout.
        shape: The layer's shape.

    Returns:
        The wiring, unchanged where its body is another one."""
    packed = wiring.fast.packed
    if packed is None or not (isinstance(packed.spec, PackedSpec) and packed.spec.plain):
        return wiring
    # Rings of sliding windows and evicted bodies are not read by these sums, which want slots in the tokens' order.
    keeps_all = shape.window is None and layout.method.keep is None
    # No word of keys may have channels of two heads: they are read head by head, and split over devices by heads.
    whole_words = all(shape.head_dim * bits % 32 == 0 for bits in split_bits(packed.spec.key_bits))
    if not (keeps_all and whole_words) or layout.capacity < LEAST_STRIPED:
        return wiring

    def stored(codec, **form):
        codes = dataclasses.replace(codec.fields["codes"], **form)
        return codec._replace(fields=codec.fields | {"codes": codes})

    codecs = wiring.storage.codecs
    keys, values = stored(codecs["k"], form="lines", heads=shape.num_kv_heads), stored(codecs["v"], form="stripes")
    codecs = codecs | {"k": keys, "v": values}
    packed = packed._replace(spec=dataclasses.replace(packed.spec, striped=True))
    return wiring.having(storage={"codecs": codecs}, fast={"packed": packed})


def _with_kernels(packed: Packed, layout: CacheLayout) -> Packed:
    """Tell a packed form which chip's kernels may read it; "cpu" stands for none.

    Args:
        packed: The packed form of a body, in the form that it is stored in.
        layout: The cache's layout.

    Returns:
        The packed form, which also says whether the table of kernels need not be asked (`trusted`), and whether
        anything reads the words themselves (`straight`)."""
    striped = isinstance(packed.spec, PackedSpec) and packed.spec.striped
    allowed = not striped and layout.kernels.allow(form_of(packed.spec))
    spec = dataclasses.replace(packed.spec, target=layout.target if allowed else "cpu")
    # Without a kernel, words are read as they are stored where they are plain uniform codes, and else decoded first.
    straight = spec.target != "cpu" or (isinstance(spec, PackedSpec) and spec.plain)
    # Where `forms` lists what may run, the chip checked it or the user forces it. Else the table decides.
    return packed._replace(spec=spec, trusted=layout.kernels.forms is not None, straight=straight)


def _check_clocks(wiring: Wiring, name: str) -> None:
    """Raise UserError for windows and units that no body can have. `name` is the method's, for messages.

    A unit of several tokens is a multiple of 32, because its codes are written as whole planes, and a multiple of the
    tokens that each of its codecs encodes at a time."""
    for clock in wiring.storage.clocks:
        if clock.window < 0:
            raise UserError(f"{name}: window={clock.window}; a count of tokens cannot be negative")
        if clock.window > MOST_TOKENS:
            raise UserError(f"{name}: window={clock.window}; at most {MOST_TOKENS} tokens are possible")
        if clock.unit != 1 and (clock.unit < 1 or clock.unit % 32):
            raise UserError(
                f"{name}: tokens leave the window {clock.unit} at a time; 1 or a multiple of 32 is possible"
            )
        for source in clock.sources:
            if clock.unit % wiring.storage.codecs[source].unit:
                raise UserError(
                    f"{name}: {source} is encoded {wiring.storage.codecs[source].unit} tokens at a time, "
                    f"but leaves the window {clock.unit} at a time"
                )


def _by_groups(wiring: Wiring, method: Method) -> Wiring:
    """Give the wiring a clock that eviction can work with: one for all sources, of whole planes at least. It stays as
    it is where nothing is evicted.

    Args:
        wiring: The wiring, with clocks that a body can have.
        method: The cache's method, whose `keep` says how many tokens the body keeps.

    Returns:
        The wiring.

    Raises:
        UserError: It has several clocks, or a unit is more than the body may keep."""
    if method.keep is None:
        return wiring
    if len(wiring.storage.clocks) > 1:
        raise UserError(f"{method}: keys and values leave the window apart, so their tokens cannot be evicted")
    # A unit is the least that can be freed, since the scales of a group and a plane of codes belong to all its tokens.
    clock = wiring.storage.clocks[0]._replace(unit=max(PLANE, wiring.storage.clocks[0].unit))
    if method.keep.budget < clock.unit:
        raise UserError(f"{method}: tokens leave the body {clock.unit} at a time; keep that many at least")
    return wiring.having(storage={"clocks": (clock,)})
