"""The fault schedule, which is the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    name: str
    about: str
    weight: int = 1
    shortest: float = 0.0
    """The shortest duration, for leases of the default length."""
    longest: float = 0.0
    hits_node: bool = True
    """Whether the fault can hit Node workers too, for the comparison."""


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "kill -9 of a worker", weight=4),
        FaultKind("term", "SIGTERM to a worker", weight=3),
        FaultKind("freeze", "SIGSTOP for less than the lease, then SIGCONT", 2, 3, 20),
        FaultKind("long freeze", "SIGSTOP for longer than the lease, then SIGCONT", 1, 50, 50),
        FaultKind("restart fast", "PostgreSQL restarts in fast mode"),
        FaultKind("restart immediate", "PostgreSQL restarts in immediate mode"),
        FaultKind("restart long", "PostgreSQL is down for a while", 1, 12, 12),
        FaultKind("terminate", "pg_terminate_backend of some sessions", 3),
        FaultKind("cut", "all connections of a worker are aborted", 3),
        FaultKind("stall", "a worker's connections deliver nothing, and then everything", 1, 2, 12),
        FaultKind(
            "blackhole",
            "a worker's connections discard all bytes, and new ones hang, for less than the lease",
            1,
            3,
            15,
        ),
        FaultKind("long blackhole", "the same for longer than the lease", 1, 50, 50),
        FaultKind("clock", "a worker's wall clock jumps by hours, and back", 1, 5, 20, hits_node=False),
        FaultKind("hold gil", "a task holds the GIL of its process", 2, 5, 5, hits_node=False),
        FaultKind(
            "fork", "a task forks a child that inherits the worker's sockets", 1, 10, 10, hits_node=False
        ),
        FaultKind("exhaust", "other clients open all connections that the server allows", 1, 4, 8),
        FaultKind("idle transaction", "a transaction stays open and keeps all dead rows alive", 1, 10, 20),
        FaultKind(
            "refuse",
            "a trigger rejects locking, releasing and deleting every fifth job",
            1,
            3,
            8,
            hits_node=False,
        ),
    )
}
_PAUSE = 6.0
"""The average number of seconds between two faults."""
_LONG = 50.0
"""The least duration of a long fault. Long faults do not overlap: some worker must remain to recover jobs."""
_ONE_BY_ONE = (("kill", 20.0), ("long freeze", 62.0), ("kill", 20.0), ("long blackhole", 62.0))
"""The first faults of a run that is long enough. Each fault is over before the next one starts, which shows
how soon jobs run again if no other fault interferes."""
_ONE_BY_ONE_SHARE = 0.4
_LEAST_SCALE = 0.25
"""The smallest factor for pauses, because shorter leases do not make processes start faster."""
_LARGEST_SHARE = 0.8
"""A fault that takes a larger share of the run does not fit."""


class PlannedFault(msgspec.Struct, frozen=True):
    """A fault in the schedule."""

    at: float
    """Seconds after the start of the phase with faults."""
    kind: str
    slot: int
    """The worker to hit. If it already has an active fault, the next one is hit."""
    seconds: float
    chance: float
    """A random number from 0 to 1, for the choices of the fault itself."""


def kinds_that_fit(kinds: list[str], seconds: float, scale: float) -> list[str]:
    """Return the kinds whose longest fault fits into a run."""
    return [name for name in kinds if KINDS[name].longest * scale <= seconds * _LARGEST_SHARE]


def schedule(seed: int, seconds: float, kinds: list[str], *, slots: int, scale: float) -> list[PlannedFault]:
    """Return the faults of a run, in the order of time. Each is over before the run is.

    Kinds are drawn from a shuffled deck, so that each appears regularly.
    """
    chance = random.Random(seed)
    fit = kinds_that_fit(kinds, seconds, scale)

    def planned(at: float, name: str) -> PlannedFault:
        lasts = chance.uniform(KINDS[name].shortest, KINDS[name].longest) * scale
        return PlannedFault(round(at, 3), name, chance.randrange(slots), round(lasts, 3), chance.random())

    faults: list[PlannedFault] = []
    at = 0.0
    if sum(pause for _, pause in _ONE_BY_ONE) * scale <= seconds * _ONE_BY_ONE_SHARE:
        for name, pause in _ONE_BY_ONE:
            if name in fit:
                faults.append(planned(at, name))
                at += pause * scale
    deck: list[str] = []
    long_until = 0.0
    while fit and at <= seconds:
        deck = deck or _shuffled(fit, chance, long_first=not faults)
        fault = planned(at, deck.pop())
        is_long = KINDS[fault.kind].longest >= _LONG
        if is_long and at < long_until:
            deck.insert(0, fault.kind)  # draw it again later
            if all(KINDS[name].longest >= _LONG for name in deck):
                at = long_until
            continue
        if at + fault.seconds <= seconds:
            faults.append(fault)
            long_until = at + fault.seconds if is_long else long_until
        at += chance.uniform(0.3, 1.7) * _PAUSE * max(min(scale, 1.0), _LEAST_SCALE)
    return faults


def _shuffled(kinds: list[str], chance: random.Random, *, long_first: bool) -> list[str]:
    """Return a shuffled deck. With long_first, long faults are drawn first: later they might not fit."""
    deck = [name for name in kinds for _ in range(KINDS[name].weight)]
    chance.shuffle(deck)
    if long_first:
        deck.sort(key=lambda name: KINDS[name].longest >= _LONG)
    return deck
