"""Logging of the command: lines for people, or JSON for machines."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from copy import copy
from datetime import UTC, datetime
from typing import Any

import click

from graphile_worker.cli.printing import escape_lines

_COLOURS = {
    logging.DEBUG: "white",
    logging.INFO: "green",
    logging.WARNING: "yellow",
    logging.ERROR: "red",
}
_SCOPE = (
    "label",
    "worker_id",
    "task_identifier",
    "job_id",
    "attempt",
    "trace_id",
    "outcome",
    "duration",
)
"""Fields of the library's records. Messages of text lines have what matters of them."""
_STANDARD_ATTRIBUTES = {
    *vars(logging.makeLogRecord({})),
    "message",
    "asctime",
    "taskName",
    "job_prefix",
    "extras_suffix",
}
"""Attributes of every record, and those that formatters add."""
_SINGLE_WORD = re.compile(r"[^\s\"=\\]+")
_NOT_JSON = (TypeError, ValueError, RecursionError)
"""Errors for keys that are not strings, numbers that JSON does not have, and circular references."""


def report(error: Exception) -> None:
    """Print the error that ends the command, in the log format if that is JSON."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("graphile_worker").critical("%s", error)
    else:
        click.echo(escape_lines(f"Error: {error}"), err=True)


def configure(level: str, form: str, *, is_child: bool = False) -> None:
    """Log to standard error, records of tasks included; a child process adds its process id."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(form, with_process=is_child))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # the supervisor logs the changes itself


def _formatter(form: str, *, with_process: bool) -> logging.Formatter:
    if form == "json":
        return JsonFormatter()
    if form == "pretty" and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        return PrettyFormatter()
    return TextFormatter(with_process=with_process and form != "pretty")


def _extras_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the attributes that come from ``ctx.logger.scope(...)`` or ``extra=``."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and name not in _SCOPE
    }


def _text(value: object) -> str:
    """Return ``str(value)``, or the name of its type if that fails, so that the record is still logged."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - any error of the value's own method
        return f"<{type(value).__name__}>"


def _as_text(value: object) -> str:
    """Return a value for a line, quoted unless it is a single word."""
    text = _text(value)
    return text if _SINGLE_WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO  Completed job 7 (hello, 0.21 ms)``, followed by scope and extra as name=value."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, *, with_process: bool) -> None:
        process = " [%(process)d]" if with_process else ""
        super().__init__(f"%(asctime)s{process} %(levelname)-5s %(job_prefix)s%(message)s%(extras_suffix)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line, with its job in front unless the message names it."""
        job_id, task = getattr(record, "job_id", None), getattr(record, "task_identifier", None)
        is_named = job_id is None or f"ob {job_id} " in record.getMessage()
        record.job_prefix = "" if is_named else escape_lines(f"[{task} {job_id}] ")
        record.extras_suffix = escape_lines(
            "".join(f" {name}={_as_text(value)}" for name, value in _extras_of(record).items())
        )
        if record.exc_text:  # from another process, or another formatter
            record = copy(record)
            record.exc_text = escape_lines(record.exc_text)
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """Return the line without control characters, which may come from a job's texts."""
        record.message = escape_lines(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in logging
        """Return the traceback without control characters."""
        return escape_lines(super().formatException(ei))


class PrettyFormatter(TextFormatter):
    """`TextFormatter` with colours, for a terminal."""

    def __init__(self) -> None:
        super().__init__(with_process=False)
        plain = self._style._fmt  # noqa: SLF001 - the format of the base class
        self._styles = {
            level: logging.PercentStyle(
                plain.replace("%(asctime)s", click.style("%(asctime)s", dim=True))
                .replace("%(levelname)-5s", click.style("%(levelname)-5s", fg=colour, bold=True))
                .replace("%(job_prefix)s", click.style("%(job_prefix)s", fg="cyan"))
            )
            for level, colour in _COLOURS.items()
        }

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """Return the line in the colour of its level."""
        record.message = escape_lines(record.message)
        level = max((level for level in self._styles if level <= record.levelno), default=logging.DEBUG)
        return self._styles[level].format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in _SCOPE if hasattr(record, name)}
        if record.exc_text:  # from another process
            entry["error"] = record.exc_text
        elif record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        # An extra with the name of a standard field gets an underscore, so that both are logged.
        entry |= {f"{name}_" if name in entry else name: value for name, value in _extras_of(record).items()}
        try:
            return _dump(entry)
        except _NOT_JSON:
            return json.dumps({name: _storable(value) for name, value in entry.items()}, default=_text)


def _dump(value: object) -> str:
    return json.dumps(value, default=_text, allow_nan=False)


def _storable(value: object) -> object:
    """Return a value that JSON can hold: the given one, or else its text."""
    try:
        _dump(value)
    except _NOT_JSON:
        return _text(value)
    return value
