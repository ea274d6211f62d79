"""What is stored about an exception, besides its message: its type, and its traceback."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MAX_FRAMES = 50
_MAX_STACK = 5
_MAX_LENGTH = 8_000
_HEAD = 1_000
_OWN_MODULES = ("builtins", "graphile_worker.")


def error_type(error: BaseException) -> str:
    """Return the name of an exception's type, with its module unless it is built in or of this library.

    >>> error_type(ValueError())
    'ValueError'
    >>> import json
    >>> error_type(json.JSONDecodeError("no", "", 0))
    'json.decoder.JSONDecodeError'
    """
    kind = type(error)
    module = str(getattr(kind, "__module__", ""))
    name = kind.__qualname__.replace("<locals>.", "")
    return name if not module or module.startswith(_OWN_MODULES) else f"{module}.{name}"


def task_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of this library before those of the task; None if none is left.

    The frames of this library are the same for each task, and say nothing about the error.
    """
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        start = start.tb_next
    return start


def format_traceback(error: BaseException) -> str | None:
    """Return the traceback of an exception and its causes, trimmed to the frames of the task.

    A long text is shortened in the middle. None if no code of the task was running.
    """
    remote: str | None = getattr(error.__cause__, "remote_traceback", None)  # from a task process
    if remote is not None:
        return _shortened(remote)
    try:
        formatted = traceback.TracebackException(
            type(error), error, task_frames(error), limit=-_MAX_FRAMES, compact=True
        )
        kept = _trim_causes(formatted)
        return _shortened("".join(formatted.format())) if kept else None
    except Exception:  # noqa: BLE001 - the exception's own methods may raise anything
        return None


def format_stack(frame: FrameType | None) -> str:
    """Return the innermost frames as in a traceback, without those of this library."""
    frames = [] if frame is None else traceback.extract_stack(frame)
    user_frames = [entry for entry in frames if not entry.filename.startswith(_PACKAGE)]
    return "".join(traceback.format_list((user_frames or frames)[-_MAX_STACK:])).rstrip()


def _trim_causes(formatted: traceback.TracebackException) -> bool:
    """Remove the frames of this library before those of the task. Returns whether any frame is left."""
    pending, is_left = [formatted], False
    while pending:
        one = pending.pop()
        stack = list(one.stack)
        while stack and stack[0].filename.startswith(_PACKAGE):
            del stack[0]
        one.stack = traceback.StackSummary.from_list(stack)
        is_left = is_left or bool(stack)
        pending += [cause for cause in (one.__cause__, one.__context__, *(one.exceptions or ())) if cause]
    return is_left


def _shortened(text: str) -> str:
    text = text.rstrip()
    if len(text) <= _MAX_LENGTH:
        return text
    left_out = len(text) - _MAX_LENGTH
    return f"{text[:_HEAD]}\n  … {left_out:,} characters left out …\n{text[left_out + _HEAD :]}"
