"""The answers of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.web.models import Problem


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a value as JSON. Payloads are as they are stored."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")


def problem_response(problem: Problem) -> Response:
    """Answer with an error, as RFC 9457 has it."""
    return Response(msgspec.json.encode(problem), problem.status, media_type="application/problem+json")
