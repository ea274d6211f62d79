"""Which fault happens when: the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    name: str
    about: str
    weight: int = 1
    shortest: float = 0.0
    """How long it lasts, for leases of the usual length."""
    longest: float = 0.0
    hits_node: bool = True
    """Whether it can be done to npm's worker too, for the comparison."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "kill -9 of a worker", weight=4),
        Kind("term", "SIGTERM to a worker", weight=3),
        Kind("freeze", "SIGSTOP, shorter than the lease, and SIGCONT", 2, 3, 20),
        Kind("long freeze", "SIGSTOP, longer than the lease, and SIGCONT", 1, 50, 50),
        Kind("restart fast", "PostgreSQL is restarted, in fast mode"),
        Kind("restart immediate", "PostgreSQL is restarted, in immediate mode"),
        Kind("restart long", "PostgreSQL is away for a while", 1, 12, 12),
        Kind("terminate", "pg_terminate_backend of some sessions", 3),
        Kind("cut", "all connections of a worker are cut", 3),
        Kind("stall", "nothing passes on a worker's connections, and then all of it", 1, 2, 12),
        Kind("dark", "a worker's connections swallow bytes, shorter than the lease; new ones hang", 1, 3, 15),
        Kind("long dark", "the same, longer than the lease", 1, 50, 50),
        Kind("clock", "a worker's wall clock jumps by hours, and back", 1, 5, 20, hits_node=False),
        Kind("hold gil", "a task lets nothing else run in its process", 2, 5, 5, hits_node=False),
        Kind("fork", "a task forks a child that has the worker's sockets", 1, 10, 10, hits_node=False),
        Kind("exhaust", "others take all connections that the server allows", 1, 4, 8),
        Kind("idle transaction", "a transaction stays open and keeps all dead rows alive", 1, 10, 20),
        Kind("refuse", "a trigger refuses to lock, free or delete every fifth job", 1, 3, 8, hits_node=False),
    )
}
_PAUSE = 6.0
"""Between two faults, on the average."""
_LONG = 50.0
"""From here on a fault is a long one. There is one at a time, or nobody might be left to take jobs over."""
_ONE_BY_ONE = (("kill", 20.0), ("long freeze", 62.0), ("kill", 20.0), ("long dark", 62.0))
"""How a run begins that has the time: what is broken is mended before the next breaks. It shows how soon jobs
run again if nothing else is in the way."""
_SHARE_FOR_THAT = 0.4
_LEAST_SCALE = 0.25
"""Of the pauses: processes do not start faster because leases are short."""
_MOST_OF_IT = 0.8
"""A fault that takes more of the run than this does not fit."""


class Planned(msgspec.Struct, frozen=True):
    """A fault to come."""

    at: float
    """Seconds after the first fault may happen."""
    kind: str
    slot: int
    """The worker to hit; another one if that has trouble already."""
    seconds: float
    chance: float
    """From 0 to 1, for what the kind decides by itself."""


def fitting(kinds: list[str], seconds: float, scale: float) -> list[str]:
    """The kinds of which one fits into so many seconds."""
    return [name for name in kinds if KINDS[name].longest * scale <= seconds * _MOST_OF_IT]


def schedule(seed: int, seconds: float, kinds: list[str], *, slots: int, scale: float) -> list[Planned]:
    """The faults of a run, in the order of time; each is over before the run is.

    Kinds are dealt from a deck, so that none is left out for long.
    """
    chance = random.Random(seed)
    fit = fitting(kinds, seconds, scale)

    def planned(at: float, name: str) -> Planned:
        lasts = chance.uniform(KINDS[name].shortest, KINDS[name].longest) * scale
        return Planned(round(at, 3), name, chance.randrange(slots), round(lasts, 3), chance.random())

    faults: list[Planned] = []
    at = 0.0
    if sum(pause for _, pause in _ONE_BY_ONE) * scale <= seconds * _SHARE_FOR_THAT:
        for name, pause in _ONE_BY_ONE:
            if name in fit:
                faults.append(planned(at, name))
                at += pause * scale
    deck: list[str] = []
    long_until = 0.0
    while fit and at <= seconds:
        deck = deck or _shuffled(fit, chance, on_top=not faults)
        fault = planned(at, deck.pop())
        is_long = KINDS[fault.kind].longest >= _LONG
        if is_long and at < long_until:
            deck.insert(0, fault.kind)  # later
            if all(KINDS[name].longest >= _LONG for name in deck):
                at = long_until
            continue
        if at + fault.seconds <= seconds:
            faults.append(fault)
            long_until = at + fault.seconds if is_long else long_until
        at += chance.uniform(0.3, 1.7) * _PAUSE * max(min(scale, 1.0), _LEAST_SCALE)
    return faults


def _shuffled(kinds: list[str], chance: random.Random, *, on_top: bool) -> list[str]:
    """A deck; the first has those on top that last longest, for later they might not fit any more."""
    deck = [name for name in kinds for _ in range(KINDS[name].weight)]
    chance.shuffle(deck)
    if on_top:
        deck.sort(key=lambda name: KINDS[name].longest >= _LONG)
    return deck
