"""A cache for a budget: how many bits each layer's keys and values take."""

from kvqjax.eval.tune.run import Tuned, tune, write_report

__all__ = ["Tuned", "tune", "write_report"]


def __dir__() -> list[str]:
    return __all__
