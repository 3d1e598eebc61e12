"""Checks for codecs and methods of your own: what every cache of this library keeps to, on a small
random model.

    from kvqjax.testing import check_codec, check_method

    check_codec(Fp4(group=32), width=64)
    check_method(Method(name="fp4", layer=KeysAndValues(key=Fp4(), value=Fp4())))

Each raises AssertionError with one line that names the failed check, and returns the names of the
checks that passed. For a model of your own over our caches, `check_rope` compares the rope of its
`KVShape` with its function.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.cache import Cache, runs_of
from kvqjax.cache.accounting import array_bytes, ledger
from kvqjax.cache.surgery import crop, evict, fork, gather, insert
from kvqjax.codecs import Codec, CodecSpec
from kvqjax.methods import MethodLike, parse
from kvqjax.model import weight_trees
from kvqjax.model.config import PAIRS, KVShape, ModelConfig, RopeConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import as_given, in_halves, rotate
from kvqjax.step.forward import forward
from kvqjax.step.new_cache import init_cache
from kvqjax.step.persist import load_cache, save_cache

__all__ = ["check_codec", "check_method", "check_rope", "small_model"]


def __dir__() -> list[str]:
    return __all__


ROWS, LENGTH, CAPACITY, PIECE = 2, 192, 256, 64
# float32 sums of a few hundred terms of size about 1 in another order, through two layers and the
# head
SUMS = 2e-4


def small_model(**changes) -> Model:
    """A random Llama of 2 layers, width 128, 4 query and 2 KV heads of 32, 64 tokens, float32;
    fields of `ModelConfig` may be changed."""
    sizes: dict[str, Any] = {"vocab_size": 64, "width": 128, "mlp_width": 128, "num_layers": 2}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    config = ModelConfig(**(sizes | changes))
    return Model(params=weight_trees.init_params(jax.random.key(0), config), config=config)


def _vectors(tokens: int, width: int) -> Float[Array, "u W"]:
    """Draw vectors as keys and values are: signed, some channels large or on an offset, now and then
    an outlier."""
    random = np.random.default_rng(0)
    x = random.normal(size=(tokens, width))
    x = x * np.exp(random.normal(size=width)) + 4 * random.normal(size=width)
    x += 20 * (random.random((tokens, width)) < 0.003)
    return jnp.asarray(x, jnp.float32)


def _equal(first, second) -> bool:
    """Say whether two trees of arrays are equal, to the bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def check_codec(
    spec: CodecSpec, width: int, constants: dict[str, Array] | None = None
) -> list[str]:
    """Check the codec that `spec` builds.

    Args:
        spec: the codec's spec.
        width: channels of the vectors that it stores.
        constants: what the codec declares in `needs`, by name.

    Returns:
        The names of the checks.

    Raises:
        AssertionError: a check does not hold.
        UserError: a constant is missing.
    """
    built: list[Codec] = []
    # What it keeps from inside a trace must not be a tracer.
    jax.eval_shape(lambda: built.append(spec.build(width)))
    codec = built[0]
    stored = constants or {}
    for name, shape in codec.needs.items():
        if name not in stored or stored[name].shape != shape:
            raise UserError(f"{spec}: constant {name!r} of shape {shape} is needed to check it")
    encode = jax.jit(functools.partial(codec.encode, stored))
    decode = jax.jit(functools.partial(codec.decode, stored))
    x = _vectors(4 * codec.unit, width)
    tiles = [encode(part) for part in jnp.split(x, 4)]
    assert _equal(tiles[0], encode(x[: codec.unit])), "encode: equal vectors give different words"
    assert set(tiles[0]) == set(codec.fields), (
        f"encode gives {sorted(tiles[0])}, the fields are {sorted(codec.fields)}"
    )
    single = [decode(tile) for tile in tiles]
    assert single[0].shape == (codec.unit, width), (
        f"decode gives {single[0].shape} of {(codec.unit, width)}"
    )
    both = decode(jax.tree.map(lambda *parts: jnp.stack(parts), *tiles))
    assert _equal(both, jnp.stack(single)), (
        "decode: tiles with an axis in front come back otherwise than one by one"
    )
    error = float(((both.reshape(x.shape) - x) ** 2).mean())
    variance = float(x.var(0).mean())
    payload = [field for field in codec.fields.values() if field.role == "payload"]
    bits = max(1.0, sum(field.packing.token_bits for field in payload) / width)  # of a number
    # Codes of few bits may err by more than the variance, but not by more than a step of such codes
    # between the least and the greatest number. Twice the variance, because these vectors suit no
    # codec in particular.
    step = float(x.max() - x.min()) / (2**bits - 1)
    better = f"any {bits:.3g} bits from the least to the greatest"
    if 2 * variance > step**2:
        better = "their means alone"
    assert error < max(2 * variance, step**2), (
        f"decode: its error is {error / variance:.3g} of the vectors' variance; {better} would do better"
    )
    for name, value in {"zeros": 0.0, "equal numbers": 3.0, "large numbers": 6e4}.items():
        back = decode(encode(jnp.full((codec.unit, width), value)))
        assert bool(jnp.isfinite(back).all()), (
            f"a tile of {name} comes back with numbers that are not finite"
        )
    return ["tracers", "determinism", "fields", "leading axes", "error", "finite"]


