"""The protocol by which a worker lives, dies and is buried: two workers, a sweeper, a database that restarts.

There is one job. What decides is the real thing, `Vitals` in each worker and `Observation` in the sweeper;
the database, the network and time are played.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graphile_worker._db.workers import Beat
from graphile_worker._runtime.vitals import Vitals
from graphile_worker.liveness import Lease
from graphile_worker.recovery import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEASE = Lease()
TICK = 0.25
LOOK = 2.0
WORKERS = ("a", "b")


@dataclass
class Row:
    """A worker's, in the database."""

    beat: int = 0
    epoch: int = 0
    dead: bool = False


@dataclass
class Server:
    """All that is committed."""

    up: bool = True
    epoch: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    locked_by: str | None = None
    claim: int = 0


@dataclass(eq=False)
class Worker:
    """A process."""

    name: str
    vitals: Vitals
    frozen: bool = False
    cut: bool = False
    claim: int | None = None
    """Of the job that it runs, if it does."""
    given_up: int | None = None
    """Of a job that it stopped, and has not told anybody yet."""
    last_try: float = -math.inf
    ever_away: bool = False
    """Whether it ever froze, or was cut off: otherwise nobody may declare it dead."""
    overslept: bool = False
    """Whether it slept for longer than its lease, and has not noticed yet."""


class Scene:
    """Two workers, a sweeper and a server, and what can happen to them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server()
        self.workers = {name: Worker(name, Vitals(LEASE, clock=lambda: self.now)) for name in WORKERS}
        self.observation = Observation("sweeper")
        self.sweeper_is_away = False
        self.next_look = 0.0
        self.completed = 0
        for worker in self.workers.values():
            self.beat(worker)

    # What each of them does by itself, all the time ---------------------------------------------------------

    def reaches(self, worker: Worker) -> bool:
        return self.server.up and not worker.cut and not worker.frozen

    def beat(self, worker: Worker) -> None:
        """One attempt, as `Heartbeat` makes it."""
        worker.last_try = self.now
        vitals = worker.vitals
        if not self.reaches(worker):
            vitals.has_session = worker.name in self.server.sessions and worker.cut
            # Cut off by something in between, a refusal proves nothing.
            vitals.server_down = not self.server.up and not worker.cut
            return
        self.server.sessions.add(worker.name)
        row = self.server.rows.setdefault(worker.name, Row())
        if row.dead:
            vitals.dead = True
            return
        row.beat += 1
        row.epoch = self.server.epoch
        vitals.says_sessions = vitals.has_session = True
        vitals.confirm(self.now)

    def record(self, worker: Worker, claim: int) -> bool:
        """What became of a job; whether it was still the worker's."""
        worker.vitals.exchanged(self.now)
        ours = (self.server.locked_by, self.server.claim) == (worker.name, claim)
        if ours:
            self.server.locked_by = None
        return ours

    def claim(self, worker: Worker) -> None:
        server = self.server
        if worker.claim is None and server.locked_by is None and not server.rows[worker.name].dead:
            server.claim += 1
            server.locked_by, worker.claim = worker.name, server.claim
            worker.vitals.exchanged(self.now)

    def live(self, worker: Worker) -> None:
        """A tick of a worker that is not frozen: beat, give up what it must, claim what it may."""
        interval = LEASE.interval if worker.vitals.has_session else 1.0
        if self.now - worker.last_try >= interval:
            self.beat(worker)
        if not worker.vitals.may_work():
            worker.given_up, worker.claim = worker.claim or worker.given_up, None
            worker.overslept = False
        if not self.reaches(worker):
            return
        if worker.given_up is not None:
            self.record(worker, worker.given_up)
            worker.given_up = None
        if worker.vitals.dead:  # it holds nothing, and may come back to life
            self.server.rows[worker.name].dead = worker.vitals.dead = False
            self.beat(worker)
        if worker.vitals.may_work():
            self.claim(worker)

    def look(self) -> None:
        server = self.server
        beats = [
            Beat(
                id=name,
                beat=str(row.beat),
                dead=row.dead,
                seconds=LEASE.seconds,
                fast=LEASE.fast,
                same_epoch=row.epoch == server.epoch,
                due=row.dead,
            )
            for name, row in server.rows.items()
        ]
        self.observation.note(self.now, beats)
        silent = [beat.id for beat in self.observation.silent(beats, self.now) if beat.same_epoch]
        lost = frozenset(name for name in silent if name not in server.sessions)
        self.observation.note_sessions(self.now, silent, lost)
        for suspect in self.observation.suspects(beats, self.now):
            assert self.workers[suspect.id].ever_away, "a worker that was never away was declared dead"
            server.rows[suspect.id].dead = True
        for name, row in server.rows.items():
            if row.dead and server.locked_by == name:
                server.locked_by = None

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            if self.server.up and not self.sweeper_is_away and self.now >= self.next_look:
                self.next_look = self.now + LOOK
                self.look()
            for worker in self.workers.values():
                if not worker.frozen:
                    self.live(worker)
            self.check()

    def check(self) -> None:
        """Two never run the job, but for one that slept for longer than its lease and is about to notice."""
        running = [
            worker
            for worker in self.workers.values()
            if worker.claim is not None and not worker.frozen and not worker.overslept
        ]
        assert len(running) <= 1, "two run the job"

    def mend(self) -> None:
        """When all is well again, the job runs."""
        self.server_comes_up()
        self.sweeper_returns()
        for name in WORKERS:
            self.mend_network(name)
            self.wake(name)
        self.pass_time(60)
        before = self.completed
        for name in WORKERS:
            self.complete(name)
        assert self.completed > before, "nobody runs the job"

    # What happens to them -----------------------------------------------------------------------------------

    def complete(self, name: str) -> None:
        worker = self.workers[name]
        if worker.claim is not None and self.reaches(worker):
            self.completed += self.record(worker, worker.claim)
            worker.claim = None

    def freeze(self, name: str) -> None:
        self.workers[name].frozen = self.workers[name].ever_away = True

    def wake(self, name: str) -> None:
        worker = self.workers[name]
        worker.overslept = worker.frozen and worker.claim is not None and not worker.vitals.may_work()
        worker.frozen = False

    def cut_off(self, name: str) -> None:
        """Its sessions end, on both sides."""
        worker = self.workers[name]
        worker.cut = worker.ever_away = True
        self.server.sessions.discard(name)
        worker.vitals.has_session = False

    def swallow(self, name: str) -> None:
        """Nothing gets through, and neither side notices."""
        self.workers[name].cut = self.workers[name].ever_away = True

    def mend_network(self, name: str) -> None:
        self.workers[name].cut = False

    def end_session(self, name: str) -> None:
        self.server.sessions.discard(name)
        self.workers[name].vitals.has_session = False
        self.workers[name].last_try = -math.inf

    def server_goes_down(self) -> None:
        self.server.up = False
        self.server.sessions.clear()
        for worker in self.workers.values():
            worker.vitals.has_session = worker.vitals.has_session and worker.cut

    def server_comes_up(self) -> None:
        if not self.server.up:
            self.server.up = True
            self.server.epoch += 1

    def sweeper_leaves(self) -> None:
        self.sweeper_is_away = True

    def sweeper_returns(self) -> None:
        self.sweeper_is_away = False


