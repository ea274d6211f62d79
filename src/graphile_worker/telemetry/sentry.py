"""`Sentry`: errors of jobs, and check-ins of recurring tasks. Needs the extra ``graphile-worker[sentry]``.

The program calls ``sentry_sdk.init``. Without that, nothing is sent.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from graphile_worker.errors import BatchError, ConfigurationError, MissingExtraError
from graphile_worker.middleware import Middleware
from graphile_worker.outcome import Retry
from graphile_worker.telemetry.outcomes import reported_error
from graphile_worker.telemetry.run_ends import RunEnds

try:
    import sentry_sdk
    from sentry_sdk import crons
    from sentry_sdk.scope import Scope, use_isolation_scope
    from sentry_sdk.utils import event_from_exception
except ImportError as error:
    raise MissingExtraError("Sentry needs an extra package: pip install 'graphile-worker[sentry]'") from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.context import JobContext
    from graphile_worker.cron import CronItem
    from graphile_worker.job import Job
    from graphile_worker.middleware import AttachedWorker, Running

_MAX_SLUG = 50
_MAX_ITEM_ERRORS = 10
_MOMENT = timedelta(seconds=1)
_NOT_IN_SLUG = re.compile(r"[^a-z0-9_-]+")


class Sentry(Middleware):
    """Errors of jobs and check-ins of recurring tasks for Sentry.

    Pass it as middleware, and call ``sentry_sdk.init`` first. Each job runs in a scope of its own, with tags
    for its task and worker. See docs/production/sentry.md.

    Args:
        errors: ``"all"`` sends the error of each failed attempt, ``"final"`` only that of the last one.
        payloads: Whether to send the payload too. It may contain personal data.
        check_ins: Whether jobs of recurring tasks check in with a monitor, named after the schedule.
        monitor: Settings of these monitors, such as ``{"checkin_margin": 5, "max_runtime": 60}``.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.telemetry.sentry import Sentry
        >>> app = App(dsn=dsn, middleware=[Sentry(errors="final")])
    """

    def __init__(
        self,
        *,
        errors: Literal["all", "final"] = "all",
        payloads: bool = False,
        check_ins: bool = True,
        monitor: Mapping[str, Any] | None = None,
    ) -> None:
        if errors not in {"all", "final"}:
            raise ConfigurationError(f"errors is {errors!r}; it must be 'all' or 'final'.")
        self._only_final = errors == "final"
        self._payloads = payloads
        self._check_ins = check_ins
        self._monitor = dict(monitor or {})
        self._cron_items: dict[str, list[CronItem]] = {}
        self._ends = RunEnds()

    def attach(self, worker: AttachedWorker) -> None:
        """Wait for the outcomes of a worker's jobs."""
        self._ends.attach(worker)
        for item in worker.cron_items:
            known = self._cron_items.setdefault(item.task, [])
            if item not in known:
                known.append(item)
        _drop_logged_errors()

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run a job in a scope of its own."""
        error = None
        with sentry_sdk.isolation_scope() as scope:
            self._describe(scope, ctx)
            report = partial(self._report, scope, ctx.job, self._begin_check_in(ctx))
            try:
                return await proceed()
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._ends.add(ctx, error, report)

    def _describe(self, scope: Scope, ctx: JobContext[Any]) -> None:
        job = ctx.job
        scope.clear_breadcrumbs()
        scope.set_transaction_name(job.task_identifier, source="task")
        scope.set_tag("graphile_worker.task", job.task_identifier)
        scope.set_tag("graphile_worker.worker", ctx.worker_id)
        described: dict[str, Any] = {
            "task": job.task_identifier,
            "job_id": job.id,
            "attempt": job.attempts,
            "max_attempts": job.max_attempts,
            "worker_id": ctx.worker_id,
            "queue_name": job.queue_name,
        }
        if self._payloads:
            described["payload"] = job.payload
        scope.set_context("graphile_worker", described)

    def _report(
        self,
        scope: Scope,
        job: Job,
        check_in: _CheckIn | None,
        outcome: str,
        error: BaseException | None,
    ) -> None:
        with use_isolation_scope(scope):
            if error is not None and self._is_wanted(error, outcome):
                scope.set_tag("graphile_worker.outcome", outcome)
                _capture(error, job)
            if check_in is not None:
                check_in.end(outcome)

    def _is_wanted(self, error: BaseException, outcome: str) -> bool:
        if outcome == "failed":
            return True
        # A task that asks for another attempt has not met an error that it did not expect.
        return not self._only_final and not isinstance(reported_error(error), Retry)

    def _begin_check_in(self, ctx: JobContext[Any]) -> _CheckIn | None:
        cron = ctx.cron
        if not self._check_ins or not isinstance(cron, dict) or cron.get("backfilled"):
            return None
        item = self._item_of(ctx.job, cron)
        config = None
        if item is not None and isinstance(item.match, str):
            schedule = {"type": "crontab", "value": item.match}
            config = {"schedule": schedule, "timezone": str(item.tz or "UTC"), **self._monitor}
        return _CheckIn(ctx.job.task_identifier if item is None else item.identifier, config)

    def _item_of(self, job: Job, cron: dict[str, Any]) -> CronItem | None:
        """Return the schedule that added the job: its task may have several."""
        items = self._cron_items.get(job.task_identifier, [])
        if len(items) < 2:  # noqa: PLR2004
            return next(iter(items), None)
        return next((item for item in items if _fires_at(item, cron.get("ts"))), None)


class _CheckIn:
    """The check-in of one run with a monitor."""

    def __init__(self, schedule: str, config: Any) -> None:
        self._slug = _NOT_IN_SLUG.sub("-", schedule.lower()).strip("-")[:_MAX_SLUG]
        self._config = config
        self._started = monotonic()
        self._id = crons.capture_checkin(
            monitor_slug=self._slug, status="in_progress", monitor_config=self._config
        )

    def end(self, outcome: str) -> None:
        """Tell the monitor the outcome. A job that was snoozed or interrupted goes on later."""
        if outcome in {"snoozed", "interrupted"}:
            return
        crons.capture_checkin(
            monitor_slug=self._slug,
            check_in_id=self._id,
            status="error" if outcome in {"retried", "failed"} else "ok",
            duration=monotonic() - self._started,
            monitor_config=self._config,
        )


def _fires_at(item: CronItem, ts: Any) -> bool:
    try:
        moment = datetime.fromisoformat(ts)
        return item.next_after(moment - _MOMENT) == moment
    except (TypeError, ValueError):
        return False


def _capture(error: BaseException, job: Job) -> None:
    cause = reported_error(error)
    if isinstance(cause, BatchError) and cause.errors:
        cause = BaseExceptionGroup(f"items of job {job.id} failed", cause.errors[:_MAX_ITEM_ERRORS])
    found, hint = event_from_exception(
        cause,
        client_options=sentry_sdk.get_client().options,
        mechanism={"type": "graphile_worker", "handled": False},
    )
    sentry_sdk.capture_event(found, hint=hint)


_is_dropping = False


def _drop_logged_errors() -> None:
    """Drop the events that Sentry makes of log lines about failed jobs: they are reported already."""
    global _is_dropping  # noqa: PLW0603 - once per process
    if not _is_dropping:
        _is_dropping = True
        sentry_sdk.get_global_scope().add_event_processor(_without_logged_job_errors)


def _without_logged_job_errors(found: Any, hint: Any) -> Any:
    record = hint.get("log_record")
    is_outcome = hasattr(record, "outcome") and hasattr(record, "job_id")
    return None if is_outcome else found
