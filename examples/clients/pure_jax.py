"""A Llama of pure functions in the manner of jax-llm-examples: weights and cache are dataclasses, the mesh has Explicit
axes, rows are aligned on the right. `python examples/clients/pure_jax.py`.

The lines that use kvqjax end with `# kvqjax`.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import parts
from jax.sharding import NamedSharding, PartitionSpec
from parts import CAPACITY, HEADS, KV_HEADS, LAYERS, PAD, SIZE, SIZES, VOCAB, WIDTH

import kvqjax as kvq  # kvqjax

SHAPE = kvq.KVShape(**SIZES, rope=kvq.Rope())  # kvqjax
ACTIVATIONS, BY_HEADS = PartitionSpec("fsdp"), PartitionSpec("fsdp", None, "tp")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "k", "v", "o"], meta_fields=[])
@dataclass
class Layer:
    q: jax.Array  # [E, H, D]
    k: jax.Array  # [E, K, D]
    v: jax.Array
    o: jax.Array  # [H, D, E]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embed", "layers", "head"], meta_fields=[])
@dataclass
class Weights:
    embed: jax.Array
    layers: list[Layer]
    head: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "valid", "cursor"], meta_fields=[])
@dataclass
class KVCache:
    """Make the model's own cache: keys and values of all places, and which places hold a token."""

    k: list[jax.Array]
    v: list[jax.Array]
    valid: jax.Array  # [B, S]
    cursor: jax.Array


def make(mesh=None) -> Weights:
    """Random weights, the heads split over "tp"."""
    mesh = mesh or meshes()[0]
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    layers = []
    for i in range(LAYERS):
        inner = [parts.random_weight(4 * i + j, WIDTH, n, SIZE) for j, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
        output = put(parts.random_weight(4 * i + 3, HEADS, SIZE, WIDTH), "tp")
        layers.append(Layer(*(put(x, None, "tp") for x in inner), output))
    embed, head = parts.random_weight(90, VOCAB, WIDTH), parts.random_weight(91, WIDTH, VOCAB)
    return Weights(put(embed), layers, put(head))


def meshes() -> list:
    """Two meshes: of four devices and of eight, or of the one there is."""
    sizes = [(2, 2), (4, 2)] if len(jax.devices()) >= 8 else [(1, 1)]
    return [jax.make_mesh(size, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2) for size in sizes]


def attend(q, k, v, keys, values, valid, known, cursor):
    """Rotate, write and attend on every device's rows and heads."""

    def part(q, k, v, keys, values, valid, known, cursor):
        positions = known.sum(1, keepdims=True) + valid.cumsum(1) - 1
        places = cursor + jnp.arange(q.shape[1])
        keys, values = keys.at[:, places].set(parts.rotary(k, positions)), values.at[:, places].set(v)
        seen = known.at[:, places].set(valid)[:, None] & (jnp.arange(CAPACITY)[None, None] <= places[None, :, None])
        return parts.attention(parts.rotary(q, positions), keys, values, seen), keys, values

    rows, heads = ACTIVATIONS, BY_HEADS
    specs = (heads,) * 5 + (rows, rows, PartitionSpec())
    return jax.shard_map(part, in_specs=specs, out_specs=(heads,) * 3)(q, k, v, keys, values, valid, known, cursor)


@jax.jit(donate_argnames="cache")
def step(weights: Weights, tokens, cache, constants):
    """The likeliest token after each row's last one, and the cache."""
    x, valid = weights.embed.at[tokens].get(out_sharding=ACTIVATIONS), tokens != PAD
    compressed = not isinstance(cache, KVCache)
    if compressed:  # kvqjax
        views = kvq.layers(cache, valid=valid, constants=constants)  # kvqjax
    for i, layer in enumerate(weights.layers):
        y = parts.norm(x)
        q, k, v = (jnp.einsum("bte,ehd->bthd", y, w, out_sharding=BY_HEADS) for w in (layer.q, layer.k, layer.v))
        if compressed:  # kvqjax
            out, views[i] = views[i].attend(q, k, v)  # kvqjax
        else:
            out, cache.k[i], cache.v[i] = attend(q, k, v, cache.k[i], cache.v[i], valid, cache.valid, cache.cursor)
        x = x + jnp.einsum("bthd,hde->bte", out, layer.o, out_sharding=ACTIVATIONS)
    if compressed:  # kvqjax
        cache = kvq.commit_layers(views)  # kvqjax
    else:
        cache.valid = jax.lax.dynamic_update_slice(cache.valid, valid, (0, cache.cursor))
        cache.cursor = cache.cursor + tokens.shape[1]
    return parts.likeliest(parts.norm(x[:, -1]) @ weights.head), cache


def decode(weights: Weights, rows, count: int, cache, constants=None):
    place = NamedSharding(weights.embed.sharding.mesh, ACTIVATIONS)
    tokens, answers = jax.device_put(parts.padded(rows, left=True), place), []
    for _ in range(count):
        new, cache = step(weights, tokens, cache, constants)
        answers.append(new)
        tokens = new[:, None]
    return jnp.stack(answers, 1).tolist(), cache


def plain(weights: Weights, rows, count: int) -> list[list[int]]:
    """Greedy tokens over the model's own cache."""
    mesh, size = weights.embed.sharding.mesh, (len(rows), CAPACITY, KV_HEADS, SIZE)
    with jax.set_mesh(mesh):
        k, v = ([jnp.zeros(size, out_sharding=BY_HEADS) for _ in range(LAYERS)] for _ in "kv")
        cache = KVCache(k, v, jnp.zeros((len(rows), CAPACITY), bool, out_sharding=ACTIVATIONS), jnp.int32(0))
        return decode(weights, rows, count, cache)[0]


def cached(weights: Weights, rows, count: int, spec: str, constants=None):
    """Greedy tokens over a compressed cache, and that cache."""
    mesh = weights.embed.sharding.mesh
    with jax.set_mesh(mesh):
        cache = kvq.init_cache(SHAPE, spec, len(rows), CAPACITY, mesh=mesh, batch_axis="fsdp", head_axis="tp")  # kvqjax
        return decode(weights, rows, count, cache, constants)


if __name__ == "__main__":
    print(plain(make(), parts.prompts(), 8), cached(make(), parts.prompts(), 8, "exact")[0], sep="\n")
