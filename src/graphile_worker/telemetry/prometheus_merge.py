"""`MergedMetrics`: the metrics of several processes as one page. Needs the extra ``prometheus``.

A supervisor asks its worker processes for their pages, and merges them here. Counters and histograms are
added up. So are gauges, except those for which that makes no sense, such as an age. Counters of processes
that have ended are kept: otherwise a restart would look like a decrease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from graphile_worker.telemetry.metric_table import METRICS, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Labels: TypeAlias = tuple[tuple[str, str], ...]

_RULES = {
    "process_start_time_seconds": "min",
    "process_max_fds": "max",
    "python_info": "max",
}
_KEPT = {"counter", "histogram", "summary"}
"""Types whose values are kept after their process has ended."""


class _MergedFamily:
    """One metric, with the values of several processes."""

    def __init__(self, family: Family) -> None:
        self.name, self.documentation, self.type = family.name, family.documentation, family.type
        self.values: dict[tuple[str, Labels], float] = {}

    def add(self, family: Family) -> None:
        rule = _rule(family)
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            one = self.values.get(key)
            if one is None:
                self.values[key] = sample.value
            elif rule == "sum":
                self.values[key] = one + sample.value
            else:
                self.values[key] = (min if rule == "min" else max)(one, sample.value)

    def export(self) -> Family:
        family = Family(self.name, self.documentation, self.type)
        for (name, labels), value in self.values.items():
            family.add_sample(name, dict(labels), value)
        return family


class MergedMetrics:
    """Merges the pages of processes."""

    def __init__(self) -> None:
        self._last: dict[int, list[Family]] = {}
        self._ended: dict[str, _MergedFamily] = {}

    def page(self, texts: Mapping[int, bytes], running: set[int]) -> tuple[str, bytes]:
        """Return the content type and the text of the merged page.

        Args:
            texts: The pages by process id. A process that did not answer has its last page.
            running: The ids of all running processes.
        """
        for pid, text in texts.items():
            self._last[pid] = list(text_string_to_metric_families(text.decode()))
        for pid in self._last.keys() - running:
            _merge(self._ended, [family for family in self._last.pop(pid) if family.type in _KEPT])
        registry = CollectorRegistry()
        registry.register(_Collector(self._merged()))
        return CONTENT_TYPE_LATEST, generate_latest(registry)

    def _merged(self) -> dict[str, _MergedFamily]:
        merged: dict[str, _MergedFamily] = {}
        _merge(merged, [family.export() for family in self._ended.values()])
        for families in self._last.values():
            _merge(merged, families)
        return merged


class _Collector:
    def __init__(self, merged: Mapping[str, _MergedFamily]) -> None:
        self._merged = merged

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for family in self._merged.values():
            yield family.export()


def _merge(into: dict[str, _MergedFamily], families: list[Family]) -> None:
    for family in families:
        into.setdefault(family.name, _MergedFamily(family)).add(family)


def _rule(family: Family) -> str:
    metric = METRICS.get(family.name.removeprefix(PREFIX))
    if metric is not None:
        return metric.merge
    if family.name.endswith("_created"):
        return "min"
    return _RULES.get(family.name, "sum")
