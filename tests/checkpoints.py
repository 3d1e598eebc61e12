"""A small checkpoint with everything random, and ways to change it on disk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import init_params

CONFIG = ModelConfig(
    vocab_size=32,
    width=16,
    mlp_width=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    qkv_bias=True,
    architecture="Qwen2ForCausalLM",
    eos_ids=(2,),
)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def random_params(config=CONFIG, dtype=jnp.float32):
    """Every leaf random, biases and norms too: a swapped pair cannot pass."""
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(np.float32).astype(dtype)),
        shapes,
    )


def edit(folder, change):
    """Rewrite model.safetensors after `change` has had its dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def split(folder, count=3):
    """The same checkpoint as shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % count:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
