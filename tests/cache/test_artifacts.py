"""Artifacts come back as saved; damaged, foreign and unwritable folders are refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import _constants
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache.artifacts import FORMAT, Artifact
from kvqjax.cli.common import calibrated
from kvqjax.methods import spelled_out
from kvqjax.methods.spec import calibrated_part


@pytest.fixture
def saved(tmp_path):
    constants = (
        {"k": {"low": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}, "v": {"lut": jnp.ones(4)}},
        {},
    )
    artifact = Artifact(kvq.kivi(bits=2), constants, "config=1,headers=2", {"data": "none"})
    artifact.save(tmp_path / "a")
    return artifact, tmp_path / "a"


def test_round_trip(saved):
    artifact, folder = saved
    back = kvq.load_artifact(folder)
    assert (back.method, back.fingerprint, back.about) == (
        artifact.method,
        artifact.fingerprint,
        artifact.about,
    )
    assert back.constants[1] == {}
    for group, name in (("k", "low"), ("v", "lut")):
        ours, theirs = back.constants[0][group][name], artifact.constants[0][group][name]
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_every_option_is_stored(tmp_path):
    """A later version may have other defaults; what was stored keeps its meaning."""
    model, method = tiny(), kvq.parse("higgs:bits=3,group=head,buffer=32")
    Artifact(method, (), "", {}).save(tmp_path / "artifact")
    kvq.save_cache(tmp_path / "cache", kvq.init_cache(model, method, 1, 64), model)
    for name in ("artifact", "cache"):
        about = json.loads((tmp_path / name / "description.json").read_text())
        assert (about["format"], about["method"]) == (FORMAT, spelled_out(method))
        assert "centre=auto" in about["method"]
    assert kvq.load_artifact(tmp_path / "artifact").method == method
    assert str(kvq.load_cache(tmp_path / "cache", model).layout.method) == str(method)


def test_printed_it_says_what_it_is_and_no_numbers(saved):
    text = repr(saved[0])
    assert text == "Artifact(kivi:bits=2, config=1,headers=2): 28 bytes in 2 arrays, data='none'"
    method = kvq.kivi(bits=2, window=32)
    head, *runs = repr(
        kvq.init_cache(tiny(), kvq.policy(method, {"0": kvq.exact()}), 1, 512)
    ).split("\n")
    assert head.startswith("Cache(kivi:bits=2,window=32;0=exact, float32, capacity 512): ")
    readers = ["  layer 0, read by blocks", "  layer 1, read by stored, blocks from 65 new tokens"]
    assert [run.split(":")[0] for run in runs] == readers
    assert "body.k.codes.0 uint32[1,1,32,32], body.k.low" in runs[1]


def test_refusals(saved, tmp_path):
    artifact, folder = saved
    with pytest.raises(kvq.UserError, match="exists already"):
        artifact.save(folder)
    with pytest.raises(kvq.UserError, match="fingerprint headers is 2, the model's is 3"):
        tiny().replace(fingerprint="config=1,headers=3").with_artifact(artifact)
    with pytest.raises(kvq.UserError, match=r"no description\.json"):
        kvq.load_artifact(tmp_path / "nowhere")
    text = json.loads((folder / "description.json").read_text())
    (folder / "description.json").write_text(json.dumps(text | {"format": 99}))
    with pytest.raises(kvq.UserError, match="format 99"):
        kvq.load_artifact(folder)
    (folder / "description.json").write_text("{")
    with pytest.raises(kvq.UserError, match="not readable as JSON"):
        kvq.load_artifact(folder)
    with pytest.raises(kvq.UserError, match="cannot be written"):
        artifact.save(folder / "description.json" / "inside-a-file")


def test_every_damaged_file_is_named(saved):
    """A changed number would be read without a word; a file that is missing would leave Orbax's
    readers behind."""
    _, folder = saved
    files = [file for file in folder.glob("arrays/**/*") if file.is_file()]
    assert any("/d/" in str(file) for file in files)
    for file in files:
        content = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        if content:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            with pytest.raises(kvq.UserError, match=f"{name} is damaged"):
                kvq.load_artifact(folder)
        file.unlink()
        with pytest.raises(kvq.UserError, match=f"{name} is missing"):
            kvq.load_artifact(folder)
        file.write_bytes(content)
    assert kvq.load_artifact(folder).fingerprint == "config=1,headers=2"


def test_a_method_without_its_constants_is_refused():
    with pytest.raises(kvq.UserError, match="calibrated constant"):
        kvq.generate(tiny(), [[1, 2, 3]], kvq.parse("kvquant:bits=3"), max_new_tokens=2)


CALIBRATED = "kvquant:bits=2,outliers=0.02;0=kvquant:bits=4"
SAME = ("window=32", "sinks=7", "buffer=32", "keep=streaming:64", "window=32,sinks=7,buffer=32")
OTHER = ("bits=4", "key_bits=2", "outliers=0.0", "rope=post", "scales=float32")


@pytest.mark.parametrize("more", SAME)
def test_an_artifact_serves_what_was_calibrated(more, tmp_path):
    """Codec, bits and layers; not when tokens are encoded, nor which are kept."""
    fitted = kvq.parse(CALIBRATED)
    constants = _constants(tiny(), fitted)
    Artifact(fitted, constants, "", {}).save(tmp_path / "a")
    head, layer = CALIBRATED.split(";")
    layer += "," + more if "keep" not in more and "sinks" not in more else ""
    method = kvq.parse(f"{head},{more};{layer}")
    assert method != fitted
    ready, _ = calibrated(tiny(), [method], [tmp_path / "a"])[0]
    jax.tree.map(np.testing.assert_array_equal, ready.constants, constants)


@pytest.mark.parametrize(
    "text", [*(f"kvquant:{more}" for more in OTHER), "kvquant:bits=3;0=exact", "kivi"]
)
def test_and_nothing_else(text, tmp_path):
    Artifact(kvq.parse("kvquant"), (), "", {}).save(tmp_path / "a")
    with pytest.raises(
        kvq.UserError, match="an artifact is for kvquant:bits=3, which is none of these caches"
    ):
        calibrated(tiny(), [kvq.parse(text)], [tmp_path / "a"])


def test_a_bias_that_a_model_lacks_is_no_difference():
    """Constants of before centre=auto serve it where it means nothing."""
    old, new = (kvq.parse(f"aqua:centre={c}") for c in ("none", "auto"))
    assert old != new
    assert calibrated_part(old, tiny().config) == calibrated_part(new, tiny().config)
    biased = tiny(qkv_bias=True).config
    assert calibrated_part(old, biased) != calibrated_part(new, biased)


@pytest.mark.nightly
def test_a_model_carries_several_artifacts(tmp_path):
    """Every cache takes its own method's constants, one of another window those of the same codecs,
    and one without calibration none; inside jit as well, and a saved cache names those that filled
    it."""
    specs = (
        "kvquant:bits=2",
        "commvq:bits=2,rounds=2,levels=16,hidden=16,window=32,unit=32",
        "kvquant:bits=4",
    )
    model, alone = tiny(), {}
    for spec in specs:
        artifact = Artifact(kvq.parse(spec), _constants(tiny(), kvq.parse(spec)), "")
        alone[spec] = tiny().with_artifact(artifact)
        model = model.with_artifact(artifact)
    text, counts = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6] * 12]), jnp.asarray([96])
    for spec, source in {
        **{s: s for s in specs},
        "kvquant:bits=2,window=32": specs[0],
        "kivi": specs[0],
    }.items():
        cache = kvq.init_cache(model, spec, 1, 128)
        logits, full = jax.jit(kvq.forward)(model, text, counts, cache)
        own = kvq.init_cache(alone[source], spec, 1, 128)
        wanted = jax.jit(kvq.forward)(
            alone[source].replace(constants=()) if spec == "kivi" else alone[source],
            text,
            counts,
            own,
        )
        np.testing.assert_array_equal(logits, wanted[0])
        jax.tree.map(np.testing.assert_array_equal, full, wanted[1])
    kvq.save_cache(tmp_path / "cache", full := kvq.init_cache(model, specs[0], 1, 64), model)
    back = kvq.load_cache(tmp_path / "cache", alone[specs[0]])
    assert back.layout == full.layout
    with pytest.raises(kvq.UserError, match="constants"):
        kvq.load_cache(
            tmp_path / "cache", alone[specs[0]].with_artifact(Artifact(kvq.parse(specs[0]), (), ""))
        )
    again = model.with_artifact(Artifact(kvq.parse(specs[0]), (), ""))
    assert len(again.others) == 2  # the newest of one method counts
    with pytest.raises(kvq.UserError, match="calibrated constant"):
        kvq.forward(again, text, counts, kvq.init_cache(again, specs[0], 1, 128))
