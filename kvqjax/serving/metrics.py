"""What /metrics says, for Prometheus: what the engine counts, and how long answers took."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvqjax.serving.engine import Engine
from kvqjax.serving.request import Handle

# Of the fields of `Engine.stats`.
GAUGES = {
    "running": "requests whose answer is being made",
    "waiting": "requests that wait for a row",
    "rows": "requests that can be answered at a time",
    "cache_bytes": "bytes of the cache",
    "pages": "pages of the cache",
    "pages_free": "pages that no row has",
    "pages_shared": "pages that several rows or kept prefixes have",
    "prefixes": "beginnings of prompts that are kept",
}
COUNTERS = {
    "requests": "requests that have ended",
    "aborted": "requests that were given up",
    "failed": "requests that ended with an error",
    "prompt_tokens": "tokens of prompts that were fed",
    "reused_tokens": "tokens of prompts that were kept from earlier ones",
    "tokens": "tokens that were made",
    "preempted": "times that a request made way for others",
    "shifts": "times that the oldest text of a full row left it",
    "dropped_tokens": "tokens that left a full row for later ones",
}
# Upper bounds of the classes, in seconds: from a chip's best time to what a CPU takes under load.
FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
LATER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class _Counts:
    """What the engine counts, read when it is asked."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self):
        stats = self._engine.stats()
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvqjax_{field}", text, value=getattr(stats, field))
        # "bits" alone would not say of what.
        text = "bits of the cache per number of a key or value"
        yield GaugeMetricFamily("kvqjax_cache_bits", text, value=stats.bits)
        for field, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvqjax_{field}", text, value=getattr(stats, field))


class Metrics:
    """The figures of a server over an engine."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(engine))
        text = "seconds from a request to the first token of its answer"
        options = {"registry": self._registry}
        self._first = Histogram(
            "kvqjax_time_to_first_token_seconds", text, buckets=FIRST, **options
        )
        text = "seconds between two tokens of an answer, the mean of each answer"
        self._later = Histogram(
            "kvqjax_time_per_output_token_seconds", text, buckets=LATER, **options
        )

    def observe(self, handles: Sequence[Handle]) -> None:
        """Count the times of answers that ended without an error. One of a single token has no
        later ones."""
        for handle in handles:
            answer = handle.answer
            if answer is None or not answer.tokens:
                continue
            self._first.observe(answer.seconds_to_first_token)
            if len(answer.tokens) > 1:
                seconds = answer.seconds - answer.seconds_to_first_token
                self._later.observe(seconds / (len(answer.tokens) - 1))

    def text(self) -> bytes:
        """Write all figures as Prometheus reads them."""
        return generate_latest(self._registry)
