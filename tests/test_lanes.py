"""User code and own statements share the connections of a pool as promised, in whatever order they call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphile_worker._db.lanes import Lane, Lanes, Ticket

which = strategies.sampled_from(["own", "lent"])


class PoolOfNumbers(RuleBasedStateMachine):
    """A pool whose connections are numbers, used as `Pool` uses its lanes."""

    @initialize(most=strategies.integers(1, 4), reserve=strategies.integers(0, 2))
    def make(self, most: int, reserve: int) -> None:
        self.lanes: Lanes[int] = Lanes(most, min(reserve, most))
        self.opened = 0
        self.open: dict[int, str] = {}
        self.in_use: dict[str, list[int]] = {"own": [], "lent": []}
        self.waiting: list[tuple[str, Ticket[int]]] = []
        self.woken: list[Ticket[int]] = []

    def lane(self, name: str) -> Lane[int]:
        lane: Lane[int] = getattr(self.lanes, name)
        return lane

    def connect(self, name: str) -> None:
        """With a place, use an idle connection or open one."""
        lane = self.lane(name)
        number = lane.pick()
        if number is None:
            surplus = self.lanes.surplus(lane)
            if surplus is not None:
                assert self.open.pop(surplus) != name, "only the other lane has one to spare"
            self.opened += 1
            number = self.opened
            self.open[number] = name
        assert self.open[number] == name, "a session never changes its lane"
        self.in_use[name].append(number)

    @rule(name=which)
    def call(self, name: str) -> None:
        lane = self.lane(name)
        free = sum(map(len, self.in_use.values())) < self.lanes.most
        owed = name == "own" and len(self.in_use["own"]) < self.lanes.reserve
        if self.lanes.take(lane):
            assert free or owed
            self.connect(name)
        else:
            assert not free
            assert not owed
            ticket: Any = self.lanes.queue(lane, lambda: self.woken.append(ticket))
            self.waiting.append((name, ticket))

    @precondition(lambda self: any(self.in_use.values()))
    @rule(name=which, position=strategies.integers(0, 10), breaks=strategies.booleans())
    def give_back(self, name: str, position: int, breaks: bool) -> None:
        if not self.in_use[name]:
            return
        number = self.in_use[name].pop(position % len(self.in_use[name]))
        if breaks:
            del self.open[number]
        else:
            self.lane(name).idle.append(number)
        self.woken.clear()
        self.lanes.release(self.lane(name))
        self.expect_woken()

    @precondition(lambda self: self.waiting)
    @rule(position=strategies.integers(0, 10))
    def give_up(self, position: int) -> None:
        _, ticket = self.waiting.pop(position % len(self.waiting))
        self.woken.clear()
        self.lanes.leave(ticket)
        self.expect_woken()

    @precondition(lambda self: self.waiting and any(self.in_use.values()))
    @rule(name=which)
    def give_up_when_granted(self, name: str) -> None:
        """A call that is cancelled after it was woken, and before it noticed."""
        if not self.in_use[name]:
            return
        self.lane(name).idle.append(self.in_use[name].pop())
        self.woken.clear()
        self.lanes.release(self.lane(name))
        granted = list(self.woken)
        self.woken.clear()
        for ticket in granted:
            self.waiting = [(other, waits) for other, waits in self.waiting if waits is not ticket]
            self.lanes.leave(ticket)
        self.expect_woken()

    def expect_woken(self) -> None:
        for ticket in self.woken:
            assert ticket.granted
            name = next(name for name, waits in self.waiting if waits is ticket)
            first = next(waits for other, waits in self.waiting if other == name)
            assert ticket is first, "calls of a lane are served in the order in which they came"
            self.waiting = [(other, waits) for other, waits in self.waiting if waits is not ticket]
            self.connect(name)

    @invariant()
    def no_call_waits_for_nothing(self) -> None:
        if not hasattr(self, "lanes"):
            return
        used = {name: len(numbers) for name, numbers in self.in_use.items()}
        if self.waiting:
            assert sum(used.values()) >= self.lanes.most
        if any(name == "own" for name, _ in self.waiting):
            assert used["own"] >= self.lanes.reserve

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "lanes"):
            return
        most, reserve = self.lanes.most, self.lanes.reserve
        assert len(self.in_use["lent"]) <= most
        assert len(self.in_use["own"]) <= max(most, reserve)
        assert len(self.open) <= most + reserve, "what the server sees"
        if not self.in_use["lent"]:
            assert len(self.in_use["own"]) <= most, "the reserve is only for when user code holds the others"


PoolOfNumbers.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestPoolOfNumbers = PoolOfNumbers.TestCase


def test_user_code_is_not_starved_by_a_stream_of_own_statements() -> None:
    lanes: Lanes[int] = Lanes(1, 1)
    woken: list[str] = []
    assert lanes.take(lanes.own)
    lanes.queue(lanes.lent, lambda: woken.append("lent"))
    lanes.queue(lanes.own, lambda: woken.append("own"))
    lanes.release(lanes.own)
    assert woken == ["lent", "own"]


@pytest.mark.parametrize("granted", [False, True])
def test_a_call_that_gives_up_twice_gives_up_once(granted: bool) -> None:
    """A pool that closes dismisses calls, which then leave by themselves."""
    lanes: Lanes[int] = Lanes(1, 0)
    assert lanes.take(lanes.lent)
    ticket = lanes.queue(lanes.lent, lambda: None)
    if granted:
        lanes.release(lanes.lent)
        lanes.leave(ticket)
        assert lanes.lent.is_quiet
    else:
        lanes.lent.waiting.popleft()
        lanes.leave(ticket)
        assert lanes.lent.used == 1