class _Subject(NamedTuple):
    """The subject of a check: a model with the method's constants, and two rows of LENGTH tokens.
    The second row holds fewer."""

    model: Model
    method: Any
    tokens: Array
    counts: Array

    def fill(
        self, rows=slice(None), size: int = PIECE, layers: str | None = None
    ) -> tuple[Array, Cache]:
        """Fill a cache, `size` tokens at a time. Gives the logits of each row's last token, and the
        cache."""
        tokens = self.tokens[rows]
        counts = self.counts[rows]
        cache = init_cache(self.model, self.method, len(tokens), CAPACITY, layers=layers)
        last = jnp.zeros((len(tokens), self.model.config.vocab_size), jnp.float32)
        for start in range(0, LENGTH, size):
            now = jnp.clip(counts - start, 0, size)
            piece = tokens[:, start : start + size]
            logits, cache = _forward(self.model, piece, now, cache)
            # A row that has ended keeps the logits of its own last token.
            last = jnp.where(now[:, None] > 0, logits.astype(jnp.float32), last)
        return last, cache

    def continued(self, cache: Cache) -> Array:
        """Compute the logits of one more token on every row."""
        logits, _ = _one_more(self.model, cache, 5)
        return logits


_forward = jax.jit(functools.partial(forward, last=True))


def _one_more(model: Model, cache: Cache, token: int) -> tuple[Array, Cache]:
    """Put one token behind every row."""
    rows = cache.lengths.shape[0]
    return _forward(model, jnp.full((rows, 1), token), jnp.ones(rows, jnp.int32), cache)


def _close(first, second, what: str) -> None:
    """Assert that logits are equal but for the rounding of sums in another order."""
    worst = float(jnp.abs(first - second).max())
    assert worst <= SUMS, f"{what}: logits differ by {worst:.3g}"


def _encodes(subject: _Subject) -> None:
    """A cache without encoded tokens would pass every other check."""
    _, cache = subject.fill()
    flushed = []
    for run in cache.runs:
        flushed += [int(units.max()) for units in run.flushed]
    assert not flushed or max(flushed) > 0, (
        f"no token of {LENGTH} is encoded; give a smaller window"
    )


def _rows(subject: _Subject) -> None:
    """A row does not depend on its neighbours."""
    together, _ = subject.fill()
    for row in range(ROWS):
        alone, _ = subject.fill(slice(row, row + 1))
        _close(together[row], alone[0], f"row {row} in a batch and alone")


def _pieces(subject: _Subject) -> None:
    """However a prompt comes, the same units are encoded."""
    _, at_once = subject.fill(size=LENGTH)
    _, parts = subject.fill(size=PIECE)
    for a, b in zip(at_once.runs, parts.runs, strict=True):
        assert _equal(a.flushed, b.flushed), (
            "a prompt in pieces and at once has encoded other tokens"
        )


def _numbers(subject: _Subject) -> None:
    """Finite keys and values give finite logits."""
    last, cache = subject.fill()
    assert bool(jnp.isfinite(last).all()), "logits are not finite"
    assert not cache.nonfinite.any(), "a source is not finite"


