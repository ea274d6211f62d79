"""The endpoints of the API."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.routing import Route

from graphile_worker.errors import ConfigurationError
from graphile_worker.web.api import openapi, parameters
from graphile_worker.web.api.responses import json_response
from graphile_worker.web.errors import BusyError, InvalidRequestError, NotFoundError, TooLargeError
from graphile_worker.web.filters import Filter, parse_filter
from graphile_worker.web.models import (
    ActionPreview,
    ActionResult,
    Attempt,
    CronPage,
    DoctorReport,
    FailurePage,
    JobDetail,
    JobPage,
    JobRow,
    Operation,
    Overview,
    QueuePage,
    Scaling,
    Series,
    TaskDetail,
    TaskPage,
    WorkerPage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.auth import Access
    from graphile_worker.web.broadcaster import Broadcaster
    from graphile_worker.web.dashboard import Dashboard

PREFIX = "/api/v1"
_MAX_BODY = 1_000_000
_LISTS = {"flag"}


class Call:
    """A request to an endpoint, read."""

    def __init__(self, dashboard: Dashboard, request: Request, query: Any, body: Any) -> None:
        self.dashboard = dashboard
        self.data, self.operations = dashboard.data, dashboard.operations
        self.request = request
        self.query: Any = query
        self.body: Any = body
        self.access: Access = request.state.access
        self.path: dict[str, str] = request.path_params


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint, declared once for the router and for OpenAPI."""

    method: str
    path: str
    summary: str
    run: Callable[[Call], Awaitable[Any]]
    answers: tuple[Any, ...]
    """The types of the answer."""
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    needs_body: bool = True
    statuses: tuple[int, ...] = (200,)
    media_type: str = "application/json"

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.run.__name__

    async def call(self, dashboard: Dashboard, request: Request) -> Response:
        """Answer a request."""
        query = _read_query(request, self.query or parameters.NoQuery)
        body = None if self.body is None else await self._read_body(dashboard, request)
        answer = await self.run(Call(dashboard, request, query, body))
        if isinstance(answer, StreamingResponse):
            return answer
        if isinstance(answer, ActionResult) and answer.operation is not None:
            place = f"{request.state.link_root}{PREFIX}/operations/{answer.operation}"
            return json_response(answer, HTTPStatus.ACCEPTED, {"Location": place})
        return json_response(answer, self.statuses[0])

    async def _read_body(self, dashboard: Dashboard, request: Request) -> Any:
        limit = _MAX_BODY
        if self.body is parameters.AddJobBody:
            limit += dashboard.queue.utils._session.max_payload_size  # noqa: SLF001 - the library's own
        received = bytearray()
        async for chunk in request.stream():
            received += chunk
            if len(received) > limit:
                raise TooLargeError(f"The body has more than {limit:,} bytes.")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if received and kind != "application/json":
            raise InvalidRequestError("The body must be JSON. Send Content-Type: application/json.")
        try:
            return msgspec.json.decode(received or (b"" if self.needs_body else b"{}"), type=self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"The body is invalid: {error}") from None


def _read_query(request: Request, kind: type[msgspec.Struct]) -> Any:
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in _LISTS:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidRequestError(f"The parameter {name[:60]!r} is given twice.")
        else:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"A parameter is invalid: {error}") from None


async def get_overview(call: Call) -> Overview:
    return await call.data.overview()


