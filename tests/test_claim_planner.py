"""The decision how many jobs to claim, and when: a state machine, tested without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from graphile_worker import Job, JobState
from graphile_worker._db.queries.exchange import (
    NOTHING,
    ClaimedJob,
    ClaimRequest,
    ExchangeReply,
    Position,
)
from graphile_worker._worker.claiming.claim_planner import Capacity, ClaimPlanner
from graphile_worker._worker.claiming.prefetch import FixedPrefetch

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE = Capacity(free_slots=1)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def planner(clock: FakeClock) -> ClaimPlanner:
    return ClaimPlanner(poll_interval=2.0, clock=clock)


def claimed(job_id: int) -> ClaimedJob:
    values: dict[str, Any] = dict.fromkeys(field.name for field in msgspec.structs.fields(Job))
    job = Job(**{**values, "id": job_id, "priority": 0, "run_at": NOW, "state": JobState.RUNNING})
    return ClaimedJob(job, NOW, None)


def claim(
    planner: ClaimPlanner,
    clock: FakeClock,
    reply: ExchangeReply,
    *,
    capacity: Capacity = ONE,
    has_results: bool = True,
) -> ClaimRequest:
    """Plan a claim and record its reply."""
    request = planner.plan(capacity, has_results=has_results, eager=has_results)
    assert request.wanted
    planner.record(clock.now, request, reply)
    return request


class TestWhenToClaim:
    def test_first_claim_is_due_at_once_and_the_next_after_the_poll_interval(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        assert planner.is_due
        claim(planner, clock, ExchangeReply(NOW))
        assert not planner.is_due
        assert 1.6 <= planner.delay <= 2.4
        clock.now += 2.5
        assert planner.is_due

    def test_poll_intervals_are_jittered(self, planner: ClaimPlanner) -> None:
        delays = set()
        for _ in range(50):
            planner.postpone()
            delays.add(round(planner.delay, 6))
        assert len(delays) > 40
        assert 1.6 <= min(delays) < max(delays) <= 2.4

    def test_claim_is_due_when_the_next_job_is_due(self, planner: ClaimPlanner, clock: FakeClock) -> None:
        claim(planner, clock, ExchangeReply(NOW, next_due=NOW + timedelta(seconds=0.25)))
        assert planner.delay == pytest.approx(0.25)
        clock.now += 0.25
        assert planner.is_due

    def test_notification_during_a_claim_makes_another_one_due(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        request = planner.plan(ONE, has_results=False)
        planner.notify()
        planner.record(clock.now, request, ExchangeReply(NOW))
        assert planner.is_due

    def test_job_that_ends_during_a_claim_makes_another_one_due(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        request = planner.plan(ONE, has_results=False)
        planner.make_due()
        planner.record(clock.now, request, ExchangeReply(NOW))
        assert planner.is_due
        assert planner.delay == 0
        claim(planner, clock, ExchangeReply(NOW), has_results=False)
        assert not planner.is_due

    def test_contended_rows_are_retried_within_milliseconds_then_more_slowly(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        delays = []
        for _ in range(12):
            claim(planner, clock, ExchangeReply(NOW, contended=True))
            delays.append(planner.delay)
            clock.now += 10
        assert delays[0] == pytest.approx(0.001)
        assert delays == sorted(delays)
        assert delays[-1] == pytest.approx(0.5)
        two = Capacity(free_slots=2)
        claim(planner, clock, ExchangeReply(NOW, claimed=[claimed(1)], contended=True), capacity=two)
        clock.now += 10
        claim(planner, clock, ExchangeReply(NOW, contended=True))
        assert planner.delay == pytest.approx(0.001), "the claim before found a job"

    def test_exchange_with_results_claims_only_if_a_result_may_allow_it(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        assert planner.plan(ONE, has_results=True) is NOTHING
        assert planner.plan(ONE, has_results=True, eager=True).wanted == 1

    def test_claim_of_all_notified_jobs_makes_no_further_claim_due(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        planner.notify(1)
        found = ExchangeReply(NOW, claimed=[claimed(1)])
        claim(planner, clock, found, capacity=Capacity(free_slots=10), has_results=False)
        assert not planner.is_due
        assert planner.delay > 1

    def test_claim_of_some_notified_jobs_makes_another_due_at_once(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        planner.notify(2)
        found = ExchangeReply(NOW, claimed=[claimed(1)])
        assert claim(planner, clock, found, has_results=False).wanted == 1, "there is one slot"
        assert planner.is_due

    def test_full_claim_makes_another_due_at_once(self, planner: ClaimPlanner, clock: FakeClock) -> None:
        claim(planner, clock, ExchangeReply(NOW, claimed=[claimed(1)]))
        assert planner.is_due

    def test_notification_without_a_job_is_remembered(self, planner: ClaimPlanner, clock: FakeClock) -> None:
        """The jobs may belong to a task that was removed and added again under a new id."""
        claim(planner, clock, ExchangeReply(NOW))
        assert not planner.missed_notification, "there was no notification"
        planner.notify(1)
        claim(planner, clock, ExchangeReply(NOW))
        assert planner.missed_notification
        claim(planner, clock, ExchangeReply(NOW))
        assert planner.missed_notification, "only the worker resets it"


class TestHowMany:
    def test_claim_is_limited_to_the_number_of_notified_jobs(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        ten = Capacity(free_slots=10)

        def wanted() -> int:
            return claim(planner, clock, ExchangeReply(NOW), capacity=ten, has_results=False).wanted

        assert wanted() == 10, "at the start"
        planner.notify(1)
        planner.notify(2)
        assert wanted() == 3
        planner.notify(1)
        planner.notify()
        assert wanted() == 10, "one notification had no count"
        planner.notify(1)
        clock.now += 3
        assert wanted() == 10, "the poll is due"

    def test_stopped_or_fenced_worker_claims_nothing(self, planner: ClaimPlanner) -> None:
        assert planner.plan(Capacity(free_slots=5, may_work=False), has_results=True) is NOTHING
        assert planner.plan(Capacity(free_slots=5), has_results=True).wanted == 5
        planner.stop()
        assert planner.plan(Capacity(free_slots=5), has_results=True) is NOTHING

    def test_incoming_jobs_take_up_room(self, planner: ClaimPlanner) -> None:
        assert planner.plan(Capacity(free_slots=5), has_results=True, incoming=2).wanted == 3
        assert planner.plan(Capacity(free_slots=5), has_results=True, incoming=5) is NOTHING

    def test_prefetch_claims_beyond_the_free_slots_until_it_is_paused(self, clock: FakeClock) -> None:
        planner = ClaimPlanner(poll_interval=2.0, prefetch=FixedPrefetch(100), clock=clock)
        full = Capacity(free_slots=0, queued=40, startable=40)
        request = planner.plan(full, has_results=True)
        assert (request.wanted, request.run_length) == (60, 60)
        planner.pause_prefetch()
        assert planner.plan(full, has_results=True) is NOTHING
        planner.record_job(0.1)
        assert planner.plan(full, has_results=True).wanted == 60

    def test_free_slots_get_jobs_while_all_queued_jobs_wait_for_their_serial_queue(
        self, clock: FakeClock
    ) -> None:
        planner = ClaimPlanner(poll_interval=2.0, prefetch=FixedPrefetch(10), clock=clock)
        request = planner.plan(Capacity(free_slots=3, queued=20, startable=0), has_results=True)
        assert (request.wanted, request.run_length) == (3, 1)

    @given(
        free=st.integers(0, 50),
        queued=st.integers(0, 50),
        startable=st.integers(0, 50),
        prefetch=st.integers(0, 50),
        incoming=st.integers(0, 50),
        has_results=st.booleans(),
    )
    def test_never_claims_more_than_slots_and_prefetch_can_hold(
        self, *, free: int, queued: int, startable: int, prefetch: int, incoming: int, has_results: bool
    ) -> None:
        startable = min(startable, queued)
        planner = ClaimPlanner(poll_interval=2.0, prefetch=FixedPrefetch(prefetch))
        capacity = Capacity(free, queued, startable)
        request = planner.plan(capacity, has_results=has_results, eager=has_results, incoming=incoming)
        in_order = max(0, free + prefetch - queued - incoming)
        for_idle_slots = max(0, free - startable - incoming)
        assert request.wanted == max(in_order, for_idle_slots)
        wants = ClaimPlanner(poll_interval=2.0, prefetch=FixedPrefetch(prefetch)).wants_jobs(
            capacity, eager=has_results, incoming=incoming
        )
        assert wants == (request.wanted > 0)


class TestWhereToStart:
    def test_slow_claims_start_where_the_last_one_ended(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        slow = [ExchangeReply(NOW, claimed=[claimed(n)], cost=0.5) for n in range(100)]
        for n in range(3):
            assert claim(planner, clock, slow[n]).mark is None
        marks = []
        for n in range(3, 30):
            clock.now += 0.01
            marks.append(claim(planner, clock, slow[n]).mark)
        assert marks[0] == Position(0, NOW, 2)
        from_beginning = [n for n, mark in enumerate(marks) if mark is None]
        assert 2 <= len(from_beginning) <= 3, "one every 0.1 s"

    def test_claim_from_a_position_that_finds_too_little_is_repeated_from_the_beginning(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        for n in range(3):
            claim(planner, clock, ExchangeReply(NOW, claimed=[claimed(n)], cost=0.5))
        assert claim(planner, clock, ExchangeReply(NOW)).mark is not None
        assert planner.is_due
        assert claim(planner, clock, ExchangeReply(NOW)).mark is None
        assert not planner.is_due

    def test_quick_claims_always_start_at_the_beginning(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        replies = [ExchangeReply(NOW, claimed=[claimed(n)], cost=0.001) for n in range(20)]
        assert {claim(planner, clock, reply).mark for reply in replies} == {None}

    def test_queues_are_visited_at_most_every_ten_milliseconds_while_there_are_results(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        first = claim(planner, clock, ExchangeReply(NOW, next_queue=7, claimed=[claimed(1)]))
        assert first.after_queue == 0
        second = claim(planner, clock, ExchangeReply(NOW, next_queue=7))
        assert second.after_queue == 7, "the first was full, so there may be more"
        third = claim(planner, clock, ExchangeReply(NOW, next_queue=None))
        assert third.after_queue is None
        assert planner.delay == pytest.approx(0.01), "jobs may be hidden behind those of locked queues"
        clock.now += 0.02
        fourth = claim(planner, clock, ExchangeReply(NOW, next_queue=0), has_results=False)
        assert fourth.after_queue == 7, "where the last visit ended"

    def test_skipped_visit_that_was_not_needed_makes_no_further_claim_due(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW, next_queue=0))
        clock.now += 0.005
        assert claim(planner, clock, ExchangeReply(NOW, next_queue=0)).after_queue is None
        assert planner.delay > 1

    def test_queues_of_finished_jobs_come_first_for_ten_milliseconds_after_a_search(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        assert not claim(planner, clock, ExchangeReply(NOW)).queues_first
        clock.now += 0.005
        assert claim(planner, clock, ExchangeReply(NOW, next_queue=None)).queues_first
        clock.now += 0.006
        assert planner.is_due, "other queues get their turn"
        assert not claim(planner, clock, ExchangeReply(NOW)).queues_first


class TestSmallClaims:
    """A claim that is probably filled may be made by a statement that tells nothing about other jobs."""

    def test_claim_is_probably_filled_after_a_full_one(self, planner: ClaimPlanner, clock: FakeClock) -> None:
        assert not claim(planner, clock, ExchangeReply(NOW, claimed=[claimed(1)])).is_probably_filled
        assert claim(planner, clock, ExchangeReply(NOW)).is_probably_filled
        assert not claim(planner, clock, ExchangeReply(NOW)).is_probably_filled

    @pytest.mark.parametrize("has_results", [False, True])
    def test_claim_of_announced_jobs_is_probably_filled(
        self, planner: ClaimPlanner, clock: FakeClock, has_results: bool
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        planner.notify(1)
        request = planner.plan(Capacity(free_slots=5), has_results=has_results)
        assert (request.wanted, request.is_probably_filled) == (1, True)
        planner.record(clock.now, request, ExchangeReply(NOW, claimed=[claimed(1)]))
        assert planner.delay > 1
        assert not claim(planner, clock, ExchangeReply(NOW)).is_probably_filled

    def test_partial_reply_makes_another_claim_due_at_once(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        planner.notify(1)
        claim(planner, clock, ExchangeReply(NOW, partial=True), has_results=False)
        assert planner.is_due
        assert not planner.missed_notification
        request = claim(planner, clock, ExchangeReply(NOW), capacity=Capacity(free_slots=5))
        assert (request.wanted, request.is_probably_filled) == (5, False)
        assert planner.missed_notification
        assert not planner.is_due

    def test_after_a_partial_reply_no_claim_is_small_for_a_tenth_of_a_second(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW, partial=True))
        seen = []
        for seconds in (0.05, 0.06):
            clock.now += seconds
            claim(planner, clock, ExchangeReply(NOW))
            planner.notify(1)
            seen.append(claim(planner, clock, ExchangeReply(NOW), has_results=False).is_probably_filled)
        assert seen == [False, True]

    def test_claim_that_is_sent_ahead_is_not_limited_to_announced_jobs(
        self, planner: ClaimPlanner, clock: FakeClock
    ) -> None:
        claim(planner, clock, ExchangeReply(NOW))
        planner.notify(1)
        assert planner.plan(Capacity(free_slots=9), has_results=True, incoming=4).wanted == 5
