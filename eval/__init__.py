"""Evaluation that names its mode: perplexity with KL divergence, retrieval, drift over decoding steps, tasks."""

from kvqjax.eval.drift import drift
from kvqjax.eval.perplexity import perplexity
from kvqjax.eval.retrieval import retrieval

__all__ = ["drift", "perplexity", "retrieval"]
