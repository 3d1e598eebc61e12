"""Shared parts of the five models of this folder: their sizes, a rotary embedding, a norm and plain
attention. Nothing here knows kvqjax."""

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, SIZE, THETA = 64, 32, 2, 4, 2, 16, 10000.0
SIZES = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": SIZE}
CAPACITY = 192  # tokens that a row may hold
PAD, END = 0, 1  # token ids; prompts have neither


def prompts(rows: int = 4) -> list[list[int]]:
    """Random token ids, of another number in every row."""
    random = np.random.default_rng(0)
    return [random.integers(2, VOCAB, size).tolist() for size in (132, 41, 66, 50)[:rows]]


def padded(rows: list[list[int]], *, left: bool) -> np.ndarray:
    """Token ids [B, T], the shorter rows padded on one side."""
    longest = max(map(len, rows))
    return np.asarray(
        [[PAD] * (longest - len(row)) + row if left else row + [PAD] * (longest - len(row)) for row in rows]
    )


def random_weight(seed: int, *shape: int):
    """Normal numbers, large enough that attention looks at few tokens and that they decide on the next one."""
    return 2 * jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])


def likeliest(logits):
    """The token of the greatest logit [..., V] that is no padding."""
    return logits.at[..., PAD].set(-jnp.inf).argmax(-1)


def norm(x):
    """Divide by the root mean square of the last axis."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotary(x, positions):
    """Rotate [B, T, heads, D] to its positions [B, T]."""
    half = x.shape[-1] // 2
    angles = jnp.einsum("bt,p->btp", positions.astype(jnp.float32), THETA ** (-jnp.arange(half) / half))[:, :, None]
    cos, sin, (a, b) = jnp.cos(angles), jnp.sin(angles), jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q, k, v, mask, softcap=None):
    """Attend with queries [B, T, H, D] to keys and values [B, S, K, D] that a mask [B, T, S] shows."""
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / np.sqrt(size)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), -1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, length, heads, size)
