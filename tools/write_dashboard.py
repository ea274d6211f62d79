"""Write deploy/grafana-dashboard.json from the list of panels below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "deploy" / "grafana-dashboard.json"
_P = "graphile_worker_"
_WIDTH = 8
_HEIGHT = 8
_COLUMNS = 24


def rate(name: str, by: str = "") -> str:
    """Return the increase per second, of all or by a label."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({_P}{name}[$__rate_interval]))"


def quantile(number: float, name: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({number}, {rate(f'{name}_bucket', 'le, ' + by if by else 'le')})"


def job_panels() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the panels about jobs: the title, the unit and the queries, with their legends, of each."""
    return [
        ("Jobs per second, by outcome", "ops", [(rate("jobs_total", "outcome"), "{{outcome}}")]),
        ("Jobs per second, by task", "ops", [(f"topk(10, {rate('jobs_total', 'task')})", "{{task}}")]),
        (
            "Jobs added per second",
            "ops",
            [
                (rate("jobs_added_total", "task"), "{{task}}"),
                (rate("cron_added_total", "task"), "{{task}} (cron)"),
            ],
        ),
        ("Run time, p95", "s", [(quantile(0.95, "job_duration_seconds", "task"), "{{task}}")]),
        (
            "Wait until the start",
            "s",
            [(quantile(0.5, "job_wait_seconds"), "p50"), (quantile(0.95, "job_wait_seconds"), "p95")],
        ),
        (
            "Age of the oldest ready job",
            "s",
            [(f"max by (task) ({_P}queue_oldest_ready_age_seconds)", "{{task}}")],
        ),
        ("Jobs in the queue", "short", [(f"sum by (state) ({_P}queue_jobs)", "{{state}}")]),
        (
            "Slots",
            "short",
            [
                (f"sum ({_P}slots)", "slots"),
                (f"sum ({_P}jobs_running)", "running"),
                (f"sum ({_P}jobs_prefetched)", "prefetched"),
            ],
        ),
        ("Workers", "short", [(f"sum by (language, state) ({_P}workers)", "{{language}} {{state}}")]),
        ("Exchange, p95", "s", [(quantile(0.95, "exchange_duration_seconds", "kind"), "{{kind}}")]),
    ]


def worker_panels() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the panels about the workers and the database."""
    return [
        (
            "Jobs per exchange",
            "short",
            [(f"{rate('exchange_jobs_sum', 'kind')} / {rate('exchange_jobs_count', 'kind')}", "{{kind}}")],
        ),
        (
            "Health",
            "short",
            [
                (f"sum ({_P}ready)", "ready"),
                (f"sum ({_P}listening)", "listening"),
                (f"sum ({_P}exporter_up)", "exporter"),
            ],
        ),
        (
            "Heartbeat, event loop and cron",
            "s",
            [
                (f"max ({_P}heartbeat_age_seconds)", "heartbeat age"),
                (f"max ({_P}event_loop_lag_seconds)", "event loop lag"),
                (f"max by (task) ({_P}cron_lateness_seconds)", "cron lateness {{task}}"),
            ],
        ),
        (
            "Trouble per second",
            "ops",
            [
                (rate("database_errors_total"), "database errors"),
                (rate("reconnects_total"), "reconnects"),
                (rate("fenced_total"), "fenced"),
                (rate("recovered_jobs_total"), "recovered jobs"),
            ],
        ),
        (
            "Jobs table",
            "short",
            [
                (f"{_P}jobs_table_dead_tuples", "dead rows"),
                (f"{_P}oldest_xmin_age", "oldest xmin age"),
                (f"{_P}notification_queue_usage_ratio * 100", "notification queue, %"),
            ],
        ),
        (
            "Versions",
            "short",
            [(f"count by (version, schema, revision) ({_P}info)", "{{version}} {{schema}} {{revision}}")],
        ),
    ]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "title": "Graphile Worker",
        "uid": "graphile-worker",
        "tags": ["graphile-worker"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate([*job_panels(), *worker_panels()])],
    }


def _panel(number: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    per_row = _COLUMNS // _WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % per_row * _WIDTH,
            "y": number // per_row * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=2) + "\n")
