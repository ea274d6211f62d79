"""Detect dead workers, and release their jobs.

Death is observed, not computed. A worker is dead if its heartbeat has not changed for the length of its
lease, measured on the observer's own clock. Comparing times from the database's clock would take jobs from
live workers after an outage, a clock step or a failover. For the same reason, an observer that was
disconnected for a while starts again.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from graphile_worker._base.user_code import call_user_code
from graphile_worker._db.queries import workers as database
from graphile_worker._db.queries.workers import ReleasedLocks, Suspect
from graphile_worker.outcome import storable
from graphile_worker.workers import RecoveredWorker, RecoveryAction, since_boot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.workers import Beat, HeldQueue
    from graphile_worker.job import Job
    from graphile_worker.workers import OnRecovery, WorkerInfo

T = TypeVar("T")
_MAX_INTERVAL = 2.0
_SWEEPS_PER_LEASE = 4
_MAX_GAP = 5.0
"""Seconds between two sweeps after which the observer counts as having been away."""
_MAX_GAP_PER_LEASE = 5 / 8
_HOOK_TIMEOUT = 30.0
_MAX_CONCURRENT_HOOKS = 20


@dataclass(slots=True)
class _Observed:
    """The observations of one worker."""

    beat: str
    since: float
    """When this heartbeat was first read."""
    lost_since: float | None = None
    """Since when the worker has no session; None if it has one, or if sessions prove nothing."""
    has_changed: bool = False
    """Whether the heartbeat has changed since the first observation."""


class Observation:
    """How long each worker has been silent. Times are in seconds, on the observer's clock."""

    def __init__(self, own_id: str | None = None) -> None:
        self._own_id = own_id
        self._observed: dict[str, _Observed] = {}
        self._last: float | None = None

    def record_heartbeats(self, received: float, beats: Iterable[Beat]) -> None:
        """Record the heartbeats that were read from the database."""
        gap = math.inf if self._last is None else received - self._last
        self._last = received
        previous, self._observed = self._observed, {}
        for beat in beats:
            known = previous.get(beat.id)
            # After a gap in the observation, perhaps no worker could reach the database, and this worker may
            # only need longer to come back.
            was_away = gap > min(_MAX_GAP, (beat.fast or beat.seconds) * _MAX_GAP_PER_LEASE)
            if known is None or known.beat != beat.beat or was_away:
                # The silence starts at the latest moment at which the heartbeat may have been written.
                has_changed = known is not None and (known.has_changed or known.beat != beat.beat)
                known = _Observed(beat.beat, received, has_changed=has_changed)
            if not beat.same_epoch or beat.fast is None:
                known.lost_since = None
            self._observed[beat.id] = known

    def record_sessions(self, received: float, checked: Iterable[str], lost: frozenset[str]) -> None:
        """Record which of the checked workers have no session."""
        for worker_id in checked:
            known = self._observed[worker_id]
            if worker_id not in lost:
                known.lost_since = None
            elif known.lost_since is None:
                known.lost_since = received

    def silence(self, worker_id: str, now: float) -> float:
        """Return for how many seconds the worker has been silent under observation."""
        known = self._observed.get(worker_id)
        return 0.0 if known is None else now - known.since

    def silent(self, beats: Iterable[Beat], sent: float) -> list[Beat]:
        """Return the workers that are not declared dead, and whose heartbeat was first read before `sent`."""
        return [
            beat
            for beat in beats
            if not beat.dead and beat.id != self._own_id and self._observed[beat.id].since < sent
        ]

    def unchanged(self, beats: Iterable[Beat]) -> set[str]:
        """Return the workers that are not declared dead and whose heartbeat has never changed."""
        return {
            beat.id
            for beat in beats
            if not beat.dead and beat.id != self._own_id and not self._observed[beat.id].has_changed
        }

    def suspects(self, beats: Iterable[Beat], now: float) -> list[Suspect]:
        """Return the workers whose lease has ended."""
        found = []
        for beat in self.silent(beats, now):
            known = self._observed[beat.id]
            silence = now - known.since
            lost = beat.fast is not None and known.lost_since is not None
            fast = lost and min(silence, now - (known.lost_since or 0.0)) >= (beat.fast or 0.0)
            if fast or silence >= beat.seconds:
                found.append(Suspect(beat.id, beat.beat, silence))
        return found


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """How to release the jobs of a dead worker."""

    delay: float = 0.0
    refund: bool = False
    on_recovery: OnRecovery | None = None
    keep_attempt: Callable[[Job], dict[str, object] | None] = lambda _job: None
    """Returns what the history keeps about the attempt of a job whose worker died; None to keep nothing."""


