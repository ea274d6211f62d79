"""Exceptions and log records, carried from one process to another."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.errors import BatchError, TaskError
from graphile_worker.outcome import ControlFlow

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PLAIN = frozenset({str, int, float, bool, type(None)})
_formatter = logging.Formatter()


class RemoteTraceback(Exception):  # noqa: N818 - no error, but where one comes from
    """The cause of an exception that was raised in another process: its traceback there, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class CarriedError(NamedTuple):
    """An exception on its way."""

    module: str
    name: str
    text: str
    traceback: str
    pickled: bytes | None
    cause: CarriedError | None = None
    """What a choice of the task's was raised from."""
    items: list[CarriedError] | None = None
    """What the items of a batch failed with."""
    places: tuple[int, ...] = ()
    final_places: tuple[int, ...] = ()
    final: bool = False

    def error(self) -> BaseException:
        """The exception, or one of the same name and text if it cannot be had here."""
        if self.items is not None:
            errors = [item.error() for item in self.items]
            return BatchError(
                self.text,
                errors=errors,
                places=self.places,
                final_places=self.final_places,
                final=self.final,
            )
        error = _unpickled(self.pickled) or _likeness(self)
        if isinstance(error, ControlFlow):
            error.__cause__ = None if self.cause is None else self.cause.error()
        elif self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error


def carry(error: BaseException) -> CarriedError:
    """The exception, ready to go."""
    kind = type(error)
    carried = CarriedError(kind.__module__, kind.__qualname__, _text(error), _traceback(error), None)
    if isinstance(error, BatchError):
        items = [carry(item) for item in error.errors]
        return carried._replace(
            items=items, places=error.places, final_places=error.final_places, final=error.final
        )
    if isinstance(error, ControlFlow):
        if error.__cause__ is not None:
            carried = carried._replace(cause=carry(error.__cause__))
        error = copy.copy(error)
        error.args = ()  # the cause may be among them
    return carried._replace(pickled=_pickled(error))


def carry_record(record: logging.LogRecord) -> bytes:
    """The record, ready to go: with its text made, and without what cannot go along."""
    record = copy.copy(record)
    record.msg, record.args = record.getMessage(), None
    if record.exc_info and not record.exc_text:
        record.exc_text = _formatter.formatException(record.exc_info)
    record.exc_info = None
    about = {
        name: value if type(value) in _PLAIN else _Extra(_pickled(value), _text(value, repr))
        for name, value in vars(record).items()
    }
    return pickle.dumps(about)


def record_of(carried: bytes) -> logging.LogRecord:
    """The record; what it carries along and is not known here is there as text."""
    about: dict[str, Any] = pickle.loads(carried)  # noqa: S301 - our own
    return logging.makeLogRecord(
        {name: value.here() if isinstance(value, _Extra) else value for name, value in about.items()}
    )


class _Extra(NamedTuple):
    """Something that a record carries along."""

    pickled: bytes | None
    shown: str

    def here(self) -> Any:
        found = None if self.pickled is None else _loaded(self.pickled)
        return self.shown if found is None else found


class _Known(pickle.Unpickler):
    """Takes classes of modules that are imported already: importing others would stop everything for long."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def _loaded(pickled: bytes) -> Any:
    try:
        return _Known(io.BytesIO(pickled)).load()
    except Exception:  # noqa: BLE001 - classes of the user's may do anything when they are made anew
        return None


def _unpickled(pickled: bytes | None) -> BaseException | None:
    found = None if pickled is None else _loaded(pickled)
    return found if isinstance(found, BaseException) else None


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the same, when they are written
        return None


def _likeness(carried: CarriedError) -> BaseException:
    name = carried.name.rpartition(".")[2]
    about = {"__module__": carried.module, "__qualname__": carried.name}
    error: BaseException = type(name, (TaskError,), about)(*([carried.text] if carried.text else []))
    return error


def _text(value: object, text_of: Callable[[Any], str] = str) -> str:
    try:
        return text_of(value)
    except Exception:  # noqa: BLE001 - an exception whose text cannot be had is still an exception
        return ""


def _traceback(error: BaseException) -> str:
    """From the task on."""
    told = error.__traceback__
    while told is not None and told.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        told = told.tb_next
    if told is None:
        return ""
    try:
        return "".join(traceback.format_exception(type(error), error, told))
    except Exception:  # noqa: BLE001 - so is one that cannot be shown
        return ""
