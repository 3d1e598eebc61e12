"""A Llama in flax.nnx for tunix's sampler: the model makes its cache, and each call takes it and returns it, with a
mask [B, T, cache_size] of the places that each token sees.
`python examples/clients/tunix_sampler.py`.

`sample` below does what tunix's `Sampler` does with a cache, beams included, so that the example runs without tunix;
the real one takes this model as it is. The lines that use kvqjax end with `# kvqjax`.
"""

import functools

import jax
import jax.numpy as jnp
import parts
from flax import nnx
from parts import CAPACITY, HEADS, KV_HEADS, LAYERS, PAD, SIZE, SIZES, VOCAB, WIDTH

import kvqjax as kvq  # kvqjax
from kvqjax.adapters import tunix  # kvqjax

SHAPE = kvq.KVShape(**SIZES, rope=kvq.Rope())  # kvqjax
LARGE = nnx.initializers.normal(2 / WIDTH**0.5)  # so that attention looks at few tokens, which decide on the next one


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v, self.o = (
            nnx.Linear(inputs, outputs, use_bias=False, kernel_init=LARGE, rngs=rngs)
            for inputs, outputs in zip([WIDTH] * 3 + [HEADS * SIZE], [64, 32, 32, WIDTH], strict=True)
        )

    def __call__(self, x, positions, cache, attention_mask):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, SIZE) for p in (self.q, self.k, self.v))
        if not isinstance(cache, dict):  # kvqjax
            out, cache = cache.attend(q, k, v)  # kvqjax
        else:
            q, k, end = parts.rotary(q, positions), parts.rotary(k, positions), cache["end_index"][0]
            k, v = (jax.lax.dynamic_update_slice(cache[n], x, (0, end, 0, 0)) for n, x in {"k": k, "v": v}.items())
            out = parts.attention(q, k, v, attention_mask)
            cache = {"k": k, "v": v, "end_index": cache["end_index"] + x.shape[1]}
        return cache, self.o(out.reshape(*x.shape[:2], -1))


class Llama(nnx.Module):
    """`spec` says how the cache is stored; None: as arrays, the model's own."""

    def __init__(self, rngs: nnx.Rngs, spec: str | None = None, constants=None):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)
        self.spec, self.tables = spec, nnx.Variable(constants)
        self.num_embed = VOCAB

    def init_cache(self, batch_size, cache_size, dtype):
        if self.spec is not None:  # kvqjax
            return tunix.init_cache(SHAPE, self.spec, batch_size, cache_size, dtype)  # kvqjax
        blank = lambda: jnp.zeros((batch_size, cache_size, KV_HEADS, SIZE), dtype)  # noqa: E731
        layer = lambda: {"k": blank(), "v": blank(), "end_index": jnp.zeros(batch_size, int)}  # noqa: E731
        return {f"layer_{i}": layer() for i in range(LAYERS)}

    def __call__(self, tokens, positions, cache, attention_mask):
        if self.spec is not None:  # kvqjax
            cache = tunix.layers(cache, attention_mask, constants=self.tables.get_value())  # kvqjax
        h, new = self.embed(tokens), {}
        for name, layer in zip(cache, self.layers, strict=True):
            new[name], out = layer(parts.norm(h), positions, cache[name], attention_mask)
            h = h + out
        if self.spec is not None:  # kvqjax
            new = tunix.commit_layers(new)  # kvqjax
        return self.head(parts.norm(h)).at[..., PAD].set(-jnp.inf), new


@functools.partial(jax.jit, static_argnames=("graph", "count", "beams"))
def _sample(graph, state, tokens, cache, *, count: int, beams: int):
    model, valid = nnx.merge(graph, state), tokens != PAD
    batch, length = tokens.shape
    causal = jnp.arange(CAPACITY)[None] <= jnp.arange(length)[:, None]
    seen = jnp.pad(valid, ((0, 0), (0, CAPACITY - length)), constant_values=True)
    logits, cache = model(tokens, jnp.maximum(valid.cumsum(1) - 1, 0), cache, seen[:, None] & causal[None])
    best, new = jax.lax.top_k(jax.nn.log_softmax(logits[:, -1]), beams)
    cache, seen, lengths = (
        jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), tree) for tree in (cache, seen, valid.sum(1))
    )
    answers = jnp.zeros((batch * beams, count), int).at[:, 0].set(new.reshape(-1))

    def step(n, carry):
        answers, scores, cache = carry
        mask = seen & (jnp.arange(CAPACITY)[None] < length + n)
        logits, cache = model(answers[:, n - 1][:, None], (lengths + n - 1)[:, None], cache, mask[:, None])
        total = (scores.reshape(-1, 1) + jax.nn.log_softmax(logits[:, -1])).reshape(batch, beams * VOCAB)
        scores, pick = jax.lax.top_k(total, beams)
        rows = (pick // VOCAB + beams * jnp.arange(batch)[:, None]).reshape(-1)
        answers, cache = jax.tree.map(lambda x: x[rows], (answers, cache))
        return answers.at[:, n].set((pick % VOCAB).reshape(-1)), scores, cache

    answers, _, cache = jax.lax.fori_loop(1, count, step, (answers, best, cache))
    return answers.reshape(batch, beams, count)[:, 0], cache


def sample(model: Llama, rows, count: int, beams: int = 1):
    """The best of `beams` continuations of each prompt, and the cache; with one beam, greedy tokens."""
    graph, state = nnx.split(model)
    tokens, cache = jnp.asarray(parts.padded(rows, left=True)), model.init_cache(len(rows), CAPACITY, jnp.float32)
    answers, cache = _sample(graph, state, tokens, cache, count=count, beams=beams)
    return answers.tolist(), cache


def make(spec: str | None = None, constants=None) -> Llama:
    return Llama(nnx.Rngs(0), spec, constants)


def plain(_, rows, count: int, beams: int = 1) -> list[list[int]]:
    """Tokens over the model's own cache."""
    return sample(make(), rows, count, beams)[0]


def cached(_, rows, count: int, spec: str, constants=None, beams: int = 1):
    """Tokens over a compressed cache, and that cache."""
    answers, cache = sample(make(spec, constants), rows, count, beams)
    return answers, cache.cache


if __name__ == "__main__":
    print(plain(None, parts.prompts(), 8), cached(None, parts.prompts(), 8, "exact")[0], sep="\n")
