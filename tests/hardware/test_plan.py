"""`kvq.plan` and `kvqjax plan`: memory as programs get it, devices by every name, limits, and the
rows of both."""

import functools
import json

import jax
import pytest
from cases import with_nightly
from commands import run

import kvqjax as kvq
from kvqjax.hardware.devices import DEVICES, GIB, find_device, program_share
from kvqjax.hardware.planner import plan_memory
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.loading import config_of
from kvqjax.model.weight_codes import CodedWeight, code_weight
from kvqjax.model.weight_trees import init_params
from kvqjax.parallel.mesh_size import MeshSize

NAMES = {
    "A100": ("a100-40", 1), "a100-40gb": ("a100-40", 1), "A100-80GB": ("a100-80", 1), "4xA100-80GB": ("a100-80", 4),
    "NVIDIA A100-SXM4-80GB": ("a100-80", 1), "nvidia-tesla-a100": ("a100-40", 1), "H100-80GB": ("h100", 1),
    "NVIDIA H100 80GB HBM3": ("h100", 1), "8xH100": ("h100", 8), "8 x H100": ("h100", 8), "h100x8": ("h100", 8),
    "H100:2": ("h100", 2), "h100-80": ("h100", 1), "v5e": ("v5e", 1), "v5e-16": ("v5e", 16), "v5litepod-8": ("v5e", 8),
    "tpu-v6e-8": ("v6e", 8), "TPU v5 lite": ("v5e", 1), "TPU v6 lite": ("v6e", 1), "TPU v5": ("v5p", 1),
    "v5p-8": ("v5p", 4), "v4-8": ("v4", 4), "tpu7x-8": ("v7x", 8), "TPU7x": ("v7x", 1),
    "ironwood": ("v7x", 1), "trillium": ("v6e", 1),
    "RTX4090": ("rtx4090", 1), "NVIDIA GeForce RTX 4090": ("rtx4090", 1), "3090": ("rtx3090", 1), "Tesla T4": ("t4", 1),
    "NVIDIA L4": ("l4", 1), "L40S": ("l40s", 1), "NVIDIA A10G": ("a10g", 1),
}  # fmt: skip
TINY = ModelConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
    width=128,
    mlp_width=512,
    rope=RopeConfig(),
)


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", NAMES)
def test_devices_are_found_by_the_names_that_people_give_them(text):
    named = find_device(text)
    assert (named.name, named.count) == NAMES[text]


def test_every_device_is_found_by_its_own_name():
    assert {name: find_device(name).name for name in DEVICES} == {name: name for name in DEVICES}


@pytest.mark.parametrize(
    "text", ["abacus", "", "H100-94GB", "v5e-0", "0xh100", "a100-8", "8x", "h100-16-16"]
)
def test_what_is_no_device_is_one_line(text):
    with pytest.raises(
        kvq.UserError, match=r"is not known.* Known: v4, .*memory=GIB plans for any other"
    ):
        find_device(text)


def test_what_a_name_leaves_open_is_said():
    assert "taken for the one with 40 GB" in find_device("A100").note
    assert find_device("A100-40GB").note == ""
    assert "counts cores" in find_device("v5p-8").note


def test_memory_is_what_programs_get_not_what_is_printed_on_the_box():
    reported = {
        "t4": 15.0,
        "l4": 22.5,
        "a10g": 22.5,
        "l40s": 44.5,
        "a100-40": 39.5,
        "a100-80": 79.3,
        "h100": 79.6,
    }
    reported |= {"rtx4090": 23.6, "v5e": 15.75, "v6e": 31.24, "v5p": 95.73, "v7x": 94.74}
    assert {name: DEVICES[name].memory for name in reported} == reported


