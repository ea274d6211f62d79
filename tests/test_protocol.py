"""A model of leases and recovery: two workers, a sweeper, and a database that restarts.

There is one job. The real `LeaseState` of each worker and the real `Observation` of the sweeper make the
decisions. The database, the network and time are simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphile_worker._db.queries.workers import Beat
from graphile_worker._recovery.sweeper import Observation
from graphile_worker._worker.liveness.lease_state import LeaseState
from graphile_worker.workers import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEASE = Lease()
TICK = 0.25
SWEEP_INTERVAL = 2.0
WORKERS = ("a", "b")


@dataclass
class Row:
    """A worker's row in the database."""

    beat: int = 0
    epoch: int = 0
    dead: bool = False


@dataclass
class Server:
    """The committed state of the database."""

    up: bool = True
    epoch: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    locked_by: str | None = None
    claim: int = 0


@dataclass(eq=False)
class Worker:
    """A worker process."""

    name: str
    lease_state: LeaseState
    frozen: bool = False
    cut_off: bool = False
    claim: int | None = None
    """The number of its claim while it runs the job."""
    given_up: int | None = None
    """The claim of a job that the worker has stopped, until the worker can record that."""
    last_attempt: float = -math.inf
    """When it last tried to record a heartbeat."""
    was_unreachable: bool = False
    """Whether it ever froze or was cut off. Otherwise the sweeper must never declare it dead."""
    overslept: bool = False
    """Whether it was frozen for longer than its lease, and has not noticed yet."""


