"""Errors that a response tells: each has a status and a word for programs."""

from __future__ import annotations

from http import HTTPStatus

from graphile_worker.errors import DatabaseError, GraphileWorkerError
from graphile_worker.web.models import Problem


class WebError(GraphileWorkerError):
    """A request that cannot be answered as asked."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"

    def problem(self) -> Problem:
        """Return what the response says."""
        return Problem(title=self.status.phrase, status=self.status, detail=str(self), code=self.code)


class NotFoundError(WebError):
    """There is no such thing."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class ForbiddenError(WebError):
    """The viewer lacks a permission, or the dashboard is read-only."""

    status = HTTPStatus.FORBIDDEN
    code = "forbidden"


class ChangedCountError(WebError):
    """Another number of jobs matches than the viewer expected."""

    status = HTTPStatus.CONFLICT
    code = "count_changed"

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(
            f"{found} jobs match now, and {expected} were expected. Look at the jobs again, and repeat the action."
        )
        self.expected, self.found = expected, found


class QueryTimeoutError(DatabaseError):
    """A query took longer than the dashboard allows."""
