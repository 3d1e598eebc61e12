"""Running KVQuant's codecs, for its tests."""

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.codecs.nuq_outliers import split_outliers

# Storage as wide as the released simulation's.
FULL = {
    "dtype": "float32",
    "outlier_dtype": "float32",
}


def round_trip(spec, constants, x):
    codec = spec.build(x.shape[-1])
    tile = jax.jit(codec.encode)(constants, jnp.asarray(x))
    return tile, np.asarray(jax.jit(codec.decode)(constants, tile))


def slots_of(spec, tile, x):
    """Values and channels of the outlier slots of `x`, [n, u] each."""
    parts = split_outliers(tile["outliers"], spec.slot_count(x.shape[-1]), spec.outlier_dtype)
    return [np.asarray(part).T for part in parts]


def mostly_close(ours, theirs, bound, share=0.999):
    """The golden tolerance: `share` of the entries within `bound`, the rest being ties between two
    signposts."""
    close = np.abs(ours - theirs) <= bound
    assert close.mean() >= share, np.abs(ours - theirs).max()