class Simulation:
    """Two workers, a sweeper and a server, and the failures that can happen to them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server()
        self.workers = {name: Worker(name, LeaseState(LEASE, clock=lambda: self.now)) for name in WORKERS}
        self.observation = Observation("sweeper")
        self.sweeper_paused = False
        self.next_sweep = 0.0
        self.completed = 0
        for worker in self.workers.values():
            self.beat(worker)

    # The normal operation of each participant ---------------------------------------------------------------

    def reaches(self, worker: Worker) -> bool:
        return self.server.up and not worker.cut_off and not worker.frozen

    def beat(self, worker: Worker) -> None:
        """Try once to record a heartbeat, like `Heartbeat`."""
        worker.last_attempt = self.now
        lease_state = worker.lease_state
        if not self.reaches(worker):
            lease_state.has_session = worker.name in self.server.sessions and worker.cut_off
            # If the network is cut, a refused connection does not prove that the server is down.
            lease_state.server_down = not self.server.up and not worker.cut_off
            return
        self.server.sessions.add(worker.name)
        row = self.server.rows.setdefault(worker.name, Row())
        if row.dead:
            lease_state.dead = True
            return
        row.beat += 1
        row.epoch = self.server.epoch
        lease_state.sessions_announced = lease_state.has_session = True
        lease_state.confirm(self.now)

    def record(self, worker: Worker, claim: int) -> bool:
        """Record the outcome of a job. Return whether the worker still held it."""
        worker.lease_state.exchanged(self.now)
        is_held = (self.server.locked_by, self.server.claim) == (worker.name, claim)
        if is_held:
            self.server.locked_by = None
        return is_held

    def claim(self, worker: Worker) -> None:
        server = self.server
        if worker.claim is None and server.locked_by is None and not server.rows[worker.name].dead:
            server.claim += 1
            server.locked_by, worker.claim = worker.name, server.claim
            worker.lease_state.exchanged(self.now)

    def tick(self, worker: Worker) -> None:
        """Run one tick of a worker that is not frozen.

        It records a heartbeat, gives up its job if it must, and claims the job if it may.
        """
        interval = LEASE.interval if worker.lease_state.has_session else 1.0
        if self.now - worker.last_attempt >= interval:
            self.beat(worker)
        if not worker.lease_state.may_work():
            worker.given_up, worker.claim = worker.claim or worker.given_up, None
            worker.overslept = False
        if not self.reaches(worker):
            return
        if worker.given_up is not None:
            self.record(worker, worker.given_up)
            worker.given_up = None
        if worker.lease_state.dead:  # It holds no job, so it may register again.
            self.server.rows[worker.name].dead = worker.lease_state.dead = False
            self.beat(worker)
        if worker.lease_state.may_work():
            self.claim(worker)

    def sweep(self) -> None:
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
        self.observation.record_heartbeats(self.now, beats)
        silent = [beat.id for beat in self.observation.silent(beats, self.now) if beat.same_epoch]
        lost = frozenset(name for name in silent if name not in server.sessions)
        self.observation.record_sessions(self.now, silent, lost)
        for suspect in self.observation.suspects(beats, self.now):
            assert self.workers[suspect.id].was_unreachable, (
                "a worker that was always reachable was declared dead"
            )
            server.rows[suspect.id].dead = True
        for name, row in server.rows.items():
            if row.dead and server.locked_by == name:
                server.locked_by = None

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            if self.server.up and not self.sweeper_paused and self.now >= self.next_sweep:
                self.next_sweep = self.now + SWEEP_INTERVAL
                self.sweep()
            for worker in self.workers.values():
                if not worker.frozen:
                    self.tick(worker)
            self.check()

    def check(self) -> None:
        """Check that two workers never run the job.

        A worker that was frozen for longer than its lease does not count: it is about to notice.
        """
        running = [
            worker
            for worker in self.workers.values()
            if worker.claim is not None and not worker.frozen and not worker.overslept
        ]
        assert len(running) <= 1, "two workers run the job"

    def recover(self) -> None:
        """End all failures, and check that the job then runs."""
        self.start_server()
        self.resume_sweeper()
        for name in WORKERS:
            self.restore_network(name)
            self.wake(name)
        self.pass_time(60)
        before = self.completed
        for name in WORKERS:
            self.complete(name)
        assert self.completed > before, "no worker runs the job"

    # Events that can happen ---------------------------------------------------------------------------------

    def complete(self, name: str) -> None:
        worker = self.workers[name]
        if worker.claim is not None and self.reaches(worker):
            self.completed += self.record(worker, worker.claim)
            worker.claim = None

    def freeze(self, name: str) -> None:
        self.workers[name].frozen = self.workers[name].was_unreachable = True

    def wake(self, name: str) -> None:
        worker = self.workers[name]
        worker.overslept = worker.frozen and worker.claim is not None and not worker.lease_state.may_work()
        worker.frozen = False

    def cut_off(self, name: str) -> None:
        """Cut the network. The sessions end on both sides."""
        worker = self.workers[name]
        worker.cut_off = worker.was_unreachable = True
        self.server.sessions.discard(name)
        worker.lease_state.has_session = False

    def drop_packets(self, name: str) -> None:
        """Cut the network without either side noticing."""
        self.workers[name].cut_off = self.workers[name].was_unreachable = True

    def restore_network(self, name: str) -> None:
        self.workers[name].cut_off = False

    def end_session(self, name: str) -> None:
        self.server.sessions.discard(name)
        self.workers[name].lease_state.has_session = False
        self.workers[name].last_attempt = -math.inf

    def stop_server(self) -> None:
        self.server.up = False
        self.server.sessions.clear()
        for worker in self.workers.values():
            worker.lease_state.has_session = worker.lease_state.has_session and worker.cut_off

    def start_server(self) -> None:
        if not self.server.up:
            self.server.up = True
            self.server.epoch += 1

    def pause_sweeper(self) -> None:
        self.sweeper_paused = True

    def resume_sweeper(self) -> None:
        self.sweeper_paused = False


EVENTS: list[Callable[[Simulation], None]] = [
    *(
        partial(getattr(Simulation, event), name=name)
        for event in (
            "complete",
            "freeze",
            "wake",
            "cut_off",
            "drop_packets",
            "restore_network",
            "end_session",
        )
        for name in WORKERS
    ),
    Simulation.stop_server,
    Simulation.start_server,
    Simulation.pause_sweeper,
    Simulation.resume_sweeper,
]


def simulate(steps: Sequence[tuple[Callable[[Simulation], None], float]]) -> None:
    simulation = Simulation()
    simulation.pass_time(5)
    for event, seconds in steps:
        event(simulation)
        simulation.check()
        simulation.pass_time(seconds)
    simulation.recover()


@pytest.mark.sample(1)
@pytest.mark.parametrize("pause", [0.5, 7.5, 12.0])
def test_any_two_consecutive_events_keep_the_job_safe(pause: float) -> None:
    for first, second in product(EVENTS, repeat=2):
        for after in (1.0, 12.0, 42.0):
            simulate([(first, pause), (second, after)])


@pytest.mark.slow
def test_any_three_consecutive_events_keep_the_job_safe() -> None:
    for events in product(EVENTS, repeat=3):
        for pauses in ((0.5, 9.0), (9.0, 0.5), (12.0, 30.0), (40.0, 9.0)):
            simulate(list(zip(events, (*pauses, 12.0), strict=True)))


class Protocol(RuleBasedStateMachine):
    """Many events in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()

    @rule(event=st.sampled_from(EVENTS))
    def event_happens(self, event: Callable[[Simulation], None]) -> None:
        event(self.simulation)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 5.0, 8.0, 10.0, 31.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.simulation.pass_time(seconds)

    @invariant()
    def two_workers_never_run_the_job(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        self.simulation.recover()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_many_events_in_any_order_keep_the_job_safe() -> None:
    run_state_machine_as_test(
        Protocol, settings=settings(max_examples=300, stateful_step_count=30, deadline=None)
    )
