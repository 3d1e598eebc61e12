"""Every codec of the library, at its fewest and its most bits, keeps to what
`kvqjax.testing.check_codec` asks of one's own."""

import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

import kvqjax as kvq
import kvqjax.codecs
from kvqjax.codecs import BlockCentred, Centred, Exact, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.codecs.commvq_values import CommVQValues
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.klt import Klt
from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.outlier_channel import OutlierChannels
from kvqjax.codecs.scaled import Scaled
from kvqjax.kernel_checks.trial import made_up
from kvqjax.testing import check_codec

WIDTH = 64
TOKENS, CHANNELS = ({"along": along, "group": 32} for along in ("tokens", "channels"))
CODECS = [
    Exact(),
    *(Uniform(bits=bits, **where) for bits in (1, 2, 8) for where in (TOKENS, CHANNELS)),
    Uniform(bits=1, along="channels", group=128),
    *(Balanced(bits=bits, heads=2, **where) for bits in (1, 4) for where in (TOKENS, CHANNELS)),
    Clipped(inner=Uniform(bits=1, **CHANNELS), parts=2, ratio=0.9),
    Scaled(inner=Uniform(bits=1, **TOKENS), parts=2),
    Centred(inner=Uniform(bits=1, **TOKENS)),
    BlockCentred(inner=Higgs(bits=2, dim=2)),
    OutlierChannels(channels=(3, 40), inner=Uniform(bits=1, **TOKENS)),
    Higgs(bits=2, dim=2),
    Higgs(bits=4, dim=1, seed=3),
    Klt(bits=1.5, slope=1.0),
    Klt(bits=6.0, slope=0.0, scale="none"),
    Nuq(bits=2, per="channel", outliers=0.05),
    Nuq(bits=4, per="token", outliers=0.05),
    CommVQKeys(head_dim=32, rounds=4, levels=8),
    CommVQValues(
        bits=1, hidden=16
    ),  # more bits of a made-up codebook err more: only a learnt one says anything
]


def constants_of(spec) -> dict:
    built = []
    jax.eval_shape(lambda: built.append(spec.build(WIDTH)))
    if isinstance(spec, Klt):  # a transform and the way back belong together
        groups, size, kept = built[0].needs["into"]
        into = jnp.broadcast_to(jnp.eye(size)[None, :, :kept], (groups, size, kept))
        return {"mean": jnp.zeros(WIDTH), "into": into, "back": jnp.swapaxes(into, 1, 2)}
    random = np.random.default_rng(0)
    of_one_layer = {
        name: made_up(name, (1, *shape), random)[0] for name, shape in built[0].needs.items()
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in of_one_layer.items()}


@pytest.mark.parametrize("spec", thinned(CODECS, 2), ids=str)
def test_a_codec_of_the_library_passes(spec):
    assert "error" in check_codec(spec, WIDTH, constants_of(spec))


def test_none_is_left_out():
    folder = kvqjax.codecs
    modules = [
        __import__(f"kvqjax.codecs.{x.name}", fromlist=["x"])
        for x in pkgutil.iter_modules(folder.__path__)
    ]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and "width" in str(inspect.signature(getattr(value, "build", lambda: None)))
    }
    assert classes - {type(spec) for spec in CODECS} <= {folder.CodecSpec}
    assert kvq.METHODS
