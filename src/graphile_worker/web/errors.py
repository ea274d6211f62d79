"""Errors that a response tells: each has a status and a word for programs."""

from __future__ import annotations

from http import HTTPStatus

from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    GraphileWorkerError,
    InvalidJobError,
    JobSkippedError,
    SchemaError,
)
from graphile_worker.web.models import Problem


class WebError(GraphileWorkerError):
    """A request that cannot be answered as asked."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"


class InvalidRequestError(WebError):
    """The request cannot be read, or one of its values is invalid."""


class NotFoundError(WebError):
    """There is no such thing."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class ForbiddenError(WebError):
    """The viewer lacks a permission, or the dashboard is read-only."""

    status = HTTPStatus.FORBIDDEN
    code = "forbidden"


class TooLargeError(WebError):
    """The request has more bytes than a dashboard needs."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "too_large"


class BusyError(WebError):
    """Too many operations run in the background."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "busy"


class ChangedCountError(WebError):
    """Another number of jobs matches than the viewer expected."""

    status = HTTPStatus.CONFLICT
    code = "count_changed"

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(
            f"{found:,} jobs match now, and {expected:,} were expected. Look at the jobs again, and repeat "
            "the action."
        )
        self.expected, self.found = expected, found


class UnknownCountError(WebError):
    """The jobs could not be counted in time, so their number cannot be compared with an expected one."""

    status = HTTPStatus.CONFLICT
    code = "count_unknown"

    def __init__(self, expected: int) -> None:
        super().__init__(
            f"The jobs that match could not be counted in time, and {expected:,} were expected. Nothing was "
            "changed. Use a filter that selects fewer jobs, or repeat the action without an expected count."
        )


class QueryTimeoutError(DatabaseError):
    """A query took longer than the dashboard allows."""


def problem_of(error: Exception) -> Problem:
    """Return what a response says about an error."""
    if isinstance(error, WebError):
        status, code, detail = error.status, error.code, str(error)
    elif isinstance(error, InvalidJobError):
        status, code, detail = HTTPStatus.BAD_REQUEST, error.code or "invalid_request", str(error)
    elif isinstance(error, JobSkippedError):
        status, code, detail = HTTPStatus.CONFLICT, "job_skipped", str(error)
    elif isinstance(error, QueryTimeoutError):
        status, code, detail = HTTPStatus.SERVICE_UNAVAILABLE, "query_timeout", str(error)
    elif isinstance(error, SchemaError):
        status, code, detail = HTTPStatus.SERVICE_UNAVAILABLE, "schema", str(error)
    elif isinstance(error, DatabaseError):
        status, code, detail = HTTPStatus.SERVICE_UNAVAILABLE, "database", str(error)
    elif isinstance(error, ConfigurationError):
        status, code, detail = HTTPStatus.INTERNAL_SERVER_ERROR, "configuration", str(error)
    elif isinstance(getattr(error, "status_code", None), int):  # Starlette's: no route, wrong method
        status = HTTPStatus(error.status_code)  # type: ignore[attr-defined]
        code = "not_found" if status is HTTPStatus.NOT_FOUND else "invalid_request"
        detail = "There is no such page." if status is HTTPStatus.NOT_FOUND else status.description
    else:
        status, code = HTTPStatus.INTERNAL_SERVER_ERROR, "internal"
        detail = "An error of the dashboard itself. The program's log has its traceback."
    return Problem(title=status.phrase, status=status, detail=detail, code=code)
