"""Exceptions and log records, packed to be sent from one process to another."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._base.tracebacks import task_frames
from graphile_worker.errors import BatchError, TaskError
from graphile_worker.outcome import ControlFlow

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = frozenset({str, int, float, bool, type(None)})
_formatter = logging.Formatter()


class RemoteTraceback(Exception):  # noqa: N818 - not an error itself
    """The cause of an exception that was raised in another process: its traceback as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'

    @property
    def remote_traceback(self) -> str:
        """The traceback, as the other process has formatted it."""
        return str(self.args[0])


class RemoteError(NamedTuple):
    """An exception, packed to be sent to another process."""

    module: str
    name: str
    text: str
    traceback: str
    pickled: bytes | None
    cause: RemoteError | None = None
    """The cause of an outcome that the task chose, such as `Retry`."""
    items: list[RemoteError] | None = None
    """The errors of a batch's items."""
    indexes: tuple[int, ...] = ()
    final_indexes: tuple[int, ...] = ()
    final: bool = False

    def rebuild(self) -> BaseException:
        """Return the exception, or one with the same name and text if it cannot be unpickled here."""
        if self.items is not None:
            errors = [item.rebuild() for item in self.items]
            return BatchError(
                self.text,
                errors=errors,
                indexes=self.indexes,
                final_indexes=self.final_indexes,
                final=self.final,
            )
        error = _unpickled_error(self.pickled) or _substitute(self)
        if isinstance(error, ControlFlow):
            error.__cause__ = None if self.cause is None else self.cause.rebuild()
        elif self.traceback:
            error.__cause__ = RemoteTraceback(self.traceback)
        return error


def pack_error(error: BaseException) -> RemoteError:
    """Pack an exception to be sent to another process."""
    kind = type(error)
    packed = RemoteError(kind.__module__, kind.__qualname__, _text(error), _traceback(error), None)
    if isinstance(error, BatchError):
        items = [pack_error(item) for item in error.errors]
        return packed._replace(
            items=items, indexes=error.indexes, final_indexes=error.final_indexes, final=error.final
        )
    if isinstance(error, ControlFlow):
        if error.__cause__ is not None:
            packed = packed._replace(cause=pack_error(error.__cause__))
        error = copy.copy(error)
        error.args = ()  # the cause may be among them
    return packed._replace(pickled=_pickled(error))


def pack_record(record: logging.LogRecord) -> bytes:
    """Pack a log record to be sent to another process: with its text formatted, and without its traceback."""
    record = copy.copy(record)
    record.msg, record.args = record.getMessage(), None
    if record.exc_info and not record.exc_text:
        record.exc_text = _formatter.formatException(record.exc_info)
    record.exc_info = None
    fields = {
        name: value if type(value) in _PLAIN else _Extra(_pickled(value), _text(value, repr))
        for name, value in vars(record).items()
    }
    return pickle.dumps(fields)


def unpack_record(packed: bytes) -> logging.LogRecord:
    """Return the log record. Values that cannot be unpickled here are replaced by their text."""
    fields: dict[str, Any] = pickle.loads(packed)  # noqa: S301 - from the worker's own processes
    return logging.makeLogRecord(
        {name: value.unpack() if isinstance(value, _Extra) else value for name, value in fields.items()}
    )


class _Extra(NamedTuple):
    """A value that was passed to the logging call in ``extra``."""

    pickled: bytes | None
    text: str

    def unpack(self) -> Any:
        value = None if self.pickled is None else _unpickled(self.pickled)
        return self.text if value is None else value


class _KnownModulesUnpickler(pickle.Unpickler):
    """Refuses classes of modules that are not imported: an import would block the event loop."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def _unpickled(pickled: bytes) -> Any:
    try:
        return _KnownModulesUnpickler(io.BytesIO(pickled)).load()
    except Exception:  # noqa: BLE001 - the user's classes may raise anything when they are unpickled
        return None


def _unpickled_error(pickled: bytes | None) -> BaseException | None:
    value = None if pickled is None else _unpickled(pickled)
    return value if isinstance(value, BaseException) else None


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the user's classes may raise anything when they are pickled
        return None


def _substitute(packed: RemoteError) -> BaseException:
    """Return an error with the same name and text, for one that cannot be unpickled here."""
    name = packed.name.rpartition(".")[2]
    namespace = {"__module__": packed.module, "__qualname__": packed.name}
    error: BaseException = type(name, (TaskError,), namespace)(*([packed.text] if packed.text else []))
    return error


def _text(value: object, text_of: Callable[[Any], str] = str) -> str:
    try:
        return text_of(value)
    except Exception:  # noqa: BLE001 - an exception whose __str__ fails is still sent
        return ""


def _traceback(error: BaseException) -> str:
    """Format the traceback without the frames of this library before the task's."""
    start = task_frames(error)
    if start is None:
        return ""
    try:
        return "".join(traceback.format_exception(type(error), error, start))
    except Exception:  # noqa: BLE001 - an exception that cannot be formatted is still sent
        return ""
