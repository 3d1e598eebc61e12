"""Policies: text, dict and JSON file name one method; every typo gives one line with the nearest
name."""

import inspect
import json
import re
from pathlib import Path

import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.eval.stamp import bytes_of
from kvqjax.hardware.planner import plan_memory
from kvqjax.methods import spelled_out
from kvqjax.methods.grammar import _HABITS
from kvqjax.methods.papers.aqua import AquaLayer
from kvqjax.methods.registry import POLICIES as SHIPPED
from kvqjax.parallel.mesh_size import MeshSize

POLICIES = (
    "exact",
    "kivi:bits=2,key_bits=4,window=64,sinks=4;0-1=exact",
    "kivi:key_bits=4,value_bits=2,window=64,sinks=4;0-1=exact",
    "kivi:bits=2,rope=pre;0=exact;-1=kivi:bits=8,group=64;-4--2=uniform:bits=4",
    "kvquant:bits=4,outliers=0.02,q_norm=true;3=exact",
    "xquant:bits=3,latent=false",
    "aqua:bits=2,exact=3+7,keep=streaming:512;1=kivi:bits=4",
    "higgs:bits=2,keep=streaming:1024",
)


@pytest.mark.parametrize("text", POLICIES)
def test_text_dict_and_file_are_one_policy(text, tmp_path):
    method = kvq.parse(text)
    assert str(method) == text
    tree = kvq.to_dict(method)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(tree))
    for source in (tree, file, str(file), json.loads(file.read_text()), str(method)):
        again = kvq.parse(source)
        assert again == method
        assert str(again) == text
        assert kvq.to_dict(again) == tree


@pytest.mark.parametrize("text", POLICIES)
def test_spelled_out_every_option_is_named(text):
    method = kvq.parse(text)
    whole = spelled_out(method)
    for part in (p.partition("=")[2] if i else p for i, p in enumerate(whole.split(";"))):
        name, _, options = part.partition(":")
        wanted = [p.name for p in inspect.signature(kvq.METHODS[name]).parameters.values()]
        assert [o.partition("=")[0] for o in options.split(",")] == wanted
    again = kvq.parse(whole)
    assert again == method
    assert str(again) == text


@pytest.mark.parametrize("name", sorted(set(kvq.METHODS) - {"exact"}))
def test_names_keep_their_bits(name):
    default = kvq.METHODS[name]()
    assert str(default).startswith(f"{name}:bits=")
    assert str(kvq.parse(str(default))) == str(default)
    assert kvq.to_dict(default)["bits"] == float(str(default).rpartition("=")[2])


def test_names_say_other_widths_too():
    assert str(kvq.kivi(key_bits=4)) == "kivi:bits=2,key_bits=4"
    assert kvq.kivi(key_bits=4) == kvq.kivi(key_bits=4, value_bits=2)
    assert str(kvq.policy(kvq.parse("kvquant"), {0: kvq.kivi()})) == "kvquant:bits=3;0=kivi:bits=2"
    assert "Cache(kvquant:bits=3, " in repr(kvq.init_cache(tiny(), kvq.parse("kvquant"), 1, 64))


def test_the_dict_has_json_types():
    assert kvq.to_dict(
        kvq.parse("kvquant:q_norm=true,outliers=0.02,keep=streaming:64;0-1=exact")
    ) == {
        "method": "kvquant",
        "bits": 3,
        "q_norm": True,
        "outliers": 0.02,
        "keep": "streaming:64",
        "layers": {"0-1": {"method": "exact"}},
    }


def test_layers_of_a_dict_may_be_text_and_policies_may_be_sources():
    wanted = kvq.parse("kivi:key_bits=4,value_bits=2;0-1=exact")
    assert (
        kvq.parse({"method": "kivi", "key_bits": 4, "value_bits": 2, "layers": {"0-1": "exact"}})
        == wanted
    )
    assert kvq.policy(kvq.kivi(key_bits=4), {"0-1": {"method": "exact"}}) == wanted
    assert kvq.policy(kvq.kivi(key_bits=4), {0: kvq.exact(), 1: "exact"}) == wanted


def test_equal_caches_are_equal_however_they_are_named():
    assert kvq.parse("kivi:bits=2") == kvq.kivi() == kvq.kivi(key_bits=2, value_bits=2)
    assert kvq.parse("kivi:bits=2,keep=streaming:64") != kvq.kivi()


@pytest.mark.parametrize("name", kvq.METHODS)
def test_sinks_and_window_for_any_method(name):
    method = kvq.parse(f"{name}:sinks=3,window=32")
    model = tiny(num_layers=4)
    for run in runs_of(
        CacheLayout(shape=model.config.kv_shape, method=method, capacity=512, dtype="float32")
    ):
        assert method.sinks == 3
        assert run.wiring.storage.clocks[0].window == 32


