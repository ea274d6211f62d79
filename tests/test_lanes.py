"""User code and the library share the connections of a pool fairly, in any order of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphile_worker._db.connection.lanes import Lane, Lanes, Ticket

lane_names = strategies.sampled_from(["own", "lent"])


class LanesMachine(RuleBasedStateMachine):
    """A model of `Pool` that uses numbers as connections."""

    @initialize(most=strategies.integers(1, 4), reserve=strategies.integers(0, 2))
    def create(self, most: int, reserve: int) -> None:
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
        """Use an idle connection, or open one, for a call that has a place."""
        lane = self.lane(name)
        number = lane.pick()
        if number is None:
            surplus = self.lanes.surplus(lane)
            if surplus is not None:
                assert self.open.pop(surplus) != name, "only the other lane may have a surplus connection"
            self.opened += 1
            number = self.opened
            self.open[number] = name
        assert self.open[number] == name, "a session never changes its lane"
        self.in_use[name].append(number)

    @rule(name=lane_names)
    def call(self, name: str) -> None:
        lane = self.lane(name)
        free = sum(map(len, self.in_use.values())) < self.lanes.most
        is_reserved = name == "own" and len(self.in_use["own"]) < self.lanes.reserve
        if self.lanes.take(lane):
            assert free or is_reserved
            self.connect(name)
        else:
            assert not free
            assert not is_reserved
            ticket: Any = self.lanes.queue(lane, lambda: self.woken.append(ticket))
            self.waiting.append((name, ticket))

    @precondition(lambda self: any(self.in_use.values()))
    @rule(name=lane_names, position=strategies.integers(0, 10), is_broken=strategies.booleans())
    def return_connection(self, name: str, position: int, is_broken: bool) -> None:
        if not self.in_use[name]:
            return
        number = self.in_use[name].pop(position % len(self.in_use[name]))
        if is_broken:
            del self.open[number]
        else:
            self.lane(name).idle.append(number)
        self.woken.clear()
        self.lanes.release(self.lane(name))
        self.check_woken()

    @precondition(lambda self: self.waiting)
    @rule(position=strategies.integers(0, 10))
    def cancel_waiting_call(self, position: int) -> None:
        _, ticket = self.waiting.pop(position % len(self.waiting))
        self.woken.clear()
        self.lanes.leave(ticket)
        self.check_woken()

    @precondition(lambda self: self.waiting and any(self.in_use.values()))
    @rule(name=lane_names)
    def cancel_granted_call(self, name: str) -> None:
        """Cancel a call after it was woken, but before it ran again."""
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
        self.check_woken()

    def check_woken(self) -> None:
        for ticket in self.woken:
            assert ticket.granted
            name = next(name for name, waits in self.waiting if waits is ticket)
            first = next(waits for other, waits in self.waiting if other == name)
            assert ticket is first, "calls of a lane are served in order"
            self.waiting = [(other, waits) for other, waits in self.waiting if waits is not ticket]
            self.connect(name)

    @invariant()
    def calls_wait_only_if_no_connection_is_free(self) -> None:
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
        assert len(self.open) <= most + reserve, "the server has too many connections"
        if not self.in_use["lent"]:
            assert len(self.in_use["own"]) <= most, (
                "the reserve may be used only while user code holds connections"
            )


LanesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLanesMachine = LanesMachine.TestCase


@pytest.mark.slow
def test_limits_hold_after_many_operations_in_any_order() -> None:
    run_state_machine_as_test(LanesMachine, settings=settings(max_examples=400, stateful_step_count=40))


def test_own_statements_do_not_starve_user_code() -> None:
    lanes: Lanes[int] = Lanes(1, 1)
    woken: list[str] = []
    assert lanes.take(lanes.own)
    lanes.queue(lanes.lent, lambda: woken.append("lent"))
    lanes.queue(lanes.own, lambda: woken.append("own"))
    lanes.release(lanes.own)
    assert woken == ["lent", "own"]


@pytest.mark.parametrize("granted", [False, True])
def test_leaving_the_queue_twice_has_the_effect_of_once(granted: bool) -> None:
    """A closing pool wakes waiting calls, which then leave the queue themselves."""
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
