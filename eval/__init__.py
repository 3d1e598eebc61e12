"""Evaluation that names its mode: perplexity with KL divergence, retrieval, drift over decoding
steps, tasks."""

from kvqjax.eval.comparison import compare
from kvqjax.eval.measure_retrieval import retrieval
from kvqjax.eval.windows import drift, perplexity

__all__ = ["compare", "drift", "perplexity", "retrieval"]


def __dir__() -> list[str]:
    return __all__
