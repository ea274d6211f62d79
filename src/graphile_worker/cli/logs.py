"""How the command logs: lines for people, or JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

import click

_ABOUT = ("label", "worker_id", "task_identifier", "job_id")


def report(error: Exception) -> None:
    """The error that ends the command."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("graphile_worker").critical("%s", error)
    else:
        click.echo(f"Error: {error}", err=True)


def configure(level: str, form: str, *, one_of_several: bool = False) -> None:
    """Log to standard error, what the tasks say too; of one process of several also which it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(with_process=one_of_several))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # we say it ourselves


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO  Completed job 7 (hello, 0.21 ms)``."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, *, with_process: bool) -> None:
        process = " [%(process)d]" if with_process else ""
        super().__init__(f"%(asctime)s{process} %(levelname)-5s %(of_job)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line; what a task says begins with its job, which our own lines name themselves."""
        job_id, task = getattr(record, "job_id", None), getattr(record, "task_identifier", None)
        is_named = job_id is None or f"ob {job_id} " in record.getMessage()
        record.of_job = "" if is_named else f"[{task} {job_id}] "
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in _ABOUT if hasattr(record, name)}
        if record.exc_text:  # made in another process
            entry["error"] = record.exc_text
        elif record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
