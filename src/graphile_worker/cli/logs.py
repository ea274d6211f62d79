"""How the command logs: lines for people, or JSON for machines."""

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

from graphile_worker.cli.printing import clean_lines

_COLOURS = {
    logging.DEBUG: "white",
    logging.INFO: "green",
    logging.WARNING: "yellow",
    logging.ERROR: "red",
}
_ABOUT = ("label", "worker_id", "task_identifier", "job_id")
_OF_LOGGING = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "of_job", "shown_extras"}
"""What every record has, and what formatters add to it."""
_BARE = re.compile(r"[^\s\"=\\]+")
_NOT_JSON = (TypeError, ValueError, RecursionError)
"""Keys that are not texts, numbers that JSON does not have, a thing that contains itself."""


def report(error: Exception) -> None:
    """The error that ends the command."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("graphile_worker").critical("%s", error)
    else:
        click.echo(clean_lines(f"Error: {error}"), err=True)


def configure(level: str, form: str, *, one_of_several: bool = False) -> None:
    """Log to standard error, what the tasks say too; of one process of several also which it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(form, with_process=one_of_several))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # we say it ourselves


def _formatter(form: str, *, with_process: bool) -> logging.Formatter:
    if form == "json":
        return JsonFormatter()
    if form == "pretty" and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        return PrettyFormatter()
    return TextFormatter(with_process=with_process and form != "pretty")


def _extras_of(record: logging.LogRecord) -> dict[str, object]:
    """Return what the user gave the record, by ``ctx.logger.scope(...)`` or ``extra=``."""
    return {
        name: value for name, value in vars(record).items() if name not in _OF_LOGGING and name not in _ABOUT
    }


def _text(value: object) -> str:
    """Return ``str(value)``, or the name of its type if that fails, so that the record is still logged."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - it comes from a method of the value
        return f"<{type(value).__name__}>"


def _as_text(value: object) -> str:
    """Return a value for a line: quoted, if it would not be one word otherwise."""
    text = _text(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO  Completed job 7 (hello, 0.21 ms)``, then what a task says by scope or extra."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, *, with_process: bool) -> None:
        process = " [%(process)d]" if with_process else ""
        super().__init__(f"%(asctime)s{process} %(levelname)-5s %(of_job)s%(message)s%(shown_extras)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line; what a task says begins with its job, which our own lines name themselves."""
        job_id, task = getattr(record, "job_id", None), getattr(record, "task_identifier", None)
        is_named = job_id is None or f"ob {job_id} " in record.getMessage()
        record.of_job = "" if is_named else clean_lines(f"[{task} {job_id}] ")
        record.shown_extras = clean_lines(
            "".join(f" {name}={_as_text(value)}" for name, value in _extras_of(record).items())
        )
        if record.exc_text:  # made in another process, or by another formatter
            record = copy(record)
            record.exc_text = clean_lines(record.exc_text)
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - that is its name
        """The line, without what a terminal might take for a command: texts of jobs may be in it."""
        record.message = clean_lines(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - that is its name
        """The traceback, likewise."""
        return clean_lines(super().formatException(ei))


class PrettyFormatter(TextFormatter):
    """The same in colours, for one who watches."""

    def __init__(self) -> None:
        super().__init__(with_process=False)
        plain = self._style._fmt  # noqa: SLF001 - what the class above has said
        self._styles = {
            level: logging.PercentStyle(
                plain.replace("%(asctime)s", click.style("%(asctime)s", dim=True))
                .replace("%(levelname)-5s", click.style("%(levelname)-5s", fg=colour, bold=True))
                .replace("%(of_job)s", click.style("%(of_job)s", fg="cyan"))
            )
            for level, colour in _COLOURS.items()
        }

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - that is its name
        """The line, by how bad it is."""
        record.message = clean_lines(record.message)
        level = max((one for one in self._styles if one <= record.levelno), default=logging.DEBUG)
        return self._styles[level].format(record)


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
        # A name that is taken gets an underscore, so that neither hides the other.
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
