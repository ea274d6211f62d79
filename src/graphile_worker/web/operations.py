"""`Operations`: what pages and the API change. Each method checks the viewer's permission itself."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._base.payload import decode_payload
from graphile_worker._client.administration import CleanupTask
from graphile_worker._client.bulk import Change
from graphile_worker._db.connection.error_mapping import is_timeout
from graphile_worker._db.queries.web_writes import waited_for_lock
from graphile_worker.errors import DatabaseError, GraphileWorkerError, PoolTimeoutError
from graphile_worker.events.dashboard import DashboardAction
from graphile_worker.job import SMALLINT, JobSpec, JobState, check_integer, read_instant
from graphile_worker.web.auth import Permission
from graphile_worker.web.errors import (
    BusyError,
    ChangedCountError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    QueryTimeoutError,
    UnknownCountError,
)
from graphile_worker.web.filters import Filter, format_filter, read_ids
from graphile_worker.web.job_data import job_row
from graphile_worker.web.models import ActionPreview, ActionResult, Count, JobRow, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence, Sequence

    from graphile_worker.app import App
    from graphile_worker.job import Job
    from graphile_worker.web.auth import Access
    from graphile_worker.web.dashboard import Queue
    from graphile_worker.web.data import QueueData

PERMISSIONS = {
    "retry": Permission.RETRY,
    "run_now": Permission.RETRY,
    "reschedule": Permission.EDIT,
    "cancel": Permission.CANCEL,
    "fail": Permission.CANCEL,
    "complete": Permission.CANCEL,
    "remove": Permission.REMOVE,
}
"""The permission that each action on jobs needs."""
MAX_IDS = 1000
"""Jobs that a request may name, and that are changed before it is answered."""
JOB_OPTIONS = ("queue_name", "run_at", "max_attempts", "job_key", "job_key_mode", "priority", "flags")
MAINTENANCE = ("sweep", "unlock", "cleanup")
_SAMPLE = 10
_MAX_RUNNING = 4
_MAX_KEPT = 50
_MAX_REASON = 10_000
_MAX_DRY_SWEEP = 60.0
_HIDDEN = "a filter that you may not see"


class _Progress:
    """An operation that runs, and whether it should stop."""

    def __init__(self, operation: Operation, *, names_payloads: bool) -> None:
        self.operation = operation
        self.is_stopped = False
        self._names_payloads = names_payloads

    def shown_to(self, access: Access) -> Operation:
        """Return the operation, without the filter if it tells of payloads that the viewer may not see."""
        if not self._names_payloads or access.allows(Permission.VIEW_PAYLOAD):
            return self.operation
        return msgspec.structs.replace(self.operation, filter=_HIDDEN)

    def update(self, **changes: Any) -> None:
        self.operation = msgspec.structs.replace(self.operation, **changes)


class Operations:
    """Changes one queue. Each change checks the permission, and emits a `DashboardAction`.

    `selected` is a `Filter`, or ids as text. An action on at most 1,000 jobs is done when the method
    returns. Otherwise it goes on in the background, batch by batch, and the result names the `Operation`.

    Args:
        queue: The schema, and its client.
        app: The app, for its tasks, recurring tasks and events.
        data: Reads the queue.
        read_only: Whether to refuse all changes.

    Raises:
        ForbiddenError: The viewer may not do this, or the dashboard is read-only.
        ChangedCountError: `expected_count` is not the number of jobs that match now.
        UnknownCountError: There is an `expected_count`, and the jobs could not be counted in time.
        InvalidJobError: An argument is invalid.
    """

    def __init__(self, queue: Queue, app: App, data: QueueData, *, read_only: bool) -> None:
        self._queue = queue
        self._app = app
        self._data = data
        self._read_only = read_only
        self._known: dict[str, _Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def preview(self, action: str, selected: Filter | Sequence[str], access: Access) -> ActionPreview:
        """Return how many jobs the action applies to, and the first of them."""
        change = self._check_action(action, access, {})
        notices: list[str] = []
        skipped = 0
        if isinstance(selected, Filter):
            bounded, searched = await self._data.bound(selected, access)
            filters = {**bounded.parameters(), **dict.fromkeys(change.conditions, True)}
            count = await self._count(bounded, change, notices)
            if searched.newest is not None:
                notices.append(f"Only the newest {searched.newest:,} jobs are searched and changed.")
        else:
            ids = _check_ids(selected)
            found = await self._data.find_changeable(ids, change)
            filters = {"having_id_any": found}
            count, skipped = Count(value=len(found)), len(ids) - len(found)
        sample = await self._data.sample(filters, _SAMPLE)
        return ActionPreview(action=action, count=count, sample=sample, skipped=skipped, notices=notices)

    async def act(
        self,
        action: str,
        selected: Filter | Sequence[str],
        access: Access,
        *,
        expected_count: int | None = None,
        run_at: str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
        reason: str | None = None,
    ) -> ActionResult:
        """Change jobs.

        Args:
            action: ``retry``, ``run_now``, ``reschedule``, ``cancel``, ``fail``, ``complete`` or ``remove``.
            selected: Which jobs.
            access: What the viewer may do.
            expected_count: The number of jobs that the viewer has seen. If it has changed, no job is. Jobs
                that begin to match later do not raise the number of jobs that are changed.
            run_at: For ``reschedule``: ISO 8601 text with an offset.
            priority: For ``reschedule``.
            attempts: For ``reschedule``.
            max_attempts: For ``reschedule``.
            reason: For ``cancel`` and ``fail``.
        """
        given = {"run_at": run_at, "priority": priority, "attempts": attempts, "max_attempts": max_attempts}
        change = self._check_action(action, access, {**given, "reason": reason})
        if action == "reschedule" and not any(value is not None for value in given.values()):
            raise InvalidRequestError("reschedule needs run_at, priority, attempts or max_attempts.")
        if not isinstance(selected, Filter):
            ids = _check_ids(selected)
            if expected_count is not None and expected_count != len(ids):
                found = await self._data.find_changeable(ids, change)
                if len(found) != expected_count:
                    raise ChangedCountError(expected_count, len(found))
            return await self._act_now(action, change, ids, access, ", ".join(selected[:20]), len(ids))
        bounded, _ = await self._data.bound(selected, access)
        target, few = _target(bounded), await self._find_few(bounded, change)
        count = await self._count(bounded, change, []) if few is None else Count(value=len(few))
        if expected_count is not None and not count.exact:
            raise UnknownCountError(expected_count)
        if expected_count is not None and count.value != expected_count:
            raise ChangedCountError(expected_count, count.value)
        if few is not None:
            # With the filter too, because a job may no longer match when it is changed.
            these = bounded.replace(ids=tuple(few))
            return await self._act_now(action, change, these if few else few, access, target, len(few))
        progress = self._begin(action, bounded, access, count)
        task = asyncio.create_task(self._run(progress, change, bounded, expected_count))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ActionResult(action=action, changed=0, operation=progress.operation.id)

    async def add(self, task: str, payload: str, access: Access, **options: Any) -> JobRow:
        """Add a job.

        Args:
            task: Identifier of the task. If the app has it, the payload is checked, and its options apply.
            payload: JSON text.
            access: What the viewer may do.
            options: queue_name, run_at, max_attempts, job_key, job_key_mode, priority and flags. A key needs
                the permission to edit, unless the mode is ``unsafe_dedupe``.
        """
        self._require(access, Permission.ADD)
        if unknown := options.keys() - set(JOB_OPTIONS):
            raise InvalidRequestError(f"Unknown option {', '.join(sorted(unknown))[:60]!r}.")
        given: Any = {name: value for name, value in options.items() if value not in (None, "")}
        try:
            value = decode_payload(payload or "{}")
        except ValueError as error:
            raise InvalidRequestError(f"The payload is not JSON: {error}") from None
        if isinstance(given.get("run_at"), str):
            given["run_at"] = read_instant("run_at", given["run_at"])
        spec = JobSpec(task, value, **given)
        if self._is_of_app() and task in self._app.tasks:
            spec = self._app._registry.specs.build(task, value, given)  # noqa: SLF001 - the library's own
        if spec.job_key is not None and spec.job_key_mode != "unsafe_dedupe":
            self._require_edit(access, spec.job_key)
        with _limited():
            job = await self._queue.writer.add_spec(spec)
        self._audit(access, "add", task, 1)
        return _row_of(job)

    def _require_edit(self, access: Access, job_key: str) -> None:
        # Whether there is such a job is not read first, because another one may be added at the same time.
        if not access.allows(Permission.EDIT):
            raise ForbiddenError(
                f"{access.user} lacks the permission 'edit'. A job with the key {job_key[:80]!r} replaces "
                "the waiting job with that key. Leave out the key, or pass job_key_mode unsafe_dedupe, which "
                "changes no other job."
            )

    async def run_cron(self, identifier: str, access: Access) -> JobRow:
        """Add the job of a recurring task now."""
        self._require(access, Permission.ADD)
        declared = self._app.cron_items if self._is_of_app() else ()
        item = next((one for one in declared if one.identifier == identifier), None)
        if item is None:
            raise NotFoundError(
                f"This program does not declare the recurring task {identifier[:80]!r} for this schema, so "
                "it cannot run it."
            )
        with _limited():
            job = await self._queue.writer.add_spec(item.job_at(datetime.now(UTC)))
        self._audit(access, "cron", identifier, 1)
        return _row_of(job)

    async def maintain(
        self, what: str, access: Access, *, dry_run: bool = False, worker_ids: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Do what keeps a queue well.

        Args:
            what: ``sweep`` releases the jobs of dead workers. ``unlock`` releases what `worker_ids` have
                locked. ``cleanup`` removes queues without jobs.
            access: What the viewer may do.
            dry_run: Whether to change nothing, and only return what would be done.
            worker_ids: For ``unlock``.
        """
        self._require(access, Permission.MAINTAIN)
        with _limited():
            if what == "sweep":
                result, target, count = await self._sweep(dry_run=dry_run)
            elif what == "unlock":
                result, target, count = await self._unlock(worker_ids, dry_run=dry_run)
            elif what == "cleanup":
                result, target, count = await self._clean_up(dry_run=dry_run)
            else:
                raise NotFoundError(
                    f"Unknown maintenance {what[:40]!r}: it must be one of {', '.join(MAINTENANCE)}."
                )
        if not dry_run:
            self._audit(access, what, target, count)
        return result

    def list(self, access: Access) -> list[Operation]:
        """Return the operations of this process as a viewer may see them, the newest first."""
        return [progress.shown_to(access) for progress in reversed(self._known.values())]

    def get(self, operation_id: str, access: Access) -> Operation | None:
        """Return an operation as a viewer may see it; None if this process does not know it."""
        progress = self._known.get(operation_id)
        return None if progress is None else progress.shown_to(access)

    def stop(self, operation_id: str, access: Access) -> Operation | None:
        """Stop an operation after its current batch."""
        progress = self._known.get(operation_id)
        if progress is None:
            return None
        self._require(access, PERMISSIONS[progress.operation.action])
        progress.is_stopped = True
        return progress.shown_to(access)

    async def close(self) -> None:
        """Stop all operations. Jobs that were changed stay changed."""
        loop = asyncio.get_running_loop()
        running = [task for task in self._tasks if task.get_loop() is loop]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _require(self, access: Access, permission: Permission) -> None:
        if self._read_only:
            raise ForbiddenError("This dashboard is read-only.")
        if not access.allows(permission):
            raise ForbiddenError(f"{access.user} lacks the permission {permission.value!r}.")

    def _check_action(self, action: str, access: Access, arguments: dict[str, Any]) -> Change:
        permission = PERMISSIONS.get(action)
        if permission is None:
            raise InvalidRequestError(
                f"Unknown action {action[:40]!r}: it must be one of {', '.join(PERMISSIONS)}."
            )
        self._require(access, permission)
        reason = arguments.get("reason")
        if reason is not None and (len(reason) > _MAX_REASON or "\0" in reason):
            raise InvalidRequestError(
                f"reason must have at most {_MAX_REASON:,} characters, without null characters."
            )
        changes: dict[str, Callable[[], Change]] = {
            "retry": Change.retry,
            "run_now": Change.run_now,
            "cancel": partial(Change.cancel, reason or ""),
            "fail": partial(Change.fail, reason or f"Failed by {access.user}"),
            "complete": Change.complete,
            "remove": Change.delete,
            "reschedule": partial(_rescheduling, arguments),
        }
        return changes[action]()

    async def _count(self, selected: Filter, change: Change, notices: MutableSequence[str]) -> Count:
        try:
            return Count(value=await self._data.count_changeable(selected, change))
        except QueryTimeoutError:
            notices.append("The number of jobs is an estimate, because counting them took too long.")
            return Count(value=await self._data.estimate(selected), exact=False)

    async def _find_few(self, selected: Filter, change: Change) -> Sequence[int] | None:
        """Return the ids of the jobs to change; None if they are too many, or too slow to find."""
        try:
            found = await self._data.ids_to_change(selected, change, MAX_IDS + 1)
        except QueryTimeoutError:
            return None
        return found if len(found) <= MAX_IDS else None

    async def _act_now(
        self,
        action: str,
        change: Change,
        selected: Filter | Sequence[int],
        access: Access,
        target: str,
        count: int,
    ) -> ActionResult:
        changed: list[int] = []
        requested = 0
        with _limited():
            async with aclosing(self._queue.writer.many.change(change, selected)) as batches:
                async for batch in batches:
                    changed += batch.changed
                    requested += batch.requested
        self._audit(access, action, target, len(changed))
        return ActionResult(
            action=action,
            changed=len(changed),
            requested=requested,
            unchanged=max(0, count - len(changed)),
            ids=[str(one) for one in changed[:MAX_IDS]],
        )

    def _begin(self, action: str, selected: Filter, access: Access, count: Count) -> _Progress:
        running = [one for one in self._known.values() if one.operation.status == "running"]
        if len(running) >= _MAX_RUNNING:
            raise BusyError(f"{len(running)} operations are running. Wait for one of them, or stop it.")
        while len(self._known) >= _MAX_KEPT:
            oldest = next(name for name, one in self._known.items() if one.operation.status != "running")
            del self._known[oldest]
        operation = Operation(
            id=secrets.token_hex(8),
            action=action,
            filter=_target(selected),
            user=access.user,
            status="running",
            total=count,
            seen=0,
            changed=0,
            requested=0,
            started_at=datetime.now(UTC),
        )
        progress = _Progress(operation, names_payloads=selected.reads_payloads)
        self._known[operation.id] = progress
        return progress

    async def _run(self, progress: _Progress, change: Change, selected: Filter, limit: int | None) -> None:
        """Change all jobs, or as many as were expected, batch by batch, each in its own transaction."""
        status: Literal["done", "failed", "stopped"] = "stopped"
        error = None
        try:
            changing = self._queue.writer.many.change(change, selected, limit=limit)
            with _limited():
                async with aclosing(changing) as batches:
                    async for batch in batches:
                        done = progress.operation
                        progress.update(
                            seen=done.seen + batch.seen,
                            changed=done.changed + len(batch.changed),
                            requested=done.requested + batch.requested,
                        )
                        self._queue.broadcaster.tell("operations")
                        if progress.is_stopped:
                            break
                    else:
                        status = "done"
        except GraphileWorkerError as failure:
            status, error = "failed", str(failure)
            logger.warning("An operation of the dashboard failed: %s", failure)
        except Exception:  # it runs in the background, so no caller would report it
            status, error = "failed", "An error of the dashboard itself. The program's log has its traceback."
            logger.exception("An operation of the dashboard failed")
        finally:
            progress.update(status=status, error=error, ended_at=datetime.now(UTC))
            ended = progress.operation
            self._audit_as(ended.user, ended.action, ended.filter, ended.changed)

    async def _sweep(self, *, dry_run: bool) -> tuple[dict[str, Any], str, int]:
        # A sweep releases workers one by one, so only one that releases nothing may be stopped at any time.
        async with asyncio.timeout(_MAX_DRY_SWEEP if dry_run else None):
            found = await self._queue.writer.sweep(dry_run=dry_run)
        workers = [{"id": one.worker.id, "jobs": len(one.jobs), "queues": len(one.queues)} for one in found]
        names = ", ".join(str(one["id"]) for one in workers)
        return {"workers": workers}, names, sum(len(one.jobs) for one in found)

    async def _unlock(self, names: Sequence[str], *, dry_run: bool) -> tuple[dict[str, Any], str, int]:
        if not names or any(not name or "\0" in name for name in names):
            raise InvalidRequestError("unlock needs worker_ids, a list of names as in the column locked_by.")
        known = {one.id: one for one in await self._queue.writer.workers(include_locks=False)}
        for name in names:
            if name in known and known[name].is_alive:
                raise ForbiddenError(
                    f"The worker {name[:80]!r} is alive: its jobs would run twice. Stop it first."
                )
        jobs, queues = await self._data.count_locks(names)
        if not dry_run:
            await self._queue.writer.force_unlock_workers(names)
        return {"jobs": jobs, "queues": queues}, ", ".join(names[:20]), jobs

    async def _clean_up(self, *, dry_run: bool) -> tuple[dict[str, Any], str, int]:
        if dry_run:
            queues = await self._data.count_unused_queues()
        else:
            queues = (await self._queue.writer.cleanup([CleanupTask.GC_JOB_QUEUES])).queues
        return {"queues": queues}, "queues without jobs", queues

    def _is_of_app(self) -> bool:
        return self._queue.utils.schema == self._app.utils.schema

    def _audit(self, access: Access, action: str, target: str, count: int) -> None:
        self._audit_as(access.user, action, target, count)

    def _audit_as(self, user: str, action: str, target: str, count: int) -> None:
        self._data.outdate()
        self._queue.broadcaster.tell("jobs", "counts", "operations")
        logger.info("Dashboard: %r did %s on %r (%d)", user, action, target[:200] or "all", count)
        self._app.events.emit(
            DashboardAction(user=user, action=action, schema=self._queue.schema, target=target, count=count)
        )


