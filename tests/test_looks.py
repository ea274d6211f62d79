"""When a worker looks for jobs, and from where on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import msgspec
import pytest

from graphile_worker import Job, JobState
from graphile_worker._db.exchange import Held, Position, Reply, Wish
from graphile_worker._runtime import looks as module
from graphile_worker._runtime.looks import Looks

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE = Wish(wanted=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [monotonic()]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def held(job_id: int) -> Held:
    values: dict[str, Any] = dict.fromkeys(field.name for field in msgspec.structs.fields(Job))
    job = Job(**{**values, "id": job_id, "priority": 0, "run_at": NOW, "state": JobState.RUNNING})
    return Held(job, NOW, None)


def look(looks: Looks, reply: Reply, wish: Wish = ONE) -> Position | None:
    mark = looks.begin()
    looks.end(
        vars(module)["monotonic"](), wish if mark is None else Wish(wanted=wish.wanted, mark=mark), reply
    )
    return mark


def test_it_looks_at_the_start_and_after_an_empty_look_when_it_is_time(clock: list[float]) -> None:
    looks = Looks(2.0)
    assert looks.due()
    look(looks, Reply(NOW))
    assert not looks.due()
    assert 1.6 <= looks.delay <= 2.4
    clock[0] += 2.5
    assert looks.due()


def test_it_looks_at_once_when_the_next_job_is_due(clock: list[float]) -> None:
    looks = Looks(2.0)
    look(looks, Reply(NOW, next_due=NOW + timedelta(seconds=0.25)))
    assert looks.delay == pytest.approx(0.25)
    clock[0] += 0.25
    assert looks.due()


def test_being_woken_during_a_look_means_another_one() -> None:
    looks = Looks(2.0)
    looks.begin()
    looks.wake()
    looks.end(monotonic(), ONE, Reply(NOW))
    assert looks.due()


def test_a_look_is_for_as_many_jobs_as_it_was_told_of(clock: list[float]) -> None:
    looks = Looks(2.0)
    told = [looks.told]
    look(looks, Reply(NOW))
    looks.wake(1)
    looks.wake(2)
    told.append(looks.told)
    look(looks, Reply(NOW))
    looks.wake(1)
    looks.wake()
    told.append(looks.told)
    look(looks, Reply(NOW))
    looks.wake(1)
    clock[0] += 3
    told.append(looks.told)
    # For all at the start, when somebody does not know how many, and when it is time for the poll.
    assert told == [None, 3, None, None]


def test_contended_is_looked_at_again_within_milliseconds_and_then_more_slowly(clock: list[float]) -> None:
    looks = Looks(2.0)
    delays = []
    for _ in range(12):
        look(looks, Reply(NOW, contended=True))
        delays.append(looks.delay)
        clock[0] += 10
    assert delays[0] == pytest.approx(0.001)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(0.5)
    look(looks, Reply(NOW, claimed=[held(1)], contended=True), Wish(wanted=2))
    clock[0] += 10
    look(looks, Reply(NOW, contended=True))
    assert looks.delay == pytest.approx(0.001), "it was worth it"


def test_while_looks_are_slow_they_go_on_where_the_last_one_ended(clock: list[float]) -> None:
    looks = Looks(2.0)
    slow = [Reply(NOW, claimed=[held(n)], cost=0.5) for n in range(100)]
    for n in range(3):
        assert look(looks, slow[n]) is None
    marks = []
    for n in range(3, 30):
        clock[0] += 0.01
        marks.append(look(looks, slow[n]))
    assert marks[0] == Position(0, NOW, 2)
    full = [n for n, mark in enumerate(marks) if mark is None]
    assert 2 <= len(full) <= 3, "every 0.1 s one from the beginning"


def test_a_look_from_a_position_that_finds_too_little_is_repeated_from_the_beginning(
    clock: list[float],
) -> None:
    looks = Looks(2.0)
    for n in range(3):
        look(looks, Reply(NOW, claimed=[held(n)], cost=0.5))
    assert look(looks, Reply(NOW)) is not None
    assert looks.due()
    assert look(looks, Reply(NOW)) is None
    assert not looks.due()
    assert clock


def test_quick_looks_always_begin_at_the_beginning() -> None:
    looks = Looks(2.0)
    assert [look(looks, Reply(NOW, claimed=[held(n)], cost=0.001)) for n in range(20)] == [None] * 20


def test_where_jobs_end_quickly_queues_are_visited_only_now_and_then(clock: list[float]) -> None:
    looks = Looks(2.0)
    assert looks.after_queue(has_results=True) == 0
    look(looks, Reply(NOW, next_queue=7, claimed=[held(1)]))
    assert looks.after_queue(has_results=True) == 7, "it was full, so there may be more"
    look(looks, Reply(NOW, next_queue=7))
    assert looks.after_queue(has_results=True) is None
    assert looks.after_queue(has_results=False) == 7
    look(looks, Reply(NOW, next_queue=None), Wish(wanted=1, after_queue=None))
    assert looks.delay == pytest.approx(0.01), "but soon: jobs may be hidden behind others"
    clock[0] += 0.02
    assert looks.due()
    assert looks.after_queue(has_results=True) == 7, "where the last visit ended"


def test_a_visit_that_was_spared_and_not_needed_costs_no_further_look(clock: list[float]) -> None:
    looks = Looks(2.0)
    look(looks, Reply(NOW))
    clock[0] += 0.005
    look(looks, Reply(NOW), Wish(wanted=1, after_queue=None))
    assert looks.delay > 1


def test_a_look_in_vain_is_remembered_until_somebody_sees_to_it() -> None:
    """New jobs that nobody finds may be those of a task whose name was removed, and is there again."""
    looks = Looks(2.0)
    look(looks, Reply(NOW))
    assert not looks.in_vain, "nobody said that there is something"
    looks.wake(1)
    look(looks, Reply(NOW))
    assert looks.in_vain
    look(looks, Reply(NOW))
    assert looks.in_vain
