"""Sources and tokens of tests on meshes of virtual devices."""

import jax.numpy as jnp
import numpy as np

from kvqjax.cache import runs_of

LENGTHS, CAPACITY, NEW = (1500, 700), 2048, 2


def pending(cache) -> tuple[dict, ...]:
    """Signed sources with offsets and outliers."""
    out, random = [], np.random.default_rng(0)
    for run in runs_of(cache.layout):
        sources = {}
        for name, width in run.wiring.storage.sources.items():
            x = random.normal(
                size=(run.count, len(LENGTHS), max(LENGTHS), width)
            ) + 2 * random.normal(size=width)
            x += 10 * (random.random(x.shape) < 0.002)
            sources[name] = jnp.asarray(np.abs(x) if name == "inverse_rms" else x, jnp.float32)
        out.append(sources)
    return tuple(out)


TOKENS = jnp.asarray([[3, 14], [15, 9]], jnp.int32)
