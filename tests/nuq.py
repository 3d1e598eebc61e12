"""Running KVQuant's codecs, for its tests."""

import jax
import jax.numpy as jnp
import numpy as np

FULL = {"dtype": "float32", "outlier_dtype": "float32"}  # storage as wide as the released simulation's


def round_trip(spec, constants, x):
    codec = spec.build(x.shape[-1])
    tile = jax.jit(codec.encode)(constants, jnp.asarray(x))
    return tile, np.asarray(jax.jit(codec.decode)(constants, tile))


def mostly_close(ours, theirs, bound, share=0.999):
    """The golden tolerance: `share` of the entries within `bound`, the rest being ties between two signposts."""
    close = np.abs(ours - theirs) <= bound
    assert close.mean() >= share, np.abs(ours - theirs).max()