def _surgery(subject: _Subject) -> None:
    """Rows that are moved, and rows beside one that is emptied, go on as before."""
    _, cache = subject.fill()
    untouched = subject.continued(cache)
    swapped = gather(cache, jnp.asarray([1, 0]))
    _close(subject.continued(swapped)[::-1], untouched, "gather")
    _close(subject.continued(fork(cache)), untouched, "fork")
    moved = insert(cache, 0, cache, 1)
    _close(subject.continued(moved)[0], untouched[1], "insert")
    emptied = evict(cache, jnp.asarray([True, False]))
    assert int(emptied.lengths[0]) == 0, "evict: the row still has tokens"
    _close(subject.continued(emptied)[1], untouched[1], "evict of the other row")
    _, longer = _one_more(subject.model, cache, 7)
    before = [run.flushed for run in cache.runs]
    after = [run.flushed for run in longer.runs]
    if _equal(before, after):  # else a token became codes, which a crop does not take back
        _close(subject.continued(crop(longer, cache.lengths)), untouched, "crop")


def _saved(subject: _Subject) -> None:
    """A saved cache comes back to the bit."""
    _, cache = subject.fill()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        try:
            parse(str(subject.method))
        except UserError:
            return  # only methods with a name that `parse` reads can be saved
        save_cache(path, cache, subject.model)
        assert _equal(load_cache(path, subject.model), cache), "a saved cache comes back otherwise"


def _layers(subject: _Subject) -> None:
    """Both forms of layers compute the same."""
    unrolled, _ = subject.fill(layers="unroll")
    stacked, _ = subject.fill(layers="scan")
    _close(unrolled, stacked, "layers as a list and as a stack")


def _bytes(subject: _Subject) -> None:
    """The ledger counts all bytes of the arrays."""
    cache = init_cache(subject.model, subject.method, ROWS, CAPACITY)
    stored = array_bytes(cache)
    assert ledger(cache).bytes == stored, (
        f"the ledger counts {ledger(cache).bytes} bytes, the arrays hold {stored}"
    )


def _tracers(subject: _Subject) -> None:
    """First, and with a capacity of its own: what is built inside a trace is kept, and used
    outside."""
    make = functools.partial(init_cache, subject.model, subject.method, ROWS, CAPACITY + PIECE)
    assert jax.tree.structure(jax.eval_shape(make)) == jax.tree.structure(make()), (
        "a traced cache has another form"
    )


CHECKS: dict[str, Callable[[_Subject], None]] = {
    "tracers": _tracers,
    "encodes": _encodes,
    "finite": _numbers,
    "rows": _rows,
    "pieces": _pieces,
    "surgery": _surgery,
    "saving": _saved,
    "layers": _layers,
    "bytes": _bytes,
}


def check_method(method: MethodLike, model: Model | None = None) -> list[str]:
    """Check the caches of a method: a prompt in pieces and at once, rows in a batch and alone,
    layers as a stack and as a list, gather, fork, insert, evict, crop, saving, and the ledger
    against the arrays.

    Args:
        method: the method, or a policy.
        model: whose caches are made; None: `small_model()`. A calibrated method needs a model that
            holds its constants.

    Returns:
        The names of the checks.

    Raises:
        AssertionError: a check does not hold; the text is one line.
        UserError: constants are missing.
    """
    model = model or small_model()
    method = parse(method)
    missing: list[str] = []
    for run in runs_of(init_cache(model, method, 1, 1).layout):
        missing += run.wiring.wanted()
    if missing and not model.constants:
        raise UserError(
            f"{method} is calibrated; give a model with its constants (Model.with_artifact)"
        )
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, model.config.vocab_size)
    subject = _Subject(model, method, tokens, jnp.asarray([LENGTH, LENGTH - 83]))
    for check in CHECKS.values():
        check(subject)
    return [*CHECKS]


# Positions 0 to 63 and 500 to 563: float32 angles are exact to 3e-5 there.
ROPE_TOKENS = 64
ROPE_FAR = 500
# Of numbers of size 1; an angle that is off by a hundredth of a turn moves them by 6e-2.
ROPE_BOUND = 1e-3

# Keys or queries and their positions [B, T] -> rotated.
Turning = Callable[[Float[Array, "B T N D"], Any], Any]