EVENTS: list[Callable[[Scene], None]] = [
    *(
        partial(getattr(Scene, what), name=name)
        for what in ("complete", "freeze", "wake", "cut_off", "swallow", "mend_network", "end_session")
        for name in WORKERS
    ),
    Scene.server_goes_down,
    Scene.server_comes_up,
    Scene.sweeper_leaves,
    Scene.sweeper_returns,
]


def play(steps: Sequence[tuple[Callable[[Scene], None], float]]) -> None:
    scene = Scene()
    scene.pass_time(5)
    for event, seconds in steps:
        event(scene)
        scene.check()
        scene.pass_time(seconds)
    scene.mend()


@pytest.mark.parametrize("pause", [0.5, 7.5, 12.0])
def test_any_two_things_may_happen_one_after_the_other(pause: float) -> None:
    for first, second in product(EVENTS, repeat=2):
        for after in (1.0, 12.0, 42.0):
            play([(first, pause), (second, after)])


@pytest.mark.slow
def test_any_three_things_may_happen_one_after_the_other() -> None:
    for events in product(EVENTS, repeat=3):
        for pauses in ((0.5, 9.0), (9.0, 0.5), (12.0, 30.0), (40.0, 9.0)):
            play(list(zip(events, (*pauses, 12.0), strict=True)))


class Protocol(RuleBasedStateMachine):
    """Many things in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()

    @rule(event=st.sampled_from(EVENTS))
    def something_happens(self, event: Callable[[Scene], None]) -> None:
        event(self.scene)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 5.0, 8.0, 10.0, 31.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.scene.pass_time(seconds)

    @invariant()
    def two_never_run_the_job(self) -> None:
        self.scene.check()

    def teardown(self) -> None:
        self.scene.mend()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
