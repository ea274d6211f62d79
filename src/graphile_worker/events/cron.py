"""Events about recurring tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from graphile_worker.events.base import PoolEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from graphile_worker.job import JobSpec


class CronJob(NamedTuple):
    """A job that a cron item adds."""

    identifier: str
    """The identifier of the cron item."""
    job: JobSpec


class CronStarting(PoolEvent, frozen=True, kw_only=True):
    """The scheduler is about to add the jobs that were missed before `start`."""

    name: ClassVar[str] = "cron:starting"
    start: datetime


class CronStarted(PoolEvent, frozen=True, kw_only=True):
    """The scheduler has added the missed jobs, and waits for the minutes after `start`."""

    name: ClassVar[str] = "cron:started"
    start: datetime


class CronBackfill(PoolEvent, frozen=True, kw_only=True):
    """These jobs were missed and are about to be added, unless another worker has added them."""

    name: ClassVar[str] = "cron:backfill"
    timestamp: datetime
    items_to_backfill: Sequence[CronJob]


class CronPrematureTimer(PoolEvent, frozen=True, kw_only=True):
    """The timer fired before its minute, because the clock was set back."""

    name: ClassVar[str] = "cron:prematureTimer"
    current_timestamp: datetime
    expected_timestamp: datetime


class CronOverdueTimer(PoolEvent, frozen=True, kw_only=True):
    """The timer fired late, and the scheduler catches up."""

    name: ClassVar[str] = "cron:overdueTimer"
    current_timestamp: datetime
    expected_timestamp: datetime


class CronSchedule(PoolEvent, frozen=True, kw_only=True):
    """These jobs are due in this minute, and are about to be added by this worker or another."""

    name: ClassVar[str] = "cron:schedule"
    timestamp: datetime
    jobs_and_identifiers: Sequence[CronJob]


class CronScheduled(PoolEvent, frozen=True, kw_only=True):
    """This worker added these jobs of this minute."""

    name: ClassVar[str] = "cron:scheduled"
    timestamp: datetime
    jobs_and_identifiers: Sequence[CronJob]
