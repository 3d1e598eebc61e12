"""Transform coding with values from the keys of their own layer: every reader against a float64
oracle that decodes the stored codes by itself; what is refused; meshes by heads."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_constants, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.cache.artifacts import Artifact
from kvqjax.codecs.klt import REACH, STEPS
from kvqjax.parallel.rules import shares_heads

SINKS, UNIT = 3, 32
SPECS = {heads: f"klt:bits=2.5,heads={heads},buffer=32,sinks=3" for heads in ("all", "own", "2")}


def _numbers(codes: np.ndarray, bits: int) -> np.ndarray:
    """The numbers that codes stand for, by the formulas of the codec's documentation."""
    middle = (2**bits - 1) / 2
    if bits in STEPS:
        return (codes - middle) * STEPS[bits]
    return np.sinh((codes - middle) / middle * math.asinh(REACH))


def _coefficients(codec, payload: dict, groups: int) -> np.ndarray:
    """The coefficients [B, n, G, R] of one source, float64."""
    levels = sorted(
        (name for name in codec.fields if name != "scale"), key=lambda name: -int(name[5:])
    )
    numbers = []
    for name in levels:
        codes = np.asarray(payload[name], np.float64)
        numbers.append(_numbers(codes, int(name[5:])).reshape(*codes.shape[:2], groups, -1))
    scale = 2 ** ((np.asarray(payload["scale"], np.float64) - 128) / 16)
    return np.concatenate(numbers, -1) * scale[..., None]


def _decoded(cache, layer: int, constants: dict, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys before RoPE and values [B, n, W] of a layer's first body tokens, float64."""
    (run,) = runs_of(cache.layout)
    arrays = jax.tree.map(lambda x: np.asarray(x[layer], np.float64), constants)
    groups = len(arrays["k"]["back"])
    z = {}
    for source, codec in run.wiring.storage.codecs.items():
        stored = cache.runs[0].body[source]
        payload = {
            name: field.packing.read(stored[name], layer, 0, run.slots)[:, :tokens]
            for name, field in codec.fields.items()
        }
        z[source] = _coefficients(codec, payload, groups)

    def turned(coefficients, matrices):
        x = np.einsum("bngr,grc->bngc", coefficients, matrices)
        return x.reshape(*x.shape[:2], -1)

    keys = arrays["k"]["mean"] + turned(z["k"], arrays["k"]["back"])
    predicted = turned(z["k"], arrays["v"]["from_keys"])
    return keys, arrays["v"]["mean"] + predicted + turned(z["v"], arrays["v"]["back"])


def _rotated(x: np.ndarray, config) -> np.ndarray:
    """Rotate heads [B, T, N, D] at positions 0 to T - 1, float64."""
    half = config.head_dim // 2
    angles = np.outer(np.arange(x.shape[1]), config.rope.theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attended(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """Causal attention of queries at positions `first` on, float64."""
    heads = q.shape[2] // keys.shape[2]
    keys, values = (np.repeat(x, heads, axis=2) for x in (keys, values))
    scores = np.einsum("bthd,bshd->bhts", q, keys) / math.sqrt(q.shape[3])
    position = first + np.arange(q.shape[1])
    hidden = np.arange(keys.shape[1])[None] > position[:, None]
    scores = np.where(hidden[None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), values)


def _ready(spec: str):
    """A model of one layer and four KV heads with made-up constants of `spec`."""
    model = tiny(num_layers=1, num_kv_heads=4)
    return with_constants(model, kvq.parse(spec))


PLACES = {"planes": (2, 1024, 300), "heads": (2, 1024, 300), "stripes": (4, 4096, 1100)}


@pytest.mark.parametrize(
    ("heads", "form"),
    with_nightly(itertools.product(SPECS, PLACES), [("all", "planes"), ("own", "heads")]),
)
def test_every_reader_is_the_oracle(heads, form):
    """One new token, whose values are summed as coefficients, and 150, which read decoded values;
    in planes, head by head, as GPUs store bodies, and in stripes, as CPUs store long ones and read
    four rows 1024 tokens at a time. Sums of a few hundred float32 products err by some 2^-20 of
    their terms. `length` tokens are in the cache before."""
    rows, capacity, length = PLACES[form]
    model = _ready(SPECS[heads])
    config, rng = model.config, np.random.default_rng(0)
    shape = rows, length + 150, 4, config.head_dim
    k, v, queries = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    cache = kvq.init_cache(config.kv_shape, SPECS[heads], rows, capacity, form=form)
    held = jnp.full(rows, length)
    old = queries[:, :length], k[:, :length], v[:, :length]
    _, new = kvq.attend_layer(cache, 0, *old, held, constants=model.constants)
    cache = kvq.append(cache, [new], held, constants=model.constants)
    encoded = (length - SINKS) // UNIT * UNIT
    body = slice(SINKS, SINKS + encoded)
    keys, values = (np.array(x, np.float64) for x in (k, v))
    decoded = _decoded(cache, 0, model.constants[0], encoded)
    keys[:, body], values[:, body] = (x.reshape(rows, encoded, 4, -1) for x in decoded)
    rotated = _rotated(keys, config)
    for count in (1, 150):
        span = slice(length, length + count)
        got, _ = kvq.attend_layer(
            cache, 0, queries[:, span], k[:, span], v[:, span], jnp.full(rows, count),
            constants=model.constants,
        )  # fmt: skip
        stop = length + count
        q = _rotated(np.asarray(queries, np.float64), config)[:, span]
        wanted = _attended(q, rotated[:, :stop], values[:, :stop], length)
        np.testing.assert_allclose(got, wanted, atol=2.0**-14 * np.abs(values).max())


@pytest.mark.parametrize(("heads", "parts"), thinned([("all", 1), ("2", 2), ("own", 4)], 3))
def test_a_mesh_splits_as_many_heads_as_have_transforms_of_their_own(heads, parts):
    layout = kvq.init_cache(tiny(num_kv_heads=4).config.kv_shape, SPECS[heads], 1, 256).layout
    assert [n for n in (1, 2, 4) if shares_heads(layout, n)][-1] == parts


def test_constants_of_the_form_before_are_refused_in_one_line():
    """Releases before had no axis of groups, and nothing that predicts values."""
    model = _ready(SPECS["all"])
    (run,) = model.constants
    before = {
        source: {
            name: x[:, 0] if x.ndim > 2 else x
            for name, x in run[source].items()
            if name != "from_keys"
        }
        for source in run
    }
    with pytest.raises(kvq.UserError, match="kvqjax calibrate") as error:
        kvq.generate(model.replace(constants=(before,)), [[5, 6, 7]], SPECS["all"])
    assert "\n" not in str(error.value)


def test_an_artifact_whose_method_had_other_options_is_refused_in_one_line(tmp_path):
    path = tmp_path / "artifact"
    model = _ready(SPECS["all"])
    Artifact(kvq.parse(SPECS["all"]), model.constants, model.fingerprint).save(path)
    described = path / "description.json"
    text = described.read_text(encoding="utf-8")
    described.write_text(text.replace("klt:", "klt:scales=bfloat16,"), encoding="utf-8")
    with pytest.raises(kvq.UserError, match="calibrate again") as error:
        kvq.load_artifact(path)
    assert "\n" not in str(error.value)


def test_keys_predict_values_of_the_same_heads_alone():
    with pytest.raises(kvq.UserError, match="transformed over different heads; values=alone"):
        kvq.init_cache(tiny(), "klt:heads=own;0.v=klt:heads=all", 1, 64)