def test_jax_takes_three_quarters_of_a_gpu_unless_it_is_told_otherwise(monkeypatch):
    assert (program_share("h100"), program_share("v5e"), program_share(None)) == (0.75, 1.0, 1.0)
    assert program_share("h100", 0.9) == 0.9
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert (program_share("h100"), program_share("v5e"), program_share("h100", 0.9)) == (
        0.5,
        1.0,
        0.9,
    )
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(kvq.UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION=most"):
        program_share("h100")


def test_what_does_not_fit_has_no_speed_but_limits_that_hold():
    """Llama-3.1-8B in bfloat16 beside 128K exact tokens is 31 GiB: too much for 75% of 24 GB, and
    for all of them."""
    exact, kivi = kvq.plan(
        "llama-3.1-8b", ["exact", "kivi:bits=2"], device="RTX 4090", context="128k"
    )
    assert (exact["fits"], kivi["fits"]) == (False, False)
    assert exact["tokens_per_second"] is exact["seconds_to_first_token"] is None
    assert exact["bytes_available_per_device"] == int(0.75 * 23.6 * GIB)
    assert exact["fits_with_memory_fraction"] is None
    assert kivi["fits_with_memory_fraction"] == 0.8
    more = kvq.plan(
        "llama-3.1-8b", "kivi:bits=2", device="RTX 4090", context="128k", memory_fraction=0.8
    )[0]
    assert more["fits"]
    assert more["tokens_per_second"] > 0
    limit = kivi["largest_context"]
    rows = {
        n: kvq.plan("llama-3.1-8b", "kivi:bits=2", device="rtx4090", context=n)[0]
        for n in (limit, limit + 1024)
    }
    assert [row["fits"] for row in rows.values()] == [True, False]
    assert kivi["largest_batch"] == 0


def test_weights_that_alone_do_not_fit_are_named():
    rows = kvq.plan("llama-3.1-70b", "exact", device="h100", context=4096)
    (row,) = rows
    assert row["reason"].endswith("; the weights alone take 131.42 GiB")
    assert row["largest_context"] == 0
    text = rows.text(80)
    assert "none fits" in text
    assert "tokens a second" not in text


def test_another_device_by_its_memory():
    (row,) = kvq.plan("llama-3.1-8b", "kivi:bits=2", memory=24)
    assert row["fits"]
    assert row["bytes_available_per_device"] == 24 * GIB
    assert "tokens_per_second" not in row
    for options in ({"memory": 0}, {"memory": float("nan")}, {"memory": 8, "memory_fraction": 1.5}):
        with pytest.raises(kvq.UserError, match="memory"):
            kvq.plan("demo", "exact", **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_coded_weights_are_the_bytes_of_what_load_makes(bits):
    params = init_params(jax.random.key(0), TINY, "bfloat16")
    matrices = {"q", "k", "v", "o", "gate", "up", "down"}
    layers = {
        name: code_weight(x, bits) if name in matrices else x
        for name, x in params["layers"].items()
    }
    assert sum(isinstance(x, CodedWeight) for x in layers.values()) == 7
    planned_bytes = sum(x.nbytes for x in jax.tree.leaves(params | {"layers": layers}))
    planned = plan_memory(TINY, "exact", 64, 1, weights=f"int{bits}")
    assert planned.weights == planned_bytes
    plain = plan_memory(TINY, "exact", 64, 1)
    assert planned.multiplied == plain.multiplied  # as many products
    assert plain.weights - planned.weights == plain.read - planned.read
    spread = plan_memory(TINY, "exact", 64, 1, MeshSize(model=2), weights=f"int{bits}")
    # Norms are on both, and scales where a group is shared out.
    assert planned_bytes / 2 <= spread.weights < 0.6 * planned_bytes


def test_coded_experts():
    """A step reads the coded experts that a token passes through."""
    config = config_of("qwen3-30b-a3b")
    plain, coded = (
        plan_memory(config, "exact", 1024, 1, weights=weights) for weights in (None, "int8")
    )
    assert coded.weights == pytest.approx(plain.weights / 2, rel=0.04)
    assert coded.multiplied == plain.multiplied
    assert coded.read == pytest.approx(plain.read / 2, rel=0.15)  # the head stays as it is


def test_a_slice_by_name_is_a_mesh():
    by_name, by_mesh = (
        kvq.plan("llama-3.1-70b", "kivi:bits=2", batch=8, context="128k", device=device, mesh=mesh)
        for device, mesh in (("v5e-16", ""), ("v5e", "model=16"))
    )
    assert list(by_name) == list(by_mesh)
    assert "16 x v5e (mesh model=16)" in " ".join(str(by_name).split())
    # Two devices share the tokens of a KV head; both hold its window.
    assert 16 * by_name[0]["bytes_cache_per_device"] == pytest.approx(by_name[0]["bytes"], rel=0.02)
    # 12 devices cannot share out 14 heads and 2 KV heads: two do, and the others share the
    # sequence.
    assert "model=2" in str(kvq.plan("qwen2.5-0.5b", "exact", context=4096, device="12xL4"))
    with pytest.raises(kvq.UserError, match="the mesh has 8 devices and the device's name says 16"):
        kvq.plan("llama-3.1-70b", "exact", device="v5e-16", mesh="model=8")


def test_the_default_context_is_the_model_s_where_it_sees_less():
    rows = {name: str(kvq.plan(name, "exact")) for name in ("demo", "llama-2-7b", "llama-3.1-8b")}
    tokens = {"demo": 2048, "llama-2-7b": 4096, "llama-3.1-8b": 131072}
    assert all(
        f"1 row of {tokens[name]} tokens" in text.replace("\n", " ") for name, text in rows.items()
    )
    assert not any("beyond" in text for text in rows.values())


@pytest.mark.parametrize(
    ("text", "tokens"), [("128k", 131072), ("1M", 2**20), (4096, 4096), ("4096", 4096)]
)
def test_contexts_as_people_write_them(text, tokens):
    (row,) = kvq.plan("recall", "exact", context=text)
    assert row["bytes_exact"] == tokens * 2 * 2 * 128 * 2


@pytest.mark.parametrize("text", ["many", "1.5k", "-4", "", "0", "99m", "4 k k"])
def test_contexts_that_are_none(call, text):
    with pytest.raises(kvq.UserError, match="tokens"):
        kvq.plan("recall", "exact", context=text)
    code, out, err = call("plan", "-m", "recall", f"--context={text}")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "--context" in err


def test_the_shell_prints_the_rows_of_python(call):
    options = {
        "context": "32k",
        "batch": 2,
        "device": "A100-80GB",
        "weights": "int8",
        "memory_fraction": 0.9,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    code, out, err = call(
        "plan", "-m", "qwen3-8b", "-c", "exact", "-c", "kivi:bits=4", *words, "--json"
    )
    assert code == 0, err
    rows = kvq.plan("qwen3-8b", ["exact", "kivi:bits=4"], **options)
    assert json.loads(out) == json.loads(json.dumps(rows))
    assert (
        call("plan", "-m", "qwen3-8b", "-c", "exact", "-c", "kivi:bits=4", *words)[1]
        == rows.text(80) + "\n"
    )


def test_a_plan_of_a_loaded_model_and_of_a_config():
    model = kvq.load("recall", weights="int4")
    (row,) = kvq.plan(model, "kivi:bits=2", context=1024)
    assert row["bytes_weights_per_device"] == sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert kvq.plan(model.config, "kivi:bits=2", context=1024, weights="int4", dtype="float32") == [
        row
    ]


@functools.cache
def of_an_h100():
    return kvq.plan("llama-3.1-8b", device="h100")


def test_a_plan_is_rows_for_data_frames_and_a_table_in_print_and_notebooks():
    rows = of_an_h100()
    assert [row["cache"] for row in rows] == [
        "exact",
        "kivi:bits=4",
        "kivi:bits=2",
        "kvquant:bits=3",
    ]
    assert len({tuple(row) for row in rows}) == 1  # every row has the same columns
    frame = pytest.importorskip("pandas").DataFrame(rows)
    assert frame.shape == (4, len(rows[0]))
    assert frame["bits_stored"].tolist() == [row["bits_stored"] for row in rows]
    html = rows._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 3
    assert "<th>kivi:bits=2</th>" in html
    assert str(rows) == repr(rows)


@pytest.mark.parametrize("device", with_nightly(["h100", "v5e-16", "t4", "RTX 4090"], ["h100"]))
@pytest.mark.parametrize("width", with_nightly([60, 80, 120], [120]))
def test_a_printed_plan_fits_the_terminal_and_says_what_is_of_one_device(device, width):
    if device == "h100":
        rows = of_an_h100()
    else:
        rows = kvq.plan("llama-3.1-8b", device=device, context="64k")
    text = rows.text(width)
    assert max(map(len, text.splitlines())) <= width
    plain = " ".join(text.split())
    several = device == "v5e-16"
    for words in (
        ("On each device", "The cache of all 16 devices")
        if several
        else ("On the device", "The cache")
    ):
        assert words in plain
    assert ("JAX takes 75% of a GPU" in plain) != several
    assert "estimated" in plain
    assert ("Nothing here is measured." in plain) == (device not in ("t4", "h100"))
    assert ("The last line was measured on such a chip" in plain) == (device == "h100")


def test_what_attention_took_is_a_figure_of_the_chip_that_it_was_measured_on():
    text = ["kivi:bits=2,group=128", "kvquant:bits=3", "kivi:bits=3"]
    times = [row["attention_over_16_bits"] for row in kvq.plan("llama-3.1-8b", text, device="h100")]
    assert times[0] < 1 < times[1]
    assert times[2] is None
    assert [
        row["attention_over_16_bits"] for row in kvq.plan("llama-3.1-8b", text, device="a100-80")
    ] == [None] * 3
