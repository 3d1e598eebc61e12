"""safetensors checkpoints: round trip, sharding over devices, and one clear line for everything
that is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from checkpoints import CONFIG, Q_PROJ, assert_same, edit, random_params, split
from hf_folders import save_params
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from kvqjax import Model, UserError, load
from kvqjax.model import checkpoint, weight_trees, weights
from kvqjax.model import loading as model_module
from kvqjax.model.checkpoint import fingerprint, open_checkpoint
from kvqjax.model.config import ExpertConfig, ModelConfig


@pytest.fixture
def folder(tmp_path):
    save_params(tmp_path, random_params(), CONFIG)
    return tmp_path


def test_linear_layers_are_stored_out_in(folder):
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.gate_proj.weight"].shape == (24, 16)
    np.testing.assert_array_equal(stored[Q_PROJ].T, random_params()["layers"]["q"][1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_round_trip_in_each_dtype(dtype, tmp_path):
    params = random_params(dtype=dtype)
    save_params(tmp_path, params, CONFIG)
    assert_same(weights.load_params(tmp_path, CONFIG, dtype), params)
    wide = weights.load_params(tmp_path, CONFIG, jnp.float32)
    assert_same(wide, jax.tree.map(lambda a: a.astype(jnp.float32), params))


def test_sharded_files_give_the_same_params_and_fingerprint(folder):
    before = fingerprint(folder, CONFIG)
    split(folder)
    assert_same(weights.load_params(folder, CONFIG), random_params())
    assert fingerprint(folder, CONFIG) == before


def test_each_device_holds_and_reads_only_its_slice(folder, monkeypatch):
    mesh = jax.make_mesh((4,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    columns, rows = PartitionSpec(None, None, "model"), PartitionSpec(None, "model", None)
    specs = {f"layers/{n}": columns for n in ("q", "k", "v", "gate", "up")}
    specs |= {
        "layers/o": rows,
        "layers/down": rows,
        "embed": PartitionSpec("model"),
        "layers/mlp_norm": PartitionSpec(),
    }
    read_sizes = {}
    genuine = checkpoint.read_slice

    def spy(tensor, index):
        piece = genuine(tensor, index)
        read_sizes.setdefault(tensor.name, []).append(piece.size)
        return piece

    monkeypatch.setattr(checkpoint, "read_slice", spy)
    model = load(
        folder,
        dtype="f32",
        sharding=lambda name: NamedSharding(mesh, specs.get(name, PartitionSpec())),
    )
    assert_same(model.params, random_params())
    for name in ("q", "o", "gate", "down"):
        shards = model.params["layers"][name].addressable_shards
        assert len(shards) == 4
        assert all(shard.data.size * 4 == model.params["layers"][name].size for shard in shards)
    assert read_sizes[Q_PROJ] == [16 * 32 // 4] * 4
    assert read_sizes["model.embed_tokens.weight"] == [32 * 16 // 4] * 4
    assert len(model.params["norm"].addressable_shards) == 4


@pytest.mark.parametrize("layers", with_nightly(["scan", "switch", "unroll"], ["switch"]))
def test_a_load_reads_every_byte_once_and_holds_one_layer_besides(layers, tmp_path, monkeypatch):
    """Experts are the hard case: one stack of them is a third of all weights."""
    config = ModelConfig(
        vocab_size=64,
        width=64,
        mlp_width=64,
        num_layers=12,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        qk_norm=True,
        architecture="Qwen3MoeForCausalLM",
        experts=ExpertConfig(count=4, per_token=2, width=64, dense_layers=(3,)),
    )
    save_params(tmp_path, random_params(config), config)
    split(tmp_path)
    read, held, genuine = {}, [], checkpoint.read_slice

    def spy(tensor, index):
        piece = genuine(tensor, index)
        read[tensor.name] = read.get(tensor.name, 0) + piece.nbytes
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        return piece

    monkeypatch.setattr(checkpoint, "read_slice", spy)
    monkeypatch.setattr(weights, "PIECE", 1)
    before = sum(x.nbytes for x in jax.live_arrays())
    params = weights.load_params(tmp_path, config, layers=layers)
    assert read == {name: tensor.nbytes for name, tensor in open_checkpoint(tmp_path).items()}
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    one_layer = 4 * 64 * 64 * 4
    assert max(held) - before <= total + 2 * one_layer
    assert_same(weight_trees.unrolled(params), weight_trees.unrolled(random_params(config)))


def test_tied_checkpoint_may_repeat_the_embedding_but_not_contradict_it(folder):
    tied = dataclasses.replace(CONFIG, tied_embeddings=True)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lambda t: t.update({"lm_head.weight": embed}))
    assert "head" not in weights.load_params(folder, tied)
    edit(folder, lambda t: t.update({"lm_head.weight": embed + 1}))
    with pytest.raises(UserError, match=r"tie_word_embeddings = true, but lm_head.weight differs"):
        weights.load_params(folder, tied)


def test_progress_shows_only_on_slow_loads_at_a_terminal(folder, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for "this is a terminal"
    monkeypatch.setenv("TERM", "xterm")  # and for one that can move its cursor
    load(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "_PROGRESS_AFTER_SECONDS", -1.0)
    load(folder)
    assert "loading weights" in capsys.readouterr().err
    monkeypatch.delenv("FORCE_COLOR")
    load(folder)
    assert capsys.readouterr().err == ""


def test_fingerprint_names_what_differs(folder):
    def parts(config=CONFIG):
        return [part.split("=")[1] for part in fingerprint(folder, config).split(",")]

    first = parts()
    assert parts(dataclasses.replace(CONFIG, eos_ids=(7,), bos_id=3)) == first
    assert [
        a == b
        for a, b in zip(first, parts(dataclasses.replace(CONFIG, norm_eps=1e-6)), strict=True)
    ] == [0, 1, 1]
    edit(folder, lambda t: t[Q_PROJ].__setitem__((0, 0), 9.0))
    assert [a == b for a, b in zip(first, parts(), strict=True)] == [1, 1, 0]


@dataclasses.dataclass
class FakeArtifact:
    constants: dict
    fingerprint: str
    method: str = "fake"


def test_artifact_of_another_model_is_refused_by_field(folder):
    model = load(folder)
    artifact = FakeArtifact({"codebook": jnp.ones(3)}, model.fingerprint)
    fitted = model.with_artifact(artifact)
    assert_same(fitted.constants, artifact.constants)
    assert len(jax.tree.leaves(fitted)) == len(jax.tree.leaves(model)) + 1
    artifact.fingerprint = model.fingerprint.replace("samples=", "samples=0")
    with pytest.raises(UserError, match=r"fingerprint samples is 0.*, the model's is"):
        model.with_artifact(artifact)
    with pytest.raises(UserError, match="fingerprint config is none"):
        model.with_artifact(FakeArtifact({}, ""))


def test_model_passes_through_jit_with_a_static_config(folder):
    model = load(folder)
    doubled = jax.jit(lambda m: jax.tree.map(lambda a: a + a, m))(model)
    assert isinstance(doubled, Model)
    assert doubled.config == CONFIG
    assert doubled.fingerprint == model.fingerprint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("./absent", "no such folder"),
        ("absent", "no such folder, nor a hub id .owner/name. nor a bundled model .demo, recall."),
        (__file__, "wanted the folder of a model"),
    ],
)
def test_unknown_names(name, text):
    with pytest.raises(UserError, match=text):
        load(name)


def test_default_dtype_follows_the_backend(folder, monkeypatch):
    assert load(folder).params["embed"].dtype == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert {leaf.dtype for leaf in jax.tree.leaves(load(folder).params)} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_unknown_dtype(folder):
    known = "bf16 or bfloat16, f16 or float16, f32 or float32"
    with pytest.raises(UserError, match=f"dtype 'int8' is unknown; known: {known}"):
        load(folder, dtype="int8")


def test_bundled_model_that_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(model_module, "_ASSETS", tmp_path)
    with pytest.raises(UserError, match="'demo' is not in this installation; it has: none"):
        load("demo")
    save_params(tmp_path / "recall", random_params(), CONFIG)
    assert load("recall").config == CONFIG


def test_hub_id_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(name, **options):
        raise OSError(f"no route to {name}\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        UserError,
        match=r"'owner/name' is no folder here .* hub: no route to owner/name second line$",
    ):
        load("owner/name")


def test_tokenizer_is_outside_the_pytree(folder):
    model = load(folder)
    with pytest.raises(UserError, match="no tokenizer"):
        _ = model.tokenizer
    with pytest.raises(UserError, match="no folder"):
        _ = Model(model.params, config=CONFIG).tokenizer
