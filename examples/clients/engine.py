"""A model behind JetStream's engine interface: prompts are prefilled by one engine, sent to the
devices of another, inserted into its running batch and decoded there.
`python examples/clients/engine.py`.

The model is that of `pure_jax.py` without a mesh of its own: a function of weights, tokens and a
cache. The lines that use kvqjax end with `# kvqjax`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import parts
from parts import CAPACITY, HEADS, KV_HEADS, LAYERS, PAD, SIZE, SIZES, VOCAB, WIDTH

import kvqjax as kvq  # kvqjax
from kvqjax.adapters.jetstream import CachedEngine  # kvqjax

SHAPE = kvq.KVShape(**SIZES, rope=kvq.Rope())  # kvqjax
LONGEST = 144  # tokens of a prompt


def make() -> dict:
    """Random weights."""
    sizes = {
        "q": (WIDTH, HEADS, SIZE),
        "k": (WIDTH, KV_HEADS, SIZE),
        "v": (WIDTH, KV_HEADS, SIZE),
        "o": (64, WIDTH),
    }
    layers = [
        {n: parts.random_weight(4 * i + j, *s) for j, (n, s) in enumerate(sizes.items())}
        for i in range(LAYERS)
    ]
    return {
        "embed": parts.random_weight(90, VOCAB, WIDTH),
        "head": parts.random_weight(91, WIDTH, VOCAB),
        "layers": layers,
    }


def forward(params, tokens, attend):
    """Logits [B, T, V]; `attend(layer, q, k, v)` is attention, over whatever cache."""
    x = params["embed"][tokens]
    for i, layer in enumerate(params["layers"]):
        q, k, v = (jnp.einsum("bte,ehd->bthd", parts.norm(x), layer[name]) for name in "qkv")
        x = x + attend(i, q, k, v).reshape(*x.shape[:2], -1) @ layer["o"]
    return (parts.norm(x) @ params["head"]).at[..., PAD].set(-jnp.inf)


def step(params, tokens, counts, cache):
    """The model over a cache: logits after each row's last valid token, and the cache."""
    views = kvq.layers(cache, counts, constants=params.get("constants"))  # kvqjax

    def attend(i, q, k, v):
        out, views[i] = views[i].attend(q, k, v)  # kvqjax
        return out

    logits = forward(params, tokens, attend)
    last = jnp.take_along_axis(logits, jnp.maximum(counts - 1, 0)[:, None, None], 1)[:, 0]
    return last, kvq.commit_layers(views)  # kvqjax


def plain(params, rows, count: int) -> list[list[int]]:
    """Greedy tokens over a cache of the model's own: arrays of one prompt's keys and values."""

    def write(x, new, end):
        return jax.lax.dynamic_update_slice(x, new, (0, end, 0, 0))

    @jax.jit
    def plain_step(params, tokens, end, last, cache):
        positions, new = end + jnp.arange(tokens.shape[1])[None], []

        def attend(i, q, k, v):
            k, v = write(cache[i][0], parts.rotary(k, positions), end), write(cache[i][1], v, end)
            new.append((k, v))
            mask = jnp.arange(CAPACITY)[None, None] <= positions[..., None]
            return parts.attention(parts.rotary(q, positions), k, v, mask)

        return parts.likeliest(forward(params, tokens, attend)[:, last]), new

    answers = []
    for row in rows:
        blank = jnp.zeros((1, CAPACITY, KV_HEADS, SIZE))
        token, cache = plain_step(
            params,
            np.asarray([row + [PAD] * (LONGEST - len(row))]),
            0,
            len(row) - 1,
            [(blank, blank)] * LAYERS,
        )
        answers.append([int(token[0])])
        for n in range(count - 1):
            token, cache = plain_step(params, token[:, None], len(row) + n, 0, cache)
            answers[-1].append(int(token[0]))
    return answers


def engine(spec: str, slots: int, **mesh) -> CachedEngine:
    return CachedEngine(
        step, SHAPE, spec, slots=slots, capacity=CAPACITY, max_prefill_length=LONGEST, **mesh
    )  # kvqjax


def serve(params, rows, count: int, prefiller: CachedEngine, decoder: CachedEngine):
    """Play the orchestrator: requests join the batch one by one, while others are decoded; all end
    after `count` tokens."""
    state, answers, slots, waiting = (
        decoder.init_decode_state(),
        [[] for _ in rows],
        {},
        list(range(len(rows))),
    )
    while waiting or slots:
        if waiting:
            slot = min(set(range(decoder.max_concurrent_decodes)) - {*slots})
            number = slots[slot] = waiting.pop(0)
            tokens = np.asarray(rows[number] + [PAD] * (LONGEST - len(rows[number])), np.int32)
            prefix, first = prefiller.prefill(
                params=params, padded_tokens=tokens, true_length=len(rows[number])
            )
            prefix = jax.device_put(prefix, decoder.get_prefix_destination_sharding())
            state = decoder.insert(prefix, state, slot)
            answers[number].append(int(first.get_result_at_slot(0).tokens[0, 0]))
        state, results = decoder.generate(params, state)
        results = results.convert_to_numpy()
        for slot, number in list(slots.items()):
            answers[number].append(int(results.get_result_at_slot(slot).tokens[0, 0]))
            if len(answers[number]) >= count:
                decoder.free_resource(slots.pop(slot) and slot)
    return [row[:count] for row in answers], state.cache


def cached(params, rows, count: int, spec: str, constants=None, first=None, second=None):
    """Greedy tokens over compressed caches, and that of the batch; `first` and `second` are the
    engines' meshes."""
    first, second = first or {}, second or {}
    return serve(
        params | {"constants": constants},
        rows,
        count,
        engine(spec, 1, **first),
        engine(spec, len(rows), **second),
    )


if __name__ == "__main__":
    print(
        plain(make(), parts.prompts(), 8), cached(make(), parts.prompts(), 8, "exact")[0], sep="\n"
    )
