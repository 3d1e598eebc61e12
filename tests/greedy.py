"""Greedy text of a model without any cache, the oracle of generation."""

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.model import decoder


def reference(model, prompt, count):
    """Greedy continuation without any cache, and the margins between the two best tokens."""
    row, margins = list(prompt), []
    forward = jax.jit(decoder.logits, static_argnums=2)
    for _ in range(count):
        padded = jnp.asarray([row + [0] * (64 - len(row))])
        logits = np.asarray(forward(model.params, padded, model.config)[0, len(row) - 1])
        best = np.sort(logits)[-2:]
        margins.append(best[1] - best[0])
        row.append(int(logits.argmax()))
    return row[len(prompt) :], min(margins)
