"""Seeing that a worker is dead, and freeing its jobs.

Death is observed and not computed: a worker whose beat did not change for as long as its lease says, on the
observer's own clock. Who compares times of the database's clock steals live work after every outage, clock
step or failover. And so whoever was away for a while begins to observe anew.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphile_worker._db import workers as database
from graphile_worker._db.workers import Freed, Suspect
from graphile_worker.liveness import Recovered, Recovery, since_boot
from graphile_worker.outcome import storable
from graphile_worker.user_code import call_user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.session import Session
    from graphile_worker._db.workers import Beat, HeldQueue
    from graphile_worker.job import Job
    from graphile_worker.liveness import OnRecovery, WorkerInfo

T = TypeVar("T")
_LONGEST_INTERVAL = 2.0
_LOOKS_PER_LEASE = 4
_LONGEST_GAP = 5.0
_GAP_PER_LEASE = 5 / 8
_HOOK_PATIENCE = 30.0
_MOST_HOOKS = 20
DIED = "The worker that ran this job died: "
"""How `last_error` begins then."""


@dataclass(slots=True)
class _Seen:
    """What we saw of one worker."""

    beat: str
    since: float
    lost_since: float | None = None
    heard: bool = False
    """Whether it said anything while we watched."""


class Observation:
    """Who was silent for how long. Times are the observer's, in seconds."""

    def __init__(self, own_id: str | None = None) -> None:
        self._own_id = own_id
        self._seen: dict[str, _Seen] = {}
        self._last: float | None = None

    def note(self, received: float, beats: Iterable[Beat]) -> None:
        """The database said this."""
        gap = math.inf if self._last is None else received - self._last
        self._last = received
        seen, self._seen = self._seen, {}
        for beat in beats:
            known = seen.get(beat.id)
            # If we were away, perhaps nobody could reach the database, and that worker only comes back later.
            was_away = gap > min(_LONGEST_GAP, (beat.fast or beat.seconds) * _GAP_PER_LEASE)
            if known is None or known.beat != beat.beat or was_away:
                # As of the latest moment at which it may have been written.
                heard = known is not None and (known.heard or known.beat != beat.beat)
                known = _Seen(beat.beat, received, heard=heard)
            if not beat.same_epoch or beat.fast is None:
                known.lost_since = None
            self._seen[beat.id] = known

    def note_sessions(self, received: float, asked: Iterable[str], lost: frozenset[str]) -> None:
        """Of those asked for, these have no session."""
        for worker_id in asked:
            known = self._seen[worker_id]
            if worker_id not in lost:
                known.lost_since = None
            elif known.lost_since is None:
                known.lost_since = received

    def silence(self, worker_id: str, now: float) -> float:
        """For how long it was silent while we watched."""
        known = self._seen.get(worker_id)
        return 0.0 if known is None else now - known.since

    def silent(self, beats: Iterable[Beat], sent: float) -> list[Beat]:
        """Those that live as far as anybody knows, and said nothing new since the last look."""
        return [
            beat
            for beat in beats
            if not beat.dead and beat.id != self._own_id and self._seen[beat.id].since < sent
        ]

    def unheard(self, beats: Iterable[Beat]) -> set[str]:
        """Those that live as far as anybody knows, and said nothing while we watched."""
        return {
            beat.id
            for beat in beats
            if not beat.dead and beat.id != self._own_id and not self._seen[beat.id].heard
        }

    def suspects(self, beats: Iterable[Beat], now: float) -> list[Suspect]:
        """Those whose lease is over."""
        found = []
        for beat in self.silent(beats, now):
            known = self._seen[beat.id]
            silence = now - known.since
            lost = beat.fast is not None and known.lost_since is not None
            fast = lost and min(silence, now - (known.lost_since or 0.0)) >= (beat.fast or 0.0)
            if fast or silence >= beat.seconds:
                found.append(Suspect(beat.id, beat.beat, silence))
        return found


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What becomes of the jobs of a dead worker."""

    delay: float = 0.0
    refund: bool = False
    on_recovery: OnRecovery | None = None


class _Found(NamedTuple):
    workers: Mapping[str, WorkerInfo]
    jobs: Sequence[Job]
    queues: Sequence[HeldQueue]
    silences: Mapping[str, float]


@dataclass(kw_only=True)
class Sweeper:
    """Looks again and again, and frees what dead workers hold."""

    session: Session
    name: str
    """Who says so."""
    own_id: str | None = None
    policy: Policy = field(default_factory=Policy)
    dry_run: bool = False
    clock: Callable[[], float] = since_boot

    def __post_init__(self) -> None:
        self._observation = Observation(self.own_id)
        self._left: set[tuple[int, datetime | None]] = set()
        self._refused: set[tuple[int | str, datetime | None]] = set()
        self._beats: list[Beat] = []

    @property
    def interval(self) -> float:
        """Seconds until the next look: soon, if somebody is silent for longer than between two beats.

        Never so long that we would take ourselves for having been away.
        """
        now = self.clock()
        shortest = min((beat.fast or beat.seconds for beat in self._beats), default=math.inf)
        suspicious = any(
            self._observation.silence(beat.id, now) > beat.seconds / 8
            for beat in self._observation.silent(self._beats, now)
        )
        return min(_LONGEST_INTERVAL, shortest / _LOOKS_PER_LEASE) * (0.25 if suspicious else 1.0)

    @property
    def undecided(self) -> set[str]:
        """Those who said nothing while we watched, and are not declared dead."""
        return self._observation.unheard(self._beats)

    async def look(self, *, all_dead: bool = False) -> list[Recovered]:
        """Look, and do what there is to do. Of workers dead for a while all are swept, or those due."""
        schema, call = self.session.schema, self._call
        sent = self.clock()
        self._beats = await call(lambda on: database.read_beats(on, schema))
        self._observation.note(self.clock(), self._beats)
        silent = [beat.id for beat in self._observation.silent(self._beats, sent) if beat.same_epoch]
        if silent:
            sent = self.clock()
            lost = await call(lambda on: database.find_lost_sessions(on, schema, silent))
            self._observation.note_sessions(self.clock(), silent, lost)
        suspects = self._observation.suspects(self._beats, sent)
        dead = [beat.id for beat in self._beats if beat.dead and (all_dead or beat.due)]
        if not (suspects or dead):
            return []
        if self.dry_run:
            taken = [*dead, *(suspect.id for suspect in suspects)]
        else:
            # Until we have asked the hook, others need not.
            busy = 0.0 if self.policy.on_recovery is None else _HOOK_PATIENCE
            taken = await call(
                lambda on: database.take_dead(on, schema, suspects, self.name, all_dead=all_dead, busy=busy)
            )
        return await self._sweep(taken, {suspect.id for suspect in suspects}) if taken else []

    async def _sweep(self, dead: Sequence[str], news: set[str]) -> list[Recovered]:
        found = await self._find(dead)
        freed = await self._free(found) if not self.dry_run else self._all_of(found)
        self._tell_refused(found, freed)
        recovered = [
            Recovered(
                worker=worker,
                silence=found.silences[worker.id],
                jobs=[job for job in found.jobs if job.locked_by == worker.id and job.id in freed.jobs],
                queues=[
                    queue.name
                    for queue in found.queues
                    if queue.locked_by == worker.id and queue.id in freed.queues
                ],
            )
            for worker in found.workers.values()
        ]
        return [one for one in recovered if one.jobs or one.queues or one.worker.id in news]

    async def _call(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Not repeated if it fails: we look again anyway."""
        return await self.session.call(operation, attempts=1)

    async def _find(self, dead: Sequence[str]) -> _Found:
        schema, call = self.session.schema, self._call
        workers = {
            worker.id: worker for worker in await call(lambda on: database.read_workers(on, schema, dead))
        }
        jobs, queues = await call(lambda on: database.read_held(on, schema, list(workers)))
        now = self.clock()
        silences = {worker_id: self._observation.silence(worker_id, now) for worker_id in workers}
        ripe = [
            job
            for job in jobs
            if silences[job.locked_by or ""] >= _own_lease(workers[job.locked_by or ""], job.task_identifier)
        ]
        return _Found(workers, ripe, queues, silences)

    @staticmethod
    def _all_of(found: _Found) -> Freed:
        return Freed({job.id for job in found.jobs}, {queue.id for queue in found.queues}, {}, {})

    def _tell_refused(self, found: _Found, freed: Freed) -> None:
        """Say once which locks the server refuses to remove. The next sweep tries again."""
        jobs = [job for job in found.jobs if job.id in freed.refused_jobs]
        queues = [queue for queue in found.queues if queue.id in freed.refused_queues]
        refused = {(job.id, job.locked_at) for job in jobs} | {(queue.name, None) for queue in queues}
        for job in jobs:
            if (job.id, job.locked_at) not in self._refused:
                self.session.logger.warning(
                    "The database refuses to free job %d (%s) of the dead worker %s: %s. It stays locked",
                    *(job.id, job.task_identifier, job.locked_by, freed.refused_jobs[job.id]),
                )
        for queue in queues:
            if (queue.name, None) not in self._refused:
                self.session.logger.warning(
                    "The database refuses to free queue %r of the dead worker %s: %s. It stays locked",
                    *(queue.name, queue.locked_by, freed.refused_queues[queue.id]),
                )
        self._refused |= refused

    async def _free(self, found: _Found) -> Freed:
        some = asyncio.Semaphore(_MOST_HOOKS)

        async def decide(job: Job) -> dict[str, object] | None:
            worker = found.workers[job.locked_by or ""]
            async with some:
                decision = await self._decide(job, worker)
            if decision.action == "leave":
                return None
            return self._change(job, worker, decision, found.silences[worker.id])

        decided = await asyncio.gather(*(decide(job) for job in found.jobs))
        changes = [change for change in decided if change is not None]
        schema = self.session.schema
        return await self._call(lambda on: database.free(on, schema, list(found.workers), changes))

    async def _decide(self, job: Job, worker: WorkerInfo) -> Recovery:
        """Outside of any transaction: it is the user's code, and may take long."""
        claim = (job.id, job.locked_at)
        if claim in self._left:
            return Recovery.leave()
        decision = None
        if self.policy.on_recovery is not None:
            try:
                async with asyncio.timeout(_HOOK_PATIENCE):
                    decision = await call_user_code(self.policy.on_recovery, job, worker)
                if not isinstance(decision, Recovery | None):
                    raise TypeError(f"on_recovery returned {decision!r}, which is no Recovery")  # noqa: TRY301
            except Exception:
                self.session.logger.exception("on_recovery failed for job %d: it runs again", job.id)
                decision = None
        if decision is not None and decision.action == "leave":
            self._left.add(claim)
        return decision or Recovery.default()

    def _change(self, job: Job, worker: WorkerInfo, decision: Recovery, silence: float) -> dict[str, object]:
        error = decision.reason or f"{DIED}{worker.name}, not heard from for {silence:.0f} s"
        delay = decision.delay
        if decision.action == "default" and not (job.last_error or "").startswith(DIED):
            delay = self.policy.delay  # the second time in a row it may be the job that kills its worker
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
            "delay": delay,
            "final": decision.action == "fail",
            "refund": self.policy.refund and not superseded,
            "attempts": job.attempts,
            "key": job.key,
        }


def _own_lease(worker: WorkerInfo, task: str) -> float:
    """How long a worker must be silent before jobs of that task are taken from it; 0 if nothing is said."""
    tasks = (worker.lease or {}).get("tasks")
    seconds = tasks.get(task) if isinstance(tasks, dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
