"""A Llama in flax.nnx in the manner of bonsai: prompts padded on the left, a cache of Variables that each layer writes
to at a common cursor. `python examples/clients/nnx_model.py`.

The lines that use kvqjax end with `# kvqjax`.
"""

import jax.numpy as jnp
import parts
from flax import nnx
from parts import CAPACITY, HEADS, KV_HEADS, LAYERS, PAD, SIZE, SIZES, VOCAB, WIDTH

import kvqjax as kvq  # kvqjax
from kvqjax.flax_bridge import CacheModule  # kvqjax

SHAPE = kvq.KVShape(**SIZES, rope=kvq.Rope())  # kvqjax
LARGE = nnx.initializers.normal(2 / WIDTH**0.5)  # so that attention looks at few tokens, which decide on the next one


class LayerCache(nnx.Module):
    """The model's own cache: a layer's keys and values of all places, and which places hold a
    token."""

    def __init__(self, batch: int):
        self.k, self.v = (nnx.Cache(jnp.zeros((batch, CAPACITY, KV_HEADS, SIZE))) for _ in "kv")
        self.valid, self.cursor = nnx.Cache(jnp.zeros((batch, CAPACITY), bool)), nnx.Cache(jnp.int32(0))


class Attention(nnx.Module):
    def __init__(self, layer: int, rngs: nnx.Rngs):
        self.layer = layer
        self.q, self.k, self.v, self.o = (
            nnx.Linear(inputs, outputs, use_bias=False, kernel_init=LARGE, rngs=rngs)
            for inputs, outputs in zip([WIDTH] * 3 + [HEADS * SIZE], [64, 32, 32, WIDTH], strict=True)
        )

    def __call__(self, x, cache, valid):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, SIZE) for p in (self.q, self.k, self.v))
        if isinstance(cache, CacheModule):  # kvqjax
            out = cache[self.layer].attend(q, k, v)  # kvqjax
        else:
            out = self.attend(q, k, v, cache[self.layer], valid)
        return self.o(out.reshape(*x.shape[:2], -1))

    def attend(self, q, k, v, cache: LayerCache, valid):
        start = cache.cursor[...]
        positions = cache.valid[...].sum(1, keepdims=True) + valid.cumsum(1) - 1
        q, k = parts.rotary(q, positions), parts.rotary(k, positions)
        places = start + jnp.arange(q.shape[1])
        cache.k[...] = cache.k[...].at[:, places].set(k)
        cache.v[...] = cache.v[...].at[:, places].set(v)
        cache.valid[...] = cache.valid[...].at[:, places].set(valid)
        cache.cursor[...] = start + q.shape[1]
        mask = cache.valid[...][:, None] & (jnp.arange(CAPACITY)[None, None] <= places[None, :, None])
        return parts.attention(q, cache.k[...], cache.v[...], mask)


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Attention(layer, rngs) for layer in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens, cache, valid):
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(parts.norm(h), cache, valid)
        return self.head(parts.norm(h[:, -1]))


@nnx.jit(donate_argnames="cache")
def step(model: Llama, tokens, cache):
    """The likeliest token after each row's last one."""
    valid = tokens != PAD
    if isinstance(cache, CacheModule):  # kvqjax
        cache.start(valid=valid)  # kvqjax
    return parts.likeliest(model(tokens, cache, valid))


def decode(model: Llama, rows, count: int, cache) -> list[list[int]]:
    tokens, answers = jnp.asarray(parts.padded(rows, left=True)), []
    for _ in range(count):
        answers.append(step(model, tokens, cache))
        tokens = answers[-1][:, None]
    return jnp.stack(answers, 1).tolist()


def make() -> Llama:
    return Llama(nnx.Rngs(0))


def plain(model: Llama, rows, count: int) -> list[list[int]]:
    """Greedy tokens over the model's own cache."""
    return decode(model, rows, count, nnx.List([LayerCache(len(rows)) for _ in range(LAYERS)]))


def cached(model: Llama, rows, count: int, spec: str, constants=None, **mesh):
    """Greedy tokens over a compressed cache, and that cache."""
    cache = CacheModule(kvq.init_cache(SHAPE, spec, len(rows), CAPACITY, **mesh), constants=constants)  # kvqjax
    return decode(model, rows, count, cache), cache.kv.get_value()


if __name__ == "__main__":
    print(plain(make(), parts.prompts(), 8), cached(make(), parts.prompts(), 8, "exact")[0], sep="\n")
