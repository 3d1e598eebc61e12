"""Keys of one method beside values of another: as text, dict and file, in the cache, and in every
command's policy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.methods.keys_values import Pair
from kvqjax.methods.spec import calibrated_part

KIVI, HIGGS = "kivi:bits=2,window=32", "higgs:bits=3,buffer=32,sinks=0"
POLICIES = (
    f"{KIVI};k={HIGGS}",
    f"{KIVI};0.k={HIGGS};1.v=uniform:bits=4",
    f"{KIVI};-2=exact;-1.k=exact",
)


@pytest.mark.parametrize("text", POLICIES)
def test_text_dict_and_file_are_one_policy(text, tmp_path):
    method = kvq.parse(text)
    assert str(method) == text
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(kvq.to_dict(method)))
    for source in (kvq.to_dict(method), str(file)):
        assert kvq.parse(source) == method
        assert str(kvq.parse(source)) == text


def test_the_two_parts_alone_name_a_policy():
    assert (
        kvq.parse(f"k={HIGGS};v={KIVI}")
        == kvq.parse(f"v={KIVI};k={HIGGS}")
        == kvq.parse(f"{KIVI};k={HIGGS}")
    )
    assert kvq.parse(f"k={HIGGS};v={KIVI};1=exact") == kvq.parse(f"{KIVI};k={HIGGS};1=exact")


def test_parts_of_one_method_are_a_layer_of_that_method():
    """So that its kernels read it."""
    assert kvq.parse("kivi:bits=2;k=kivi:bits=4") == kvq.kivi(key_bits=4, value_bits=2)
    assert (
        kvq.parse("higgs:bits=2;1.v=higgs:bits=4").overrides[0][1]
        == kvq.higgs(bits=2, value_bits=4).layer
    )
    assert isinstance(kvq.parse("kivi:bits=2;k=kivi:bits=2,group=64").layer, Pair)


def test_an_exception_changes_what_the_ones_before_it_left():
    layers = kvq.parse(f"{KIVI};1.v=exact;k={HIGGS};1.k={KIVI}").layers(tiny().config)
    exact, kivi, higgs = (kvq.parse(text).layer for text in ("exact", KIVI, HIGGS))
    assert layers == (Pair(key=higgs, value=kivi), Pair(key=kivi, value=exact))


def held(text: str, ids) -> dict:
    """What each layer's body gives back of 192 tokens, [2, slots, W] per source."""
    model, method = tiny(), kvq.parse(text)
    cache = kvq.init_cache(model, method, 1, 512)
    _, cache = kvq.prefill(model, ids, jnp.asarray([ids.shape[1]]), cache)
    out: dict[str, list] = {"k": [], "v": []}
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        for layer in range(run.count):
            for part, codec in run.wiring.storage.codecs.items():
                stored = {
                    n: f.packing.read(state.body[part][n], layer, 0, run.block)
                    for n, f in codec.fields.items()
                }
                out[part].append(np.asarray(codec.decode({}, stored)[0, :128]))
    return out


def test_each_part_is_stored_as_its_own_method_stores_it():
    """Layer 0: what is fed to it is the same whatever its cache is."""
    ids = tokens(1, 192)
    kivi, higgs, both = (held(text, ids) for text in (KIVI, HIGGS, f"{KIVI};k={HIGGS}"))
    np.testing.assert_array_equal(both["k"][0], higgs["k"][0])
    np.testing.assert_array_equal(both["v"][0], kivi["v"][0])


@pytest.mark.nightly
def test_parts_with_windows_of_their_own_decode_as_they_prefill():
    """Fed in chunks of 32 or token by token, the same numbers are read."""
    model, method = tiny(), kvq.parse(f"{KIVI};k={HIGGS}")
    layout = CacheLayout(shape=model.config.kv_shape, method=method, capacity=256, dtype="float32")
    assert len(runs_of(layout)[0].wiring.storage.clocks) == 2
    ids, logits = tokens(1, 192), []
    for chunk in (32, 1):
        cache = kvq.init_cache(model, method, 1, 256)
        step = jax.jit(kvq.forward)
        for start in range(0, 192, chunk):
            _, cache = step(model, ids[:, start : start + chunk], jnp.asarray([chunk]), cache)
        logits.append(step(model, ids[:, :1], jnp.asarray([1]), cache)[0])
    np.testing.assert_allclose(logits[0], logits[1], atol=0.05)


ROTATED = "kivi:bits=8,window=32,rotate=hadamard"


@pytest.mark.parametrize(
    "text",
    thinned(
        [f"k={ROTATED};v={ROTATED},value_rotate=signs", f"exact;v={ROTATED}", f"exact;k={ROTATED}"],
        3,
    ),
)
def test_a_rotated_part_is_read_in_its_frame(text):
    """Queries and outputs are turned for the part that is: what 8 bits lose is small beside the
    logits."""
    model, ids, counts = tiny(), tokens(1, 129), jnp.asarray([1])
    found = []
    for method in ("exact", text):
        cache = kvq.prefill(
            model, ids[:, :128], jnp.asarray([128]), kvq.init_cache(model, method, 1, 256)
        )[1]
        found.append(np.asarray(kvq.forward(model, ids[:, 128:], counts, cache)[0]))
    assert 0 < np.abs(found[1] - found[0]).max() < 0.3 * np.std(found[0])


def test_constants_serve_a_pair_whatever_its_windows():
    config = tiny().config
    one, other = (kvq.parse(f"exact;k=kvquant:bits=3,buffer={n};0.v=kivi:bits=2") for n in (32, 64))
    assert one != other
    assert calibrated_part(one, config) == calibrated_part(other, config)
    assert calibrated_part(one, config) != calibrated_part(
        kvq.parse("exact;k=kvquant:bits=4;0.v=kivi:bits=2"), config
    )


WRONG = (
    ("k=kivi", "names no method for the other part"),
    ("kivi;0.x=exact", "neither the keys"),
    ("kivi;-1.k=exact;0.v=exact", "counted from one end"),
    ("kivi;k=kivi;k=exact", "layers k stand twice"),
    ("kivi;k=exact;k.v=exact", "not a layer number"),
)


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_typos_give_one_line(text, words):
    with pytest.raises(kvq.UserError, match=words) as caught:
        kvq.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["aqua;k=kivi", "k=xquant;v=kivi", "k=kivi;v=xquant", "k=kivi;v=xquant:latent=true"]
)
def test_parts_that_no_method_has_are_refused(text):
    with pytest.raises(
        kvq.UserError, match="cannot be taken alone, since it caches keys and values together"
    ):
        kvq.init_cache(tiny(num_layers=4), text, 1, 512)
