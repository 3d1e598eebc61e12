"""The checks for codecs, methods and ropes of one's own hold for ours, and fail for broken ones."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method

import kvqjax as kvq
from kvqjax import KVShape, Method
from kvqjax.codecs import Codec, Uniform
from kvqjax.methods import KeysAndValues
from kvqjax.testing import CHECKS, check_codec, check_method, check_rope


@pytest.mark.nightly
def test_a_method_of_ours_passes_with_its_constants():
    with pytest.raises(kvq.UserError, match="calibrated"):
        check_method("kvquant:bits=3")
    model, method = model_and_method("kvquant")
    assert check_method(method, model) == [*CHECKS]


@dataclasses.dataclass(frozen=True)
class Broken:
    """4-bit codes per token with one fault."""

    fault: str

    def build(self, width: int) -> Codec:
        codec = Uniform(along="channels", bits=4, group=32).build(width)

        def encode(constants, x):
            tile = codec.encode(constants, x)
            if self.fault == "fields":
                return {name: tile[name] for name in list(tile)[1:]}
            return tile

        def decode(constants, tile):
            x = codec.decode(constants, tile)
            if self.fault == "mixes" and x.ndim > 2:
                return x - x.mean(0, keepdims=True)
            if self.fault == "nan":
                return jnp.where(x == 0, jnp.nan, x)
            return 3 * x if self.fault == "size" else x

        return codec._replace(encode=encode, decode=decode)


FAULTS = {
    "fields": "encode gives",
    "mixes": "an axis in front",
    "nan": "a tile of zeros",
    "size": "means alone would do better",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_codec_is_named(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_codec(Broken(fault), 64)


def test_a_sound_codec_passes():
    assert "determinism" in check_codec(Broken("none"), 64)


def test_a_method_that_mixes_rows_is_named():
    layer = KeysAndValues(key=Broken("mixes"), value=Broken("none"))
    with pytest.raises(AssertionError, match="row 0 in a batch and alone"):
        check_method(Method(name="mixes", layer=layer))


ROPES = KVShape(
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    rope=(kvq.Rope(theta=1e4), kvq.Rope(theta=1e6)),
)


def turned(x, positions, theta=1e4, count=16, sign=1, interleaved=False):
    """Another model's rotation of the first `count` channels, from the textbook."""
    angles = (
        np.asarray(positions)[..., None, None] * theta ** (-np.arange(0, count, 2) / count) * sign
    )
    x = np.asarray(x)
    a, b = (
        (x[..., 0:count:2], x[..., 1:count:2]) if interleaved else np.split(x[..., :count], 2, -1)
    )
    a, b = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    new = (
        np.stack([a, b], -1).reshape(*x.shape[:-1], count)
        if interleaved
        else np.concatenate([a, b], -1)
    )
    return np.concatenate([new, x[..., count:]], -1)


OTHER_ROPES = {
    "pairs channels as a Rope with pairs='neighbours' does, this one has 'halves'": lambda x, p: (
        turned(x, p, interleaved=True)
    ),
    "turns 8 of 16 channels, this rope 16": lambda x, p: turned(x, p, count=8),
    "turns in the other direction": lambda x, p: turned(x, p, sign=-1),
    "pair 1 turns by 0.193923 a position in their function, by 0.316228 here": lambda x, p: turned(
        x, p, theta=5e5
    ),
    "at position 0 their function does not give": lambda x, p: 4 * turned(x, p),
    "other numbers at far positions": lambda x, p: turned(x, np.minimum(p, 300)),
    r"gives shape \(2, 64, 32\) of": lambda x, p: turned(x, p).reshape(2, 64, 32),
}


def test_a_rope_is_that_of_another_model():
    assert check_rope(ROPES, 0, turned) == ["near positions", "far positions"]
    check_rope(ROPES, 1, functools.partial(turned, theta=1e6))
    for words, theirs in OTHER_ROPES.items():
        with pytest.raises(AssertionError, match=f"layer 0: .*{words}"):
            check_rope(ROPES, 0, theirs)
    with pytest.raises(kvq.UserError, match="layer=2; it must be a whole number from 0 to 1"):
        check_rope(ROPES, 2, turned)
    with pytest.raises(kvq.UserError, match="layer 0 of the shape has no rope"):
        check_rope(dataclasses.replace(ROPES, rope=None), 0, turned)
