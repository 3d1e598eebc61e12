"""The checks for codecs and methods of one's own hold for ours, and fail for broken ones."""

import dataclasses

import jax.numpy as jnp
import pytest
from cases import model_and_method

import kvqjax as kvq
from kvqjax.codecs import Codec, Uniform
from kvqjax.methods import KeysAndValues, Method
from kvqjax.testing import CHECKS, check_codec, check_method


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