WRONG = (
    ("kivi:windo=3", "did you mean 'window'"),
    ("kivi;0=exakt", "did you mean 'exact'"),
    ({"method": "kivy"}, "did you mean 'kivi'"),
    ("KIVI", "names of methods are in lower case: write kivi"),
    ("KIVI:bits=2", "write kivi"),
    ("KIVI*", "write kivi_star"),
    ("xquant-cl", "write xquant_cl"),
    ("AQUA-KV", "write aqua"),
    ("kivi:4", "write kivi:bits=4"),
    ("kivi:2bit", "write kivi:bits=2"),
    ("kivi:fast", "'fast' is not one option=value, such as kivi:window=64"),
    ("kivi4", "write kivi:bits=4"),
    ("kivi-2bit", "write kivi:bits=2"),
    ("4", "write kivi:bits=4"),
    ("q4_0", r"nearest here is uniform:bits=4,group=32 \(5 bits a number\)"),
    ("q8_0", r"nearest here is uniform:bits=8,group=32 \(9 bits a number\)"),
    ("fp8", "nearest here is uniform:bits=8"),
    ("int4", "nearest here is uniform:bits=4"),
    ("int8", "nearest here is uniform:bits=8"),
    ("bf16", "write exact"),
    ("quantized", "nearest here is kivi:bits=4"),
    ({"method": "kivi", "layer": {"0": "exact"}}, "did you mean 'layers'"),
    ({"metod": "kivi"}, "unknown method ''"),
    ({"method": "kivi", "bits": 2.5}, "'2.5' is not of type int"),
    ({"method": "kivi", "bits": True}, "'true' is not of type int"),
    ({"method": "kivi", "bits": [2]}, r"\[2\] is not one number or word"),
    ({"method": "kivi", "layers": "0=exact"}, "wanted an object"),
    ({"method": "kivi", "layers": {"0": {"method": "uniform", "bitts": 4}}}, "did you mean 'bits'"),
    ("kivi;0=exact;0=uniform", "layers 0 stand twice"),
    ("kivi;3-1=exact", "'3-1' is an empty range"),
    ("kivi;a=exact", "'a' is not a layer number"),
    ("kivi:bits=2,bits=3", "bits stands twice"),
    ("kivi:keep=h20:64", "keep=h20:64; wanted a rule"),
    ("kivi:keep=streaming", "keep=streaming; wanted a rule"),
    ("kivi;1=exact:keep=streaming:64", "a keep of its own"),
    ("kivi;1=aqua", "layers of its own"),
    ("nowhere.json", "No such file"),
)


@pytest.mark.parametrize(("source", "words"), WRONG, ids=str)
def test_typos_give_one_line(source, words):
    with pytest.raises(kvq.UserError, match=words) as caught:
        kvq.parse(source)
    assert "\n" not in str(caught.value)


def test_a_broken_file_says_where(tmp_path):
    file = tmp_path / "policy.json"
    file.write_text('{"method": "kivi",\n "bits" 2}')
    with pytest.raises(kvq.UserError, match=r"policy\.json: .*line 2, column 9"):
        kvq.parse(Path(file))
    file.write_text("[]")
    with pytest.raises(kvq.UserError, match="wanted an object"):
        kvq.parse(file)


def test_other_layers_take_their_place_in_a_chain():
    """AQUA-KV: exact layers feed the layer above and have no predictor; the same as its own
    option."""
    config = tiny(num_layers=4).config
    assert kvq.parse("aqua;2=exact").layers(config) == kvq.parse("aqua:exact=2").layers(config)
    kivi = kvq.parse("aqua:buffer=64;2=kivi:bits=4").layers(config)[2]
    assert isinstance(kivi, AquaLayer)
    assert (kivi.kind("k"), kivi.kind("v"), kivi.unit, kivi.key.bits) == ("none", "none", 64, 4)
    loop = runs_of(
        CacheLayout(
            shape=config.kv_shape,
            method=kvq.parse("xquant_cl:base=1;2=exact"),
            capacity=512,
            dtype="float32",
        )
    )
    assert {run.wiring.storage.clocks[0][1:] for run in loop} == {(0, 128)}


def test_the_policies_that_hints_name_exist_and_have_the_bits_said():
    config = tiny(head_dim=64).config
    for text in set(_HABITS.values()):
        method = kvq.parse(text.split(" ")[0])
        bits = plan_memory(config, method, 1024, 1, MeshSize()).book.bits_method
        if said := re.search(r"\((\d+) bits a number\)", text):
            assert bits == int(said[1]), text


def test_shipped_policies_are_known_by_name(tmp_path, monkeypatch):
    """They fit the budget in their name, all-in at 32768 tokens of SmolLM2-135M's heads. A user's
    own file of such a name comes first."""
    monkeypatch.chdir(tmp_path)
    model = tiny(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    names = sorted(file.name for file in SHIPPED.glob("*.json"))
    assert {"smollm2-2.3.json", "smollm2-2.5-free.json", "smollm2-3.2.json"} <= set(names)
    for name in names:
        budget = float(name.split("-")[1].removesuffix(".json"))
        assert bytes_of(model, name, 32768)["bits_stored"] <= budget
    (tmp_path / names[0]).write_text(json.dumps({"method": "exact"}))
    assert kvq.parse(names[0]) == kvq.exact()
    with pytest.raises(kvq.UserError, match="No such file"):
        kvq.parse(f"elsewhere/{names[1]}")
