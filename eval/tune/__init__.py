"""A cache for a budget: which method and how many bits each layer's keys and values take."""

from kvqjax.eval.tune.run import Settings, Tuned, needed_windows, tune, tune_windows

__all__ = ["Settings", "Tuned", "needed_windows", "tune", "tune_windows"]


def __dir__() -> list[str]:
    return __all__