@contextmanager
def _limited() -> Iterator[None]:
    """Explain the limits of time that a change has.

    Raises:
        QueryTimeoutError: It took too long.
    """
    try:
        yield
    except TimeoutError as error:
        raise QueryTimeoutError(
            f"This was stopped after {_MAX_DRY_SWEEP:g} s. Nothing was changed. Use graphile-worker sweep."
        ) from error
    except PoolTimeoutError as error:
        raise QueryTimeoutError("Other changes take too long. Wait until they are done.") from error
    except DatabaseError as error:
        if waited_for_lock(error.__cause__):
            raise QueryTimeoutError(
                "The change was stopped, because another transaction has a lock that it needs. Try again "
                "when that transaction has ended."
            ) from error
        if is_timeout(error.__cause__):
            raise QueryTimeoutError("The change was stopped, because it took too long.") from error
        raise


def _rescheduling(arguments: dict[str, Any]) -> Change:
    priority, attempts = arguments.get("priority"), arguments.get("attempts")
    max_attempts, run_at = arguments.get("max_attempts"), arguments.get("run_at")
    for name, value, allowed in (
        ("priority", priority, SMALLINT),
        ("attempts", attempts, range(SMALLINT.stop)),
        ("max_attempts", max_attempts, range(1, SMALLINT.stop)),
    ):
        if value is not None:
            check_integer(name, value, allowed)
    return Change.reschedule(
        run_at=run_at or None, priority=priority, attempts=attempts, max_attempts=max_attempts
    )


def _check_ids(texts: Sequence[str]) -> list[int]:
    ids = sorted(set(read_ids(texts)))
    if not ids:
        raise InvalidRequestError("No job is selected. Pass ids, or a filter.")
    if len(ids) > MAX_IDS:
        raise InvalidRequestError(f"{len(ids):,} ids are given; the maximum is {MAX_IDS:,}. Use a filter.")
    return ids


def _target(selected: Filter) -> str:
    text = format_filter(selected)
    return f"{selected.tab}: {text}" if selected.tab and text else str(selected.tab or text or "all jobs")


def _row_of(job: Job) -> JobRow:
    return job_row(
        {
            "id": job.id,
            "task": job.task_identifier,
            "state": "retrying" if job.state is JobState.SCHEDULED and job.attempts else str(job.state),
            "queue": job.queue_name,
            "key": job.key,
            "priority": job.priority,
            "attempts": job.attempts,
            "max_attempts": job.max_attempts,
            "run_at": job.run_at,
            "created_at": job.created_at,
            "updated_at": job.updated_at,
            "locked_at": job.locked_at,
            "worker": job.locked_by,
            "flags": sorted(job.flags),
            "error": job.last_error,
            "blocked_by": None,
        }
    )