def check_rope(shape: KVShape, layer: int, theirs: Turning) -> list[str]:
    """Check that the rope of a shape turns keys as another model's function does.

    Args:
        shape: the model's shape, with a rope.
        layer: the number of the layer whose rope is compared; ropes may differ by layer.
        theirs: the model's function. It takes an array [2, 64, num_kv_heads, head_dim] and
            positions [2, 64], and returns the array rotated.

    Returns:
        The names of the comparisons.

    Raises:
        AssertionError: the two differ, with a line that says how: the channels that are turned, how
            they are paired, the direction, or the first pair of another angle.
        UserError: the layer does not exist, or has no rope.
    """
    number = check_integer("layer", layer, 0, shape.num_layers - 1)
    config = shape.layer(number)
    if config.rope is None:
        raise UserError(f"layer {number} of the shape has no rope; its keys come rotated")
    positions = jnp.stack([jnp.arange(ROPE_TOKENS), jnp.arange(ROPE_TOKENS) + ROPE_FAR])
    shape_of_keys = (*positions.shape, config.num_kv_heads, config.head_dim)
    x = jax.random.normal(jax.random.key(0), shape_of_keys)
    got = jnp.asarray(theirs(x, positions))
    assert got.shape == x.shape, (
        f"layer {number}: their function gives shape {got.shape} of {x.shape}"
    )
    if not _near(_rotated(x, positions, config), got):
        raise AssertionError(f"layer {number}: {_other_turn(config, x, positions, got, theirs)}")
    return ["near positions", "far positions"]


def _rotated(x: Array, positions: Array, config: KVShape) -> Array:
    """Rotate heads whose channels are in the order of the shape's rope."""
    turned = rotate(in_halves(x, config), positions, config)
    return as_given(turned, config)


def _near(want: Array, got: Array) -> bool:
    """Say whether rotated vectors are equal but for the rounding of angles."""
    return float(jnp.abs(want - got).max()) <= ROPE_BOUND


def _other_turn(config: KVShape, x: Array, positions: Array, got: Array, theirs: Turning) -> str:
    """Say in words how another model's rotation differs from a shape's."""
    # The first row begins at position 0, where nothing is turned.
    first = _rotated(x[:, :1], positions[:, :1], config)
    if not _near(first[0], got[0, :1]):
        return "at position 0 their function does not give what this rope gives; are keys scaled or normed in it?"
    if _near(_rotated(x, -positions, config), got):
        return "their function turns in the other direction"
    for pairs in PAIRS:
        other = dataclasses.replace(config, rope=_paired(config, pairs))
        if _near(_rotated(x, positions, other), got):
            return f"their function pairs channels as a Rope with pairs={pairs!r} does, this one has {config.pairs!r}"
    turned = _channels_turned(x, _rotated(x, positions, config))
    moved = _channels_turned(x, got)
    if moved != turned:
        return f"their function turns {moved} of {config.head_dim} channels, this rope {turned}"
    return _other_angle(config, theirs)


def _channels_turned(x: Array, rotated: Array) -> int:
    """Count the channels of a head that a rotation changes."""
    change = jnp.abs(rotated - x).max((0, 1, 2))
    return int((change > ROPE_BOUND).sum())


def _paired(config: KVShape, pairs: str) -> RopeConfig:
    """Give the rope of a layer, for channels in another order."""
    assert isinstance(config.rope, RopeConfig)  # `check_rope` refused a layer without one
    return dataclasses.replace(config.rope, pairs=pairs)


def _other_angle(config: KVShape, theirs: Turning) -> str:
    """Say which pair of channels is the first that turns by another angle, measured from one
    position to the next."""
    positions = jnp.stack([jnp.arange(ROPE_TOKENS)] * 2)
    half = config.head_dim // 2
    blank = jnp.zeros((*positions.shape, config.num_kv_heads, config.head_dim))

    def angle_of(rotated: Array, pair: int) -> float:
        """Measure the angle of a pair at position 1, in radians."""
        x = np.asarray(in_halves(rotated, config))[0, 1, 0]
        return float(np.arctan2(x[pair + half], x[pair]))

    for pair in range(half):
        # The pair's first channel is 1 before it is turned, all others are 0.
        unit = as_given(blank.at[..., pair].set(1.0), config)
        angle = angle_of(_rotated(unit, positions, config), pair)
        other_angle = angle_of(jnp.asarray(theirs(unit, positions)), pair)
        if abs(angle - other_angle) > 1e-4 * max(abs(angle), abs(other_angle)):
            return (
                f"pair {pair} turns by {other_angle:.6g} a position in their function, "
                f"by {angle:.6g} here: another theta?"
            )
    return "their function gives other numbers at far positions: are its angles, or its keys, of fewer bits?"
