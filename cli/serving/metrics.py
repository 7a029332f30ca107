"""Measures of the server for Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sparsekv.runtime.serving.scheduler import Measures

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class SchedulerCollector(Collector):
    """Reads the scheduler's measures whenever Prometheus requests the metrics."""

    def __init__(self, measures: Callable[[], Measures]):
        self.measures = measures

    def collect(self) -> Iterable[Metric]:
        now = self.measures()
        gauges = {
            "waiting": ("Requests that wait for a slot.", now.waiting),
            "running": ("Requests that are being answered.", now.running),
            "kept_bytes": ("Bytes of keys and values that are kept of earlier turns.", now.kept_bytes),
            "kv_fraction": ("Mean share of the documents' keys and values that answers read.", now.kv_fraction),
        }
        totals = {
            "answers": ("Answers that have ended.", now.answers),
            "answer_tokens": ("Tokens of answers.", now.answer_tokens),
            "prompt_tokens": ("Tokens of prompts, documents included.", now.prompt_tokens),
            "cached_tokens": (
                "Tokens of prompts that were not prefilled.",
                now.cached_tokens,
            ),
        }
        for name, (told, value) in gauges.items():
            yield GaugeMetricFamily(f"sparsekv_{name}", told, value=value)
        for name, (told, value) in totals.items():
            yield CounterMetricFamily(f"sparsekv_{name}", told, value=value)


class Metrics:
    """The measures of one server: measures of the scheduler, and of HTTP requests."""

    def __init__(self, measures: Callable[[], Measures]):
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(SchedulerCollector(measures))
        told = "Requests by path and status. Paths that do not exist count as one."
        self.requests = Counter("sparsekv_requests", told, ("path", "status"), registry=self.registry)
        told = (
            "Estimated share of the attention that an answer left to centroids or dropped, where a request asks for it."
        )
        self.missed = Histogram("sparsekv_missed_mass", told, buckets=_SHARES, registry=self.registry)
        told = "Seconds from a request to the first token of its first answer."
        self.first_token = Histogram("sparsekv_first_token_seconds", told, buckets=_SECONDS, registry=self.registry)
        told = "Seconds between two pieces of text of a stream, as they are sent."
        self.gap = Histogram("sparsekv_gap_seconds", told, buckets=_SECONDS, registry=self.registry)
