"""Metrics of this process (process_*, python_*) and of HTTP requests, collected with prometheus_client. The names and
labels of the HTTP metrics are those of vLLM's server. metrics.py has the metrics of the engine."""

from __future__ import annotations

import time
from typing import Any

import prometheus_client as library

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """Counts the HTTP requests. Every label has few values, whatever callers send."""

    def __init__(self) -> None:
        self._registry = library.CollectorRegistry()
        for collector in (library.ProcessCollector, library.PlatformCollector, library.GCCollector):
            collector(registry=self._registry)
        labels = ("method", "handler")
        self._requests = library.Counter(
            "http_requests", "HTTP requests by method, endpoint and class of status.", (*labels, "status"),
            registry=self._registry,
        )
        self._seconds = library.Histogram(
            "http_request_duration_seconds", "Seconds until the whole answer was sent.", labels,
            buckets=SECONDS, registry=self._registry,
        )
        library.disable_created_metrics()

    def ended(self, scope: Any, status: int, began: float) -> None:
        """Count a request that has ended. `status` 0: it got no answer; `began`: on the clock of time.monotonic."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        handler = getattr(scope.get("route"), "path", "none")  # the endpoint's pattern, not the path of the request
        self._requests.labels(method, handler, f"{status // 100}xx" if status else "none").inc()
        self._seconds.labels(method, handler).observe(time.monotonic() - began)

    def page(self) -> str:
        """Returns these metrics in Prometheus' text format."""
        page: str = library.generate_latest(self._registry).decode()
        return page
