"""Evaluation that names its mode: perplexity with KL divergence, retrieval, drift over decoding steps, tasks."""

from kvqjax.eval.comparison import compare
from kvqjax.eval.measure_drift import drift
from kvqjax.eval.measure_perplexity import perplexity
from kvqjax.eval.measure_retrieval import retrieval

__all__ = ["compare", "drift", "perplexity", "retrieval"]


def __dir__() -> list[str]:
    return __all__
