"""What the front end counts of itself, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class Counters:
    """`requests`: by path and status; a path that is not served counts as `other`, a client that left as 499. `open`:
    requests for tokens or text that are under way.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.open = 0

    def collect(self) -> Iterator[Metric]:
        """The metrics, as they are now."""
        family = CounterMetricFamily("trueroll_http_requests", "Answered.", labels=["path", "status"])
        for (path, status), count in self.requests.items():
            family.add_metric([path, str(status)], count)
        yield family
        yield GaugeMetricFamily("trueroll_http_open_requests", "For tokens or text.", value=self.open)
