"""The audit of a chaos run finds what it is there to find: ledgers written by hand, with one thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos.audit import Audit, Auditor
from chaos.figures import recoveries, throughput
from chaos.history import History
from chaos.leases import Leases
from chaos.ledger import (
    CANCELLED,
    NODE_FREED,
    OK,
    PAUSED,
    RAISED,
    Answered,
    Asked,
    Begun,
    Ended,
    Exited,
    Fault,
    LeftJob,
    LeftLock,
    Line,
    Phase,
    Ready,
    Removed,
    Removing,
    Told,
    read_file,
    text_of,
)
from chaos.promises import late_recoveries
from chaos.schedule import KINDS, fitting, schedule
from chaos.tasks import ASYNC, THREAD

LEASES = Leases()
FIRST, SECOND = 100, 200
"""Two processes."""


def added(token: str, at: float = 0.0, **options: Any) -> list[Line]:
    return [
        Asked(at=at, token=token, task=ASYNC, **options),
        Answered(at=at + 0.01, token=token, job=int(token)),
    ]


def ran(
    token: str,
    at: float,
    until: float | None,
    outcome: str = OK,
    *,
    attempt: int = 1,
    pid: int = FIRST,
    queue: str | None = None,
    task: str = ASYNC,
) -> list[Line]:
    run = f"{token}-{at}"
    lines: list[Line] = [
        Begun(
            at=at, run=run, job=int(token), token=token, attempt=attempt, task=task, queue=queue,
            worker=f"python-{pid}", pid=pid,
        )
    ]  # fmt: skip
    if until is not None:
        lines.append(Ended(at=until, run=run, outcome=outcome))
    return lines


def fault(kind: str, at: float, until: float, *pids: int, **more: Any) -> Fault:
    return Fault(at=at, until=until, kind=kind, pids=list(pids), **more)


def killed(pid: int, at: float) -> list[Line]:
    return [
        fault("kill", at, at + 0.1, pid, slots=[0 if pid == FIRST else 1]),
        Exited(at=at + 0.05, slot=0, pid=pid, program="python", status=-9, wanted=True),
    ]


def left(token: str, **more: Any) -> LeftJob:
    whole = {"attempts": 1, "max_attempts": 25, "locked_by": None, "last_error": None, **more}
    return LeftJob(job=int(token), token=token, **whole)


def audited(*lines: Line) -> Audit:
    return Auditor(History.of(lines), LEASES).audit()


def rules(*lines: Line) -> list[str]:
    return [violation.rule for violation in audited(*lines).violations]


def test_a_run_in_which_all_went_well_has_no_violation() -> None:
    assert (
        rules(
            *added("1"), *ran("1", 1, 2),
            *added("2", fails=1), *ran("2", 1, 2, RAISED), *ran("2", 5, 6, attempt=2),
            *added("3", fails=1, max_attempts=1), *ran("3", 1, 2, RAISED),
            left("3", max_attempts=1, last_error="as told"),
            *added("4", queue="q"), *ran("4", 1, 2, queue="q"),
            *added("5", queue="q"), *ran("5", 2.001, 3, queue="q", pid=SECOND),
        )
        == []
    )  # fmt: skip


class TestEveryJobRuns:
    def test_one_that_never_ran_is_lost(self) -> None:
        audit = audited(*added("1"), *added("2"), *ran("2", 1, 2))
        assert [violation.rule for violation in audit.violations] == ["lost"]
        assert '"token":"1"' in str(audit.violations[0]), "with its evidence"

    def test_one_that_was_only_begun_is_lost(self) -> None:
        assert rules(*added("1"), *ran("1", 1, None), *killed(FIRST, 1.5)) == ["lost"]

    def test_one_that_only_failed_is_lost(self) -> None:
        assert rules(*added("1", fails=2), *ran("1", 1, 2, RAISED)) == ["lost"]

    def test_one_of_which_nobody_knows_whether_it_was_added_need_not_run(self) -> None:
        asked = Asked(at=0, token="1", task=ASYNC)
        assert rules(asked, Answered(at=1, token="1", problem="lost connection")) == []

    def test_one_that_was_to_fail_for_good_must_be_there(self) -> None:
        assert rules(*added("1", fails=1, max_attempts=1), *ran("1", 1, 2, RAISED)) == ["failed"]

    def test_and_must_not_succeed(self) -> None:
        lines = [*added("1", fails=1, max_attempts=1), *ran("1", 1, 2)]
        assert rules(*lines, left("1", max_attempts=1)) == ["failed"]

    def test_of_a_key_the_last_one_must_run(self) -> None:
        lines = [*added("1", key="k"), *added("2", 5, key="k"), *added("3", 9, key="other")]
        assert rules(*lines, *ran("1", 1, 2), *ran("3", 9, 10)) == ["lost"]
        assert rules(*lines, *ran("2", 6, 7), *ran("3", 9, 10)) == []

    def test_or_one_that_may_have_replaced_it(self) -> None:
        unsure = Asked(at=5, token="2", task=ASYNC, key="k")
        assert rules(*added("1", key="k"), unsure, *ran("2", 6, 7)) == []
        assert rules(*added("1", key="k"), unsure) == ["lost"]


def removed(key: str, at: float, job: int | None, *, running: bool = False) -> list[Line]:
    return [
        Removing(at=at, token=f"r{at}", key=key),
        Removed(at=at + 0.01, token=f"r{at}", job=job, running=running),
    ]


class TestRemovedJobs:
    def test_one_that_was_removed_need_not_run(self) -> None:
        assert rules(*added("1", key="k"), *removed("k", 1, 1)) == []

    def test_one_that_was_added_after_that_must(self) -> None:
        lines = [*added("1", key="k"), *removed("k", 1, 1), *added("2", 2, key="k")]
        assert rules(*lines) == ["lost"]
        assert rules(*lines, *ran("2", 3, 4)) == []

    def test_another_key_is_no_excuse(self) -> None:
        assert rules(*added("1", key="k"), *removed("l", 1, None)) == ["lost"]

    def test_a_removal_of_which_nobody_knows_may_have_come_later(self) -> None:
        assert rules(Removing(at=1, token="r", key="k"), *added("1", 2, key="k")) == []
        assert rules(Removing(at=1, token="r", key="k"), *added("1", 1000, key="k")) == ["lost"]

    def test_one_that_was_removed_must_not_run(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 2, 3)]
        assert rules(*lines, *removed("k", 1, 1)) == ["removed"]
        assert rules(*lines, *removed("k", 1, 1, running=True)) == []
        assert rules(*lines, *removed("k", 2.5, 1, running=True)) == []

    def test_one_that_lost_its_key_while_it_ran_may_be_left(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 1, None), *killed(FIRST, 2), left("1", attempts=25)]
        assert rules(*lines, *removed("k", 1.5, 1, running=True)) == []
        assert rules(*lines) == ["lost", "left"]


class TestEveryRunTooManyHasACause:
    def test_without_a_fault_it_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)) == ["extra run"]

    def test_another_workers_death_is_none(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)]
        assert rules(*lines, *killed(SECOND, 1.5)) == ["extra run"]

    def test_nor_is_a_fault_that_was_over_or_came_later(self) -> None:
        lines = [*added("1"), *ran("1", 10, 11), *ran("1", 30, 31, attempt=2)]
        assert rules(*lines, fault("cut", 8, 9, FIRST)) == ["extra run"]
        assert rules(*lines, fault("cut", 20, 20.1, FIRST)) == ["extra run"]

    @pytest.mark.parametrize("kind", ["clock", "idle transaction", "exhaust", "fork"])
    def test_nor_is_what_must_not_matter(self, kind: str) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)]
        assert rules(*lines, fault(kind, 0, 5, FIRST)) == ["extra run"]

    def test_the_death_of_its_worker_is_one(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 12, 13, attempt=2, pid=SECOND)]
        audit = audited(*lines, *killed(FIRST, 2))
        assert audit.violations == []
        assert [(cause.kind, cause.expected) for cause in audit.causes] == [("kill", True)]

    def test_so_is_a_restart_of_the_server_which_hits_all(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 6, 7, attempt=2)]
        audit = audited(*lines, fault("restart immediate", 2.5, 4))
        assert audit.violations == []
        assert [cause.expected for cause in audit.causes] == [False], "it should not cost a run"

    def test_a_silence_is_expected_to_cost_runs_only_if_it_is_longer_than_the_lease(self) -> None:
        lines = [*added("1"), *ran("1", 1, 60), *ran("1", 45, 46, attempt=2, pid=SECOND)]
        for seconds, expected in ((50, True), (5, False)):
            causes = audited(*lines, fault("freeze", 2, 2 + seconds, FIRST)).causes
            assert [cause.expected for cause in causes] == [expected]

    def test_what_node_held_and_was_freed_by_hand_may_run_again(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 4, 5, attempt=2, pid=SECOND)]
        gone = Exited(at=2, slot=3, pid=FIRST, program="node", status=1, wanted=False)
        assert rules(*lines, gone, fault(NODE_FREED, 2, 3, locks={"pool-1": [1]})) == []
        assert rules(*lines, gone, fault(NODE_FREED, 2, 3, locks={"pool-1": [2]})) == ["extra run"]


def test_what_was_told_to_be_complete_must_not_run_again() -> None:
    lines = [*added("1"), *ran("1", 1, 2), *ran("1", 12, 13, attempt=2, pid=SECOND), *killed(FIRST, 2.5)]
    told = Told(at=2.1, name="job:complete", worker="python-100", pid=FIRST, job=1, attempt=1)
    lost = Told(at=2.1, name="job:lost", worker="python-100", pid=FIRST, job=1, attempt=1)
    assert rules(*lines, lost) == []
    assert rules(*lines, told) == ["complete"]


class TestNothingOverlaps:
    def test_two_runs_of_a_queue_at_once_are_a_violation(self) -> None:
        lines = [*added("1"), *ran("1", 1, 3, queue="q"), *added("2"), *ran("2", 2, 4, queue="q")]
        assert rules(*lines) == ["overlap"]

    def test_a_short_one_inside_a_long_one_hides_nothing(self) -> None:
        lines = [*added("1"), *ran("1", 1, 9, queue="q"), *added("2"), *ran("2", 2, 3, queue="q")]
        assert rules(*lines, *added("3"), *ran("3", 8, 10, queue="q")) == ["overlap", "overlap"]

    def test_runs_of_different_queues_are_none(self) -> None:
        lines = [*added("1"), *ran("1", 1, 3, queue="q"), *added("2"), *ran("2", 2, 4, queue="r")]
        assert rules(*lines) == []

    def test_two_runs_of_one_job_are_a_violation(self) -> None:
        lines = [*added("1"), *ran("1", 1, 30), *ran("1", 12, 13, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("cut", 2, 3, FIRST)) == ["overlap"]

    def test_a_run_without_an_end_ends_with_its_process(self) -> None:
        lines = [
            *added("1"),
            *ran("1", 1, None, queue="q"),
            *ran("1", 9, 10, attempt=2, pid=SECOND, queue="q"),
        ]
        assert rules(*lines, *killed(FIRST, 2)) == []
        assert rules(*lines, *killed(FIRST, 9.5)) == ["extra run", "overlap"], "it lived on"
        assert rules(*lines, fault("cut", 2, 3, FIRST)) == ["overlap"], "it never ended"

    def test_a_process_that_was_frozen_beyond_its_lease_may_go_on_for_a_moment(self) -> None:
        lines = [*added("1"), *ran("1", 45, 51.5, attempt=2, pid=SECOND)]
        assert rules(*lines, *ran("1", 1, 51, CANCELLED), fault("long freeze", 1, 51, FIRST)) == []
        assert rules(*lines, *ran("1", 1, 58), fault("long freeze", 1, 51, FIRST)) == ["overlap"]
        thread = ran("1", 1, 58, task=THREAD)
        assert rules(*lines, *thread, fault("long freeze", 1, 51, FIRST)) == ["overlap"], "it can end"

    def test_a_frozen_run_counts_once_however_many_ran_meanwhile(self) -> None:
        others = [
            line for n in range(2, 9) for line in (*added(f"{n}"), *ran(f"{n}", 40 + n, 40.5 + n, queue="q"))
        ]
        frozen = [*added("1"), *ran("1", 1, 51, pid=SECOND, queue="q"), fault("long freeze", 1, 51, SECOND)]
        audit = audited(*others, *frozen)
        assert (audit.violations, len(audit.frozen)) == ([], 1)

    def test_one_that_was_frozen_for_less_may_not(self) -> None:
        lines = [*added("1"), *ran("1", 1, 16), *ran("1", 15, 16.5, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("freeze", 1, 16, FIRST)) == ["overlap"]
        cut = fault("cut", 2, 2.1, FIRST)
        assert rules(*lines, fault("freeze", 1, 16, FIRST), cut) == [], "its sessions were gone"

    def test_nor_one_that_was_only_cut_off(self) -> None:
        lines = [*added("1"), *ran("1", 1, 51), *ran("1", 45, 46, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("long dark", 1, 51, FIRST)) == ["overlap"], "it should have noticed"


class TestNothingIsLeft:
    def test_a_locked_job_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), left("1", locked_by="python-1")) == ["locked"]

    def test_a_locked_queue_is_one(self) -> None:
        assert rules(LeftLock(queue="q", locked_by="python-1")) == ["locked"]

    def test_a_job_that_could_run_is_one(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), left("1")) == ["left"]

    def test_a_job_that_nobody_asked_for_is_one(self) -> None:
        assert rules(left("7", attempts=25)) == ["left"]

    def test_one_that_gave_its_key_away_while_it_ran_is_none(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 1, None), *killed(FIRST, 2)]
        audit = audited(
            *lines, *added("2", 1.5, key="k"), *ran("2", 3, 4, pid=SECOND), left("1", attempts=25)
        )
        assert (audit.violations, audit.superseded) == ([], 1)


class TestAttemptsAddUp:
    def test_an_attempt_that_is_skipped_is_a_violation(self) -> None:
        lines = [*added("1", fails=1), *ran("1", 1, 2, RAISED), *ran("1", 6, 7, attempt=3)]
        assert rules(*lines) == ["attempts"]

    def test_so_is_a_first_run_that_is_not_the_first_attempt(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2, attempt=2)) == ["attempts"]

    def test_unless_a_worker_died_that_may_have_claimed_it(self) -> None:
        assert rules(*added("1"), *ran("1", 9, 10, attempt=2), *killed(SECOND, 1)) == []

    def test_so_is_one_that_did_not_grow(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 12, 13, pid=SECOND)]
        assert rules(*lines, *killed(FIRST, 2)) == ["attempts"]

    def test_unless_it_was_given_back(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2, CANCELLED), *ran("1", 3, 4, pid=SECOND)]
        assert rules(*lines, fault("term", 1, 2.5, FIRST)) == []

    def test_so_is_one_that_shrank(self) -> None:
        lines = [*added("1", fails=3), *ran("1", 1, 2, RAISED), *ran("1", 6, 7, RAISED, attempt=2)]
        shrunk = [*ran("1", 9, 10, RAISED), *ran("1", 12, 13, attempt=2)]
        assert rules(*lines, *shrunk) == ["attempts"]

    def test_so_are_two_ids_for_what_was_asked_for_once(self) -> None:
        again = Begun(
            at=3, run="r", job=2, token="1", attempt=2, task=ASYNC, queue=None, worker="python-1", pid=FIRST
        )
        lines = [*added("1", fails=1), *ran("1", 1, 2, RAISED), again, Ended(at=4, run="r", outcome=OK)]
        assert rules(*lines) == ["attempts"]


def test_a_worker_that_ends_by_itself_is_a_violation() -> None:
    ready = Ready(at=0, slot=0, worker="python-1", pid=FIRST)
    ours = Exited(at=5, slot=0, pid=FIRST, program="python", status=1, wanted=False)
    node = Exited(at=5, slot=0, pid=FIRST, program="node", status=1, wanted=False)
    assert rules(ready, ours) == ["ended"]
    assert rules(ours) == [], "it could not even start"
    assert rules(ready, node) == [], "npm's is not ours to judge"


def test_one_that_cannot_stop_what_may_be_others_by_now_may_end() -> None:
    ready = Ready(at=0, slot=0, worker="python-1", pid=FIRST)
    ours = Exited(at=39, slot=0, pid=FIRST, program="python", status=1, wanted=False)
    assert rules(ready, ours, fault("long dark", 1, 51, FIRST)) == []
    assert rules(ready, ours, fault("long dark", 1, 51, SECOND)) == ["ended"]
    assert rules(ready, ours, fault("clock", 1, 51, FIRST)) == ["ended"]


def test_a_worker_that_is_declared_dead_and_lives_is_a_violation() -> None:
    ready = Ready(at=0, slot=0, worker="python-1", pid=FIRST)
    told = Told(at=40, name="worker:recovered", worker="python-2", pid=SECOND, about="python-1")
    assert rules(ready, told) == ["declared dead"]
    assert rules(ready, told, fault("hold gil", 35, 40, FIRST)) == ["declared dead"]
    assert rules(ready, told, *killed(FIRST, 30)) == []
    assert rules(ready, told, fault("long freeze", 1, 51, FIRST)) == []
    assert rules(ready, told, fault("freeze", 30, 45, FIRST)) == ["declared dead"]
    assert rules(ready, told, fault("freeze", 30, 45, FIRST), fault("cut", 31, 31, FIRST)) == []
    assert rules(ready, told, fault(PAUSED, 30, 45, FIRST), fault("cut", 31, 31, FIRST)) == []
    assert rules(ready, told, fault(PAUSED, 30, 45, SECOND), fault("cut", 31, 31, FIRST)) == ["declared dead"]


def test_a_pause_that_we_caused_is_not_another_fault() -> None:
    freeze = fault("freeze", 30, 45, FIRST)
    echo, other = fault(PAUSED, 29.9, 45, FIRST), fault(PAUSED, 30, 45, SECOND)
    assert History.of([echo, freeze, other]).faults == [freeze, other]
    longer = fault(PAUSED, 20, 70, FIRST)
    assert History.of([freeze, longer]).faults == [longer, freeze]


def test_a_pause_that_is_too_short_to_lose_jobs_explains_nothing() -> None:
    again = [*added("1"), *ran("1", 1, 9), *ran("1", 9.5, 11, attempt=2, pid=SECOND)]
    assert rules(*again, fault(PAUSED, 8, 8.6, FIRST)) == rules(*again) == ["extra run"]
    unseen = [*added("1"), *ran("1", 9, 10, attempt=2)]
    assert rules(*unseen, fault(PAUSED, 8, 8.6, SECOND)) == rules(*unseen) == ["attempts"]


class TestRecovery:
    def lines(self, again: float) -> list[Line]:
        return [
            *self.both(),
            *added("1"), *ran("1", 1, None), *ran("1", again, again + 1, attempt=2, pid=SECOND),
            *killed(FIRST, 2),
        ]  # fmt: skip

    def both(self) -> list[Line]:
        return [
            Ready(at=0, slot=0, worker="python-100", pid=FIRST),
            Ready(at=0, slot=1, worker="python-200", pid=SECOND),
        ]

    def test_the_time_runs_from_the_fault_to_the_next_run(self) -> None:
        [recovery] = recoveries(History.of(self.lines(12)), LEASES)
        assert (recovery.seconds, recovery.alone, recovery.repeated) == (10, True, False)

    def test_a_job_that_was_claimed_and_had_not_begun_counts(self) -> None:
        kill = fault("kill", 2, 2.1, FIRST, locks={"python-100": [1]})
        history = History.of([*self.both(), kill, *added("1"), *ran("1", 9, 10, attempt=2, pid=SECOND)])
        assert [(recovery.seconds, recovery.repeated) for recovery in recoveries(history, LEASES)] == [
            (7, False)
        ]

    def test_a_second_one_in_a_row_is_told_apart(self) -> None:
        lines = [*self.lines(12)[:-3], *ran("1", 12, None, attempt=2, pid=SECOND), *killed(SECOND, 13)]
        history = History.of([*lines, *killed(FIRST, 2), *ran("1", 30, 31, attempt=3, pid=300)])
        assert [recovery.repeated for recovery in recoveries(history, LEASES)] == [False, True]

    def test_a_job_that_its_worker_finished_all_the_same_does_not(self) -> None:
        history = History.of([*added("1"), *ran("1", 1, 9), fault("freeze", 2, 8, FIRST)])
        assert recoveries(history, LEASES) == []

    def test_one_is_counted_once_for_the_first_fault_that_is_known_to_cost_jobs(self) -> None:
        others = [fault("hold gil", 1.5, 2, FIRST), fault("cut", 1.6, 1.6, FIRST), fault("kill", 5, 5, FIRST)]
        [recovery] = recoveries(History.of([*self.lines(12), *others]), LEASES)
        assert (recovery.fault.kind, recovery.fault.at) == ("kill", 2)

    def test_too_late_is_a_violation(self) -> None:
        late = late_recoveries(History.of(self.lines(23)), LEASES)
        assert [violation.rule for violation in late] == ["late"]
        assert late_recoveries(History.of(self.lines(12)), LEASES) == []

    def test_unless_something_else_was_broken(self) -> None:
        for other in (
            fault("restart long", 5, 17),
            fault("freeze", 5, 17, SECOND, slots=[1]),
            fault("long dark", 0, 17, FIRST, slots=[0]),
        ):
            assert late_recoveries(History.of([*self.lines(23), other]), LEASES) == []

    def test_which_mattered(self) -> None:
        third = Ready(at=0, slot=2, worker="python-300", pid=300)
        for other in (fault("freeze", 5, 17, SECOND, slots=[1]), fault("clock", 5, 17, 300, slots=[2])):
            assert len(late_recoveries(History.of([*self.lines(23), third, other]), LEASES)) == 1

    def test_to_the_server_a_worker_lives_while_a_child_has_its_sockets(self) -> None:
        forked = [*added("9"), *ran("9", 0.5, 0.6, task="fork"), fault("fork", 0, 10, note="9")]
        assert late_recoveries(History.of([*self.lines(40), *forked]), LEASES) == []
        assert len(late_recoveries(History.of([*self.lines(58), *forked]), LEASES)) == 1


def test_throughput_is_counted_phase_by_phase() -> None:
    phases = [Phase(at=0, name="before"), Phase(at=10, name="during"), Phase(at=12, name="over")]
    before, during = throughput(
        History.of([*phases, *added("1"), *ran("1", 1, 2), *added("2", 1), *ran("2", 9, 11)])
    )
    assert (before.added, before.succeeded, during.added, during.succeeded) == (0.2, 0.1, 0, 0.5)


def test_half_a_line_of_a_process_that_was_killed_is_none(tmp_path: Path) -> None:
    line, path = added("1")[0], tmp_path / "a.ledger"
    path.write_bytes(f"{text_of(line)}\n{text_of(line)}".encode())
    assert read_file(path) == [line]


class TestSchedule:
    def plan(self, seed: int) -> list[Any]:
        return list(schedule(seed, 300, list(KINDS), slots=3, scale=1.0))

    def test_the_same_seed_gives_the_same_faults(self) -> None:
        assert self.plan(1) == self.plan(1)
        assert self.plan(1) != self.plan(2)

    def test_none_is_left_out_and_all_are_over_in_time(self) -> None:
        planned = self.plan(5)
        assert {fault.kind for fault in planned} == set(KINDS)
        assert max(fault.at + fault.seconds for fault in planned) <= 300
        assert {fault.slot for fault in planned} == {0, 1, 2}

    def test_what_does_not_fit_is_left_out(self) -> None:
        assert "long freeze" not in fitting(list(KINDS), 30, 1.0)
        assert "long freeze" in fitting(list(KINDS), 30, 0.2)