async def list_jobs(call: Call) -> JobPage:
    query: parameters.JobsQuery = call.query
    selected = parse_filter(query.q, query.state)
    given = {
        "task": query.task,
        "queue_name": query.queue,
        "key": query.key,
        "flags": query.flag or None,
        "locked_by": query.worker,
        "error_type": query.error,
        "fingerprint": query.fingerprint,
        "search": query.search,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if twice := [name for name in changes if getattr(selected, name) not in (None, ())]:
        raise InvalidRequestError(
            f"q and another parameter both select by {', '.join(twice)}. Use one of them."
        )
    return await call.data.jobs(
        selected.replace(**changes), call.access, cursor=query.cursor, limit=query.limit, sort=query.sort
    )


async def get_job(call: Call) -> JobDetail:
    job = await call.data.job(call.path["id"], call.access)
    if job is None:
        raise NotFoundError(
            f"There is no job {call.path['id'][:40]!r}, and the history has no attempt of it."
        )
    return job


async def get_job_history(call: Call) -> list[Attempt]:
    return (await get_job(call)).history


async def list_tasks(call: Call) -> TaskPage:
    return await call.data.tasks()


async def get_task(call: Call) -> TaskDetail:
    task = await call.data.task(call.path["id"])
    if task is None:
        raise NotFoundError(f"Nothing is known about a task {call.path['id'][:80]!r}.")
    return task


async def list_queues(call: Call) -> QueuePage:
    return await call.data.queues(call.query.search, limit=call.query.limit)


async def list_workers(call: Call) -> WorkerPage:
    return await call.data.workers()


async def list_cron(call: Call) -> CronPage:
    return await call.data.cron()


async def list_failures(call: Call) -> FailurePage:
    return await call.data.failures(call.query.window, task=call.query.task)


async def get_series(call: Call) -> Series:
    query: parameters.SeriesQuery = call.query
    try:
        return await call.data.series(query.metric, task=query.task, since=query.since, step=query.step)
    except ConfigurationError as error:
        raise InvalidRequestError(str(error)) from None


async def get_scaling(call: Call) -> Scaling:
    return await call.data.scaling()


async def examine(call: Call) -> DoctorReport:
    return await call.data.doctor()


async def add_job(call: Call) -> JobRow:
    body: parameters.AddJobBody = call.body
    options = {
        name: getattr(body, name)
        for name in ("queue_name", "run_at", "max_attempts", "job_key", "job_key_mode", "priority", "flags")
    }
    given = {name: value for name, value in options.items() if value is not None}
    return await call.operations.add(body.task, bytes(body.payload).decode(), call.access, **given)


async def act_on_jobs(call: Call) -> ActionPreview | ActionResult:
    body: parameters.ActionBody = call.body
    if (body.ids is None) == (body.filter is None):
        raise InvalidRequestError("Pass either ids or filter.")
    selected: Filter | list[str] = body.ids or []
    if body.filter is not None:
        selected = parse_filter(body.filter.q, body.filter.state)
    if body.dry_run:
        return await call.operations.preview(body.action, selected, call.access)
    return await call.operations.act(
        body.action,
        selected,
        call.access,
        expected_count=body.expected_count,
        run_at=None if body.run_at is None else body.run_at.isoformat(),
        priority=body.priority,
        attempts=body.attempts,
        max_attempts=body.max_attempts,
        reason=body.reason,
    )


async def run_cron(call: Call) -> JobRow:
    return await call.operations.run_cron(call.path["id"], call.access)


async def maintain(call: Call) -> dict[str, Any]:
    body: parameters.MaintenanceBody = call.body
    return await call.operations.maintain(
        call.path["what"], call.access, dry_run=body.dry_run, worker_ids=body.worker_ids
    )


async def list_operations(call: Call) -> list[Operation]:
    return call.operations.list(call.access)


async def get_operation(call: Call) -> Operation:
    return _known(call, call.operations.get(call.path["id"], call.access))


async def stop_operation(call: Call) -> Operation:
    return _known(call, call.operations.stop(call.path["id"], call.access))


def _known(call: Call, operation: Operation | None) -> Operation:
    if operation is None:
        raise NotFoundError(
            f"This process knows no operation {call.path['id'][:40]!r}. It forgets them when it ends."
        )
    return operation


async def stream_changes(call: Call) -> StreamingResponse:
    broadcaster = call.dashboard.queue.broadcaster
    user = call.access.user
    if not broadcaster.accepts(user):
        raise BusyError("Too many browsers listen to this process.")
    headers = {"X-Accel-Buffering": "no"}  # nginx would hold the events back
    return StreamingResponse(_changes(broadcaster, user), headers=headers, media_type="text/event-stream")


async def _changes(broadcaster: Broadcaster, user: str) -> AsyncIterator[str]:
    async with broadcaster.viewer(user) as viewer:
        async for text in viewer.changes():
            yield text


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/overview",
        summary="The state of the queue",
        run=get_overview,
        answers=(Overview,),
    ),
    Endpoint(
        method="GET",
        path="/jobs",
        summary="Jobs, page by page",
        run=list_jobs,
        answers=(JobPage,),
        query=parameters.JobsQuery,
    ),
    Endpoint(
        method="POST",
        path="/jobs",
        summary="Add a job",
        run=add_job,
        answers=(JobRow,),
        body=parameters.AddJobBody,
        statuses=(201,),
    ),
    Endpoint(
        method="POST",
        path="/jobs/actions",
        summary="Change jobs, or preview the change",
        run=act_on_jobs,
        answers=(ActionPreview, ActionResult),
        body=parameters.ActionBody,
        statuses=(200, 202),
    ),
    Endpoint(method="GET", path="/jobs/{id}", summary="A job", run=get_job, answers=(JobDetail,)),
    Endpoint(
        method="GET",
        path="/jobs/{id}/history",
        summary="The attempts of a job",
        run=get_job_history,
        answers=(list[Attempt],),
    ),
    Endpoint(
        method="GET",
        path="/failures",
        summary="Failures by task and error",
        run=list_failures,
        answers=(FailurePage,),
        query=parameters.FailuresQuery,
    ),
    Endpoint(method="GET", path="/tasks", summary="All tasks", run=list_tasks, answers=(TaskPage,)),
    Endpoint(method="GET", path="/tasks/{id:path}", summary="A task", run=get_task, answers=(TaskDetail,)),
    Endpoint(
        method="GET",
        path="/queues",
        summary="The busiest serial queues",
        run=list_queues,
        answers=(QueuePage,),
        query=parameters.QueuesQuery,
    ),
    Endpoint(method="GET", path="/workers", summary="All workers", run=list_workers, answers=(WorkerPage,)),
    Endpoint(method="GET", path="/cron", summary="All recurring tasks", run=list_cron, answers=(CronPage,)),
    Endpoint(
        method="POST",
        path="/cron/{id:path}/run",
        summary="Run a recurring task now",
        run=run_cron,
        answers=(JobRow,),
        statuses=(201,),
    ),
    Endpoint(
        method="GET",
        path="/series",
        summary="A metric over time",
        run=get_series,
        answers=(Series,),
        query=parameters.SeriesQuery,
    ),
    Endpoint(
        method="GET", path="/scaling", summary="How much work there is", run=get_scaling, answers=(Scaling,)
    ),
    Endpoint(
        method="GET", path="/doctor", summary="What the doctor finds", run=examine, answers=(DoctorReport,)
    ),
    Endpoint(
        method="POST",
        path="/maintenance/{what}",
        summary="Sweep, unlock or clean up",
        run=maintain,
        answers=(dict[str, Any],),
        body=parameters.MaintenanceBody,
        needs_body=False,
    ),
    Endpoint(
        method="GET",
        path="/operations",
        summary="Changes in the background",
        run=list_operations,
        answers=(list[Operation],),
    ),
    Endpoint(
        method="GET",
        path="/operations/{id}",
        summary="A change in the background",
        run=get_operation,
        answers=(Operation,),
    ),
    Endpoint(
        method="POST",
        path="/operations/{id}/stop",
        summary="Stop a change in the background",
        run=stop_operation,
        answers=(Operation,),
    ),
    Endpoint(
        method="GET",
        path="/events",
        summary="A stream of the regions that change",
        run=stream_changes,
        answers=(),
        media_type="text/event-stream",
    ),
)


def api_routes(dashboard: Dashboard) -> list[Route]:
    """Return the routes of the API."""

    def route(endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            return await endpoint.call(dashboard, request)

        made = Route(PREFIX + endpoint.path, answer, methods=[endpoint.method])
        if endpoint.run is stream_changes:
            made.methods = {endpoint.method}  # not HEAD, because the answer would not end
        return made

    async def describe(request: Request) -> Response:
        return json_response(openapi.describe(ENDPOINTS, request.state.link_root))

    return [Route(f"{PREFIX}/openapi.json", describe, methods=["GET"]), *map(route, ENDPOINTS)]
