"""Evaluation that names its mode: perplexity with KL divergence, retrieval, structured text to the
letter, drift over decoding steps, tasks."""

from kvqjax.eval.comparison import compare
from kvqjax.eval.measure_copying import copying
from kvqjax.eval.measure_retrieval import retrieval
from kvqjax.eval.windows import drift, perplexity

__all__ = ["compare", "copying", "drift", "perplexity", "retrieval"]


def __dir__() -> list[str]:
    return __all__
