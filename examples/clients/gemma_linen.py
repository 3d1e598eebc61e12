"""A Gemma in flax.linen in the manner of its own library: capped scores, every other layer with a sliding window, norms
before and after attention, prompts padded on the right. `python examples/clients/gemma_linen.py`.

The model passes a dictionary of layers' arrays through every call, and a mask of the places that
each token sees. The lines that use kvqjax end with `# kvqjax`.
"""

import functools

import jax
import jax.numpy as jnp
import parts
from flax import linen as nn
from parts import CAPACITY, HEADS, KV_HEADS, LAYERS, PAD, SIZE, SIZES, VOCAB, WIDTH

import kvqjax as kvq  # kvqjax
from kvqjax.flax_bridge import ForwardPass, linen_cache  # kvqjax

SOFTCAP, WINDOWS = 20.0, (None, 24)  # tokens that layers see before each; None: all
SHAPE = kvq.KVShape(**SIZES, rope=kvq.Rope(), sliding_window=WINDOWS)  # kvqjax
LARGE = nn.initializers.normal(2 / WIDTH**0.5)  # so that attention looks at few tokens, which decide on the next one


class Attention(nn.Module):
    layer: int

    @nn.compact
    def __call__(self, x, positions, cache, mask, kv):
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        q, k, v = (nn.DenseGeneral((n, SIZE), use_bias=False, kernel_init=LARGE, name=p)(x) for p, n in heads.items())
        if kv is not None:  # kvqjax
            out = kv[self.layer].attend(q, k, v, softcap=SOFTCAP)  # kvqjax
        else:
            q, k, end = parts.rotary(q, positions), parts.rotary(k, positions), cache["end_index"]
            cache = {
                "k": jax.lax.dynamic_update_slice(cache["k"], k, (0, end, 0, 0)),
                "v": jax.lax.dynamic_update_slice(cache["v"], v, (0, end, 0, 0)),
                "positions": jax.lax.dynamic_update_slice(cache["positions"], positions, (0, end)),
                "end_index": end + x.shape[1],
            }
            if WINDOWS[self.layer] is not None:
                mask = mask & (cache["positions"][:, None] > positions[..., None] - WINDOWS[self.layer])
            out = parts.attention(q, cache["k"], cache["v"], mask, SOFTCAP)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, kernel_init=LARGE, name="o")(out), cache


class Gemma(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, valid, cache=None, mask=None, constants=None):
        kv = None if cache else ForwardPass(linen_cache(self), valid, constants=constants, store=True)  # kvqjax
        embed, layers = nn.Embed(VOCAB, WIDTH, name="embed"), {}
        h = embed(tokens) * WIDTH**0.5
        for i in range(LAYERS):
            name = f"layer_{i}"
            attention = Attention(i, name=name)
            out, layers[name] = attention(parts.norm(h), positions, cache and cache[name], mask, kv)
            h = h + parts.norm(out)
        last = jnp.take_along_axis(h, jnp.maximum(valid.sum(1) - 1, 0)[:, None, None], 1)[:, 0]
        return nn.Dense(VOCAB, use_bias=False, kernel_init=LARGE, name="head")(parts.norm(last)), layers


def own_cache(batch: int) -> dict:
    """Make the model's own cache: arrays of all places of each layer."""
    size = batch, CAPACITY, KV_HEADS, SIZE
    layer = lambda: {"k": jnp.zeros(size), "v": jnp.zeros(size), "positions": jnp.zeros(size[:2], int), "end_index": 0}  # noqa: E731
    return {f"layer_{i}": layer() for i in range(LAYERS)}


@functools.partial(jax.jit, donate_argnames="cache")
def step(params, tokens, positions, valid, seen, cache, constants=None):
    """The likeliest token after each row's last valid one, and the cache."""
    given = tokens, positions, valid
    if "kv" in cache:  # kvqjax
        out, new = Gemma().apply(
            {"params": params, "cache": cache}, *given, constants=constants, mutable=["cache"]
        )  # kvqjax
        return parts.likeliest(out[0]), new["cache"]  # kvqjax
    end = cache["layer_0"]["end_index"] + jnp.arange(tokens.shape[1])
    mask = seen[:, None] & (jnp.arange(CAPACITY)[None, None] <= end[None, :, None])
    logits, cache = Gemma().apply({"params": params}, *given, cache, mask)
    return parts.likeliest(logits), cache


def decode(params, rows, count: int, cache, constants=None):
    tokens = jnp.asarray(parts.padded(rows, left=False))
    valid, answers = tokens != PAD, []
    seen = jnp.pad(valid, ((0, 0), (0, CAPACITY - valid.shape[1])), constant_values=True)
    positions = jnp.arange(tokens.shape[1])[None] + jnp.zeros_like(tokens)
    for _ in range(count):
        new, cache = step(params, tokens, positions, valid, seen, cache, constants)
        answers.append(new)
        tokens, positions = new[:, None], jnp.asarray([[len(row) + len(answers) - 1] for row in rows])
        valid = jnp.ones(tokens.shape, bool)
    return jnp.stack(answers, 1).tolist(), cache


def make():
    tokens, mask = jnp.zeros((1, 1), int), jnp.ones((1, 1, CAPACITY), bool)
    return Gemma().init(jax.random.key(0), tokens, tokens, tokens == 0, own_cache(1), mask)["params"]


def plain(params, rows, count: int) -> list[list[int]]:
    """Greedy tokens over the model's own cache."""
    return decode(params, rows, count, own_cache(len(rows)))[0]


def cached(params, rows, count: int, spec: str, constants=None, **mesh):
    """Greedy tokens over a compressed cache, and that cache."""
    cache = {"kv": kvq.init_cache(SHAPE, spec, len(rows), CAPACITY, **mesh)}  # kvqjax
    answers, cache = decode(params, rows, count, cache, constants)
    return answers, cache["kv"]


if __name__ == "__main__":
    print(plain(make(), parts.prompts(), 8), cached(make(), parts.prompts(), 8, "exact")[0], sep="\n")
