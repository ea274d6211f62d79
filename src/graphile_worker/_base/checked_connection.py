"""A caller's connection, checked for a transaction at the line of the user's code that calls the library."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graphile_worker.errors import AutocommitWarning, ConfigurationError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class CallSite(NamedTuple):
    """A line of code."""

    filename: str
    line: int
    module_globals: dict[str, Any]

    def warn(self, message: str, category: type[Warning]) -> None:
        """Warn at this line. Python's filters decide whether a line is warned of once or always."""
        warnings.warn_explicit(
            message,
            category,
            self.filename,
            self.line,
            module=self.module_globals.get("__name__"),
            registry=self.module_globals.setdefault("__warningregistry__", {}),
        )


def find_call_site() -> CallSite:
    """Return the innermost line outside this package."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to read the stack without its source lines
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def in_transaction_if_required(connection: Any, *, require_transaction: bool) -> Any:
    """Return the connection, to be refused if a transaction is required and the connection is not in one.

    Raises:
        ConfigurationError: A transaction is required, and no connection is given.
    """
    if not require_transaction:
        return connection
    if connection is None:
        raise ConfigurationError(
            "require_transaction=True needs connection=, the connection or session of your transaction. "
            "Without it, the job is committed immediately."
        )
    return CheckedConnection(connection, require=True)


class _HasTransaction(Protocol):
    @property
    def in_transaction(self) -> bool: ...


class CheckedConnection:
    """A caller's connection that is checked for a transaction before an operation.

    Args:
        connection: The connection or session; it may already be checked.
        require: Whether to refuse a connection that is not in a transaction.
        warn: Whether to warn of it, at the line of code that calls the library now.
    """

    def __init__(self, connection: Any, *, require: bool = False, warn: bool = False) -> None:
        inner = connection if isinstance(connection, CheckedConnection) else None
        self.connection: Any = connection if inner is None else inner.connection
        self.require: bool = require or (inner is not None and inner.require)
        self._call_site = find_call_site() if warn else None
        self.in_transaction = False
        """Whether the connection was in a transaction when it was checked."""

    def check(self, driver: _HasTransaction) -> None:
        """Refuse the connection, or warn, if it is not in a transaction."""
        self.in_transaction = driver.in_transaction
        if self.in_transaction:
            return
        if self.require:
            raise ConfigurationError(
                "connection= is not in a transaction, so the change would be committed immediately, and "
                "require_transaction is set. Begin a transaction first."
            )
        if self._call_site is not None:
            self._call_site.warn(
                "connection= is not in a transaction, so the job is committed immediately and stays even if "
                "later statements fail. Begin a transaction first, for example with `async with "
                "connection.transaction():`. If the commit is intended, leave out connection=, or ignore "
                "graphile_worker.errors.AutocommitWarning.",
                AutocommitWarning,
            )


class DefaultConnection(CheckedConnection):
    """The connection that an app uses if the caller names none. In autocommit there is no warning."""


class AutocommitConnection(CheckedConnection):
    """A caller's connection that must not be in a transaction, because the caller waits for the job.

    Args:
        connection: The connection or session; it may already be checked.
    """

    def check(self, driver: _HasTransaction) -> None:
        """Refuse the connection if it is in a transaction."""
        if driver.in_transaction:
            raise ConfigurationError(
                "connection= is in a transaction, so call would wait forever: no worker sees the job before "
                "the commit. Use enqueue, commit, and then wait with job.result(). Or leave out connection=."
            )
