"""Continuous batching: requests join a running batch and leave it one by one: `python examples/continuous_batching.py`.

The batch has a few rows and runs one compiled step. A request is prefilled by itself, in a small cache, and inserted
into a row that is free; when it is done its row is evicted. `counts` says which rows are active: 1 new token, or 0.
"""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq

prefill = jax.jit(kvq.prefill, donate_argnames="cache")
insert = jax.jit(kvq.insert, donate_argnames="cache")
evict = jax.jit(kvq.evict, donate_argnames="cache")


@jax.jit(donate_argnames="cache")
def step(model, newest, active, cache):
    """The next token of every row, and the cache that holds the `newest` one of every active row."""
    logits, cache = kvq.forward(model, newest[:, None], active.astype(jnp.int32), cache, last=True)
    return logits.argmax(-1), cache


def serve(model, prompts, method="exact", *, rows=2, capacity=512, longest=64, new=32) -> list[list[int]]:
    """Continue every prompt of token ids, at most `longest` of them, by `new` tokens, greedily, `rows` at a time.

    A row ends early at one of the model's end tokens, which is not kept, as in `kvqjax.generate`."""
    cache = kvq.init_cache(model, method, rows, capacity)
    waiting, request = deque(enumerate(prompts)), [None] * rows
    made, newest = [[] for _ in prompts], np.zeros(rows, np.int32)

    def take(row: int, token: int) -> None:
        """Note the next token of a row, and free the row when its request is done."""
        nonlocal cache
        ended, newest[row] = token in model.config.eos_ids, token
        if not ended:
            made[request[row]].append(token)
        if ended or len(made[request[row]]) == new:
            cache, request[row] = evict(cache, np.arange(rows) == row), None

    while waiting or any(number is not None for number in request):
        for row in [row for row in range(rows) if request[row] is None and waiting]:
            request[row], prompt = waiting.popleft()
            padded = np.zeros((1, longest), np.int32)
            padded[0, : len(prompt)] = prompt
            logits, one = prefill(model, padded, np.asarray([len(prompt)]), kvq.init_cache(model, method, 1, longest))
            cache = insert(cache, row, one)
            take(row, int(logits[0].argmax()))
        active = np.asarray([number is not None for number in request])
        if active.any():
            tokens, cache = step(model, newest, active, cache)
            for row in np.flatnonzero(active):
                take(int(row), int(tokens[row]))
    return made


def main() -> None:
    model = kvq.load("demo")
    texts = ["The old house stood", "It was late", "She opened the door and", "The sea was calm", "In the morning"]
    prompts = [model.tokenizer(text)["input_ids"] for text in texts]
    for text, tokens in zip(texts, serve(model, prompts, "kivi:bits=2,window=32"), strict=True):
        print(f"--- {text}{model.tokenizer.decode(tokens)}")


if __name__ == "__main__":
    main()
