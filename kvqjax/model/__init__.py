"""A model: its config and weights, where they come from, and the decoder as pure functions."""

from kvqjax.model.loading import BUNDLED, Model, compute_dtype, load, locate

__all__ = ["BUNDLED", "Model", "compute_dtype", "load", "locate"]


def __dir__() -> list[str]:
    return __all__