class _Found(NamedTuple):
    workers: Mapping[str, WorkerInfo]
    jobs: Sequence[Job]
    queues: Sequence[HeldQueue]
    silences: Mapping[str, float]
    died_before: frozenset[int]


@dataclass(kw_only=True)
class Sweeper:
    """Observes the other workers, and releases the locks of dead ones. Call `sweep` again and again."""

    session: Session
    name: str
    """The sweeper's name, recorded with each worker that it declares dead."""
    own_id: str | None = None
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    dry_run: bool = False
    clock: Callable[[], float] = since_boot

    def __post_init__(self) -> None:
        self._observation = Observation(self.own_id)
        self._left_locked: set[tuple[int, datetime | None]] = set()
        """Claims that `on_recovery` decided to leave alone."""
        self._refused: set[tuple[int | str, datetime | None]] = set()
        self._beats: list[Beat] = []

    @property
    def interval(self) -> float:
        """Seconds until the next sweep, shorter if a worker is silent for longer than between two heartbeats.

        Always so short that the sweeper does not count as having been away.
        """
        now = self.clock()
        shortest = min((beat.fast or beat.seconds for beat in self._beats), default=math.inf)
        suspicious = any(
            self._observation.silence(beat.id, now) > beat.seconds / 8
            for beat in self._observation.silent(self._beats, now)
        )
        return min(_MAX_INTERVAL, shortest / _SWEEPS_PER_LEASE) * (0.25 if suspicious else 1.0)

    @property
    def undecided(self) -> set[str]:
        """The workers that are not declared dead and that sent no heartbeat under observation."""
        return self._observation.unchanged(self._beats)

    async def sweep(self, *, all_dead: bool = False) -> list[RecoveredWorker]:
        """Observe all workers once, declare silent ones dead, and release the locks of dead ones.

        Args:
            all_dead: Whether to sweep all workers that were declared dead earlier, not only those that are
            due.
        """
        schema, call = self.session.schema, self._call
        sent = self.clock()
        self._beats = await call(lambda on: database.read_heartbeats(on, schema))
        self._observation.record_heartbeats(self.clock(), self._beats)
        silent = [beat.id for beat in self._observation.silent(self._beats, sent) if beat.same_epoch]
        if silent:
            sent = self.clock()
            lost = await call(lambda on: database.find_lost_sessions(on, schema, silent))
            self._observation.record_sessions(self.clock(), silent, lost)
        suspects = self._observation.suspects(self._beats, sent)
        dead = [beat.id for beat in self._beats if beat.dead and (all_dead or beat.due)]
        if not (suspects or dead):
            return []
        if self.dry_run:
            taken = [*dead, *(suspect.id for suspect in suspects)]
        else:
            # While this sweeper waits for its hook, other sweepers do not call theirs.
            busy = 0.0 if self.policy.on_recovery is None else _HOOK_TIMEOUT
            taken = await call(
                lambda on: database.claim_dead_workers(
                    on, schema, suspects, self.name, all_dead=all_dead, busy=busy
                )
            )
        return await self._recover(taken, {suspect.id for suspect in suspects}) if taken else []

    async def _recover(self, dead: Sequence[str], suspects: set[str]) -> list[RecoveredWorker]:
        found = await self._find_locks(dead)
        released = await self._release(found) if not self.dry_run else self._all_locks(found)
        self._log_refused(found, released)
        recovered = [
            RecoveredWorker(
                worker=worker,
                silence=found.silences[worker.id],
                jobs=[job for job in found.jobs if job.locked_by == worker.id and job.id in released.jobs],
                queues=[
                    queue.name
                    for queue in found.queues
                    if queue.locked_by == worker.id and queue.id in released.queues
                ],
            )
            for worker in found.workers.values()
        ]
        return [one for one in recovered if one.jobs or one.queues or one.worker.id in suspects]

    async def _call(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Run an operation without retries, because the next sweep follows soon."""
        return await self.session.call(operation, attempts=1)

    async def _find_locks(self, dead: Sequence[str]) -> _Found:
        schema, call = self.session.schema, self._call
        workers = {
            worker.id: worker for worker in await call(lambda on: database.read_workers(on, schema, dead))
        }
        held = await call(lambda on: database.read_held_locks(on, schema, list(workers)))
        now = self.clock()
        silences = {worker_id: self._observation.silence(worker_id, now) for worker_id in workers}
        releasable = [
            job
            for job in held.jobs
            if silences[job.locked_by or ""] >= _own_lease(workers[job.locked_by or ""], job.task_identifier)
        ]
        return _Found(workers, releasable, held.queues, silences, held.died_before)

    @staticmethod
    def _all_locks(found: _Found) -> ReleasedLocks:
        return ReleasedLocks({job.id for job in found.jobs}, {queue.id for queue in found.queues}, {}, {})

    def _log_refused(self, found: _Found, released: ReleasedLocks) -> None:
        """Warn once about each lock that the server refuses to release. The next sweep tries again."""
        jobs = [job for job in found.jobs if job.id in released.refused_jobs]
        queues = [queue for queue in found.queues if queue.id in released.refused_queues]
        refused = {(job.id, job.locked_at) for job in jobs} | {(queue.name, None) for queue in queues}
        for job in jobs:
            if (job.id, job.locked_at) not in self._refused:
                self.session.logger.warning(
                    "The database refuses to release job %d (%s) of the dead worker %s: %s. It stays locked",
                    *(job.id, job.task_identifier, job.locked_by, released.refused_jobs[job.id]),
                )
        for queue in queues:
            if (queue.name, None) not in self._refused:
                self.session.logger.warning(
                    "The database refuses to release queue %r of the dead worker %s: %s. It stays locked",
                    *(queue.name, queue.locked_by, released.refused_queues[queue.id]),
                )
        self._refused |= refused

    async def _release(self, found: _Found) -> ReleasedLocks:
        hook_slots = asyncio.Semaphore(_MAX_CONCURRENT_HOOKS)

        async def decide(job: Job) -> dict[str, object] | None:
            worker = found.workers[job.locked_by or ""]
            async with hook_slots:
                decision = await self._decide(job, worker)
            if decision.action == "leave":
                return None
            if decision.action == "default" and job.id not in found.died_before:
                # After a second death in a row the job waits as after a failure, because it may be the cause.
                decision = msgspec.structs.replace(decision, delay=self.policy.delay)
            return self._change(job, worker, decision, found.silences[worker.id])

        decided = await asyncio.gather(*(decide(job) for job in found.jobs))
        changes = [change for change in decided if change is not None]
        schema = self.session.schema
        return await self._call(lambda on: database.release_locks(on, schema, list(found.workers), changes))

    async def _decide(self, job: Job, worker: WorkerInfo) -> RecoveryAction:
        """Return how to recover a job. Runs outside a transaction, because the user's hook may be slow."""
        claim = (job.id, job.locked_at)
        if claim in self._left_locked:
            return RecoveryAction.leave()
        decision = None
        if self.policy.on_recovery is not None:
            try:
                async with asyncio.timeout(_HOOK_TIMEOUT):
                    decision = await call_user_code(self.policy.on_recovery, job, worker)
                if not isinstance(decision, RecoveryAction | None):
                    raise TypeError(  # noqa: TRY301 - logged below, like any other error of the hook
                        f"on_recovery must return a RecoveryAction or None, not {decision!r}"
                    )
            except Exception:
                self.session.logger.exception(
                    "on_recovery failed for job %d, so the job is retried as by default", job.id
                )
                decision = None
        if decision is not None and decision.action == "leave":
            self._left_locked.add(claim)
        return decision or RecoveryAction.default()

    def _change(
        self, job: Job, worker: WorkerInfo, decision: RecoveryAction, silence: float
    ) -> dict[str, object]:
        error = decision.reason or (
            f"The worker that ran this job died: {worker.name}, no heartbeat for {silence:.0f} s"
        )
        superseded = (
            job.key is None
            and job.attempts >= job.max_attempts
            and job.locked_at is not None
            and job.updated_at > job.locked_at
        )
        return {
            "id": job.id,
            "locked_by": job.locked_by,
            "locked_at": job.locked_at.isoformat() if job.locked_at else None,
            "error": storable(error),
            "delay": decision.delay,
            "final": decision.action == "fail",
            "refund": self.policy.refund and not superseded,
            "attempts": job.attempts,
            "key": job.key,
            "run_at": job.run_at.isoformat(),
            "details": self.policy.keep_attempt(job),
        }


def _own_lease(worker: WorkerInfo, task: str) -> float:
    """Return how long a worker must be silent before jobs of that task are released; 0 by default."""
    tasks = (worker.lease or {}).get("tasks")
    seconds = tasks.get(task) if isinstance(tasks, dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
