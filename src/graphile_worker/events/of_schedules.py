"""What a worker tells of recurring tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from graphile_worker.events.of_workers import PoolEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from graphile_worker.job import JobSpec


class CronJob(NamedTuple):
    """A job of a schedule."""

    identifier: str
    """The schedule's."""
    job: JobSpec


class CronStarting(PoolEvent, frozen=True, kw_only=True):
    """It is about to look for minutes that nobody was there for, before `start`."""

    name: ClassVar[str] = "cron:starting"
    start: datetime


class CronStarted(PoolEvent, frozen=True, kw_only=True):
    """It has, and waits for the minutes after `start`."""

    name: ClassVar[str] = "cron:started"
    start: datetime


class CronBackfill(PoolEvent, frozen=True, kw_only=True):
    """These are made up for. Some may not be added, for others may have added them."""

    name: ClassVar[str] = "cron:backfill"
    timestamp: datetime
    items_to_backfill: Sequence[CronJob]


class CronPrematureTimer(PoolEvent, frozen=True, kw_only=True):
    """The clock was set back: it is not yet the minute that was waited for."""

    name: ClassVar[str] = "cron:prematureTimer"
    current_timestamp: datetime
    expected_timestamp: datetime


class CronOverdueTimer(PoolEvent, frozen=True, kw_only=True):
    """It is later than it should be, and there is something to catch up with."""

    name: ClassVar[str] = "cron:overdueTimer"
    current_timestamp: datetime
    expected_timestamp: datetime


class CronSchedule(PoolEvent, frozen=True, kw_only=True):
    """These jobs are due in that minute, and are about to be added, by this worker or by another."""

    name: ClassVar[str] = "cron:schedule"
    timestamp: datetime
    jobs_and_identifiers: Sequence[CronJob]


class CronScheduled(PoolEvent, frozen=True, kw_only=True):
    """These jobs of that minute were added, by this worker."""

    name: ClassVar[str] = "cron:scheduled"
    timestamp: datetime
    jobs_and_identifiers: Sequence[CronJob]
