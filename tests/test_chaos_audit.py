"""The audit of a chaos run finds violations: in ledgers written by hand, each with one thing wrong."""

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
    NODE_LOCKS_RELEASED,
    OK,
    PAUSED,
    RAISED,
    AddRequest,
    AddResult,
    Fault,
    HistoryRead,
    JobRemoved,
    KeptAttempt,
    Line,
    LockedQueue,
    Phase,
    ProcessExited,
    RemainingJob,
    RemoveRequest,
    RunEnded,
    RunStarted,
    WorkerEvent,
    WorkerReady,
    encode_line,
    read_file,
)
from chaos.recovery_limits import late_recoveries
from chaos.schedule import KINDS, kinds_that_fit, schedule
from chaos.tasks import ASYNC, THREAD

LEASES = Leases()
FIRST, SECOND = 100, 200
"""The ids of two worker processes."""


def added(token: str, at: float = 0.0, **options: Any) -> list[Line]:
    return [
        AddRequest(at=at, token=token, task=ASYNC, **options),
        AddResult(at=at + 0.01, token=token, job=int(token)),
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
        RunStarted(
            at=at, run=run, job=int(token), token=token, attempt=attempt, task=task, queue=queue,
            worker=f"python-{pid}", pid=pid,
        )
    ]  # fmt: skip
    if until is not None:
        lines.append(RunEnded(at=until, run=run, outcome=outcome))
    return lines


def fault(kind: str, at: float, until: float, *pids: int, **more: Any) -> Fault:
    return Fault(at=at, until=until, kind=kind, pids=list(pids), **more)


def killed(pid: int, at: float) -> list[Line]:
    return [
        fault("kill", at, at + 0.1, pid, slots=[0 if pid == FIRST else 1]),
        ProcessExited(at=at + 0.05, slot=0, pid=pid, program="python", status=-9, intended=True),
    ]


def left(token: str, **more: Any) -> RemainingJob:
    whole = {"attempts": 1, "max_attempts": 25, "locked_by": None, "last_error": None, **more}
    return RemainingJob(job=int(token), token=token, **whole)


def run_audit(*lines: Line) -> Audit:
    return Auditor(History.of(lines), LEASES).audit()


def rules(*lines: Line) -> list[str]:
    return [violation.rule for violation in run_audit(*lines).violations]


def test_run_without_problems_has_no_violations() -> None:
    assert (
        rules(
            *added("1"), *ran("1", 1, 2),
            *added("2", fails=1), *ran("2", 1, 2, RAISED), *ran("2", 5, 6, attempt=2),
            *added("3", fails=1, max_attempts=1), *ran("3", 1, 2, RAISED),
            left("3", max_attempts=1, last_error="as planned"),
            *added("4", queue="q"), *ran("4", 1, 2, queue="q"),
            *added("5", queue="q"), *ran("5", 2.001, 3, queue="q", pid=SECOND),
        )
        == []
    )  # fmt: skip


class TestEveryJobRuns:
    def test_job_that_never_ran_is_lost(self) -> None:
        audit = run_audit(*added("1"), *added("2"), *ran("2", 1, 2))
        assert [violation.rule for violation in audit.violations] == ["lost"]
        assert '"token":"1"' in str(audit.violations[0]), "the violation has its evidence"

    def test_job_that_only_started_is_lost(self) -> None:
        assert rules(*added("1"), *ran("1", 1, None), *killed(FIRST, 1.5)) == ["lost"]

    def test_job_that_only_failed_is_lost(self) -> None:
        assert rules(*added("1", fails=2), *ran("1", 1, 2, RAISED)) == ["lost"]

    def test_job_that_may_not_have_been_added_need_not_run(self) -> None:
        asked = AddRequest(at=0, token="1", task=ASYNC)
        assert rules(asked, AddResult(at=1, token="1", problem="lost connection")) == []

    def test_job_meant_to_fail_permanently_must_remain(self) -> None:
        assert rules(*added("1", fails=1, max_attempts=1), *ran("1", 1, 2, RAISED)) == ["failed"]

    def test_job_meant_to_fail_permanently_must_not_succeed(self) -> None:
        lines = [*added("1", fails=1, max_attempts=1), *ran("1", 1, 2)]
        assert rules(*lines, left("1", max_attempts=1)) == ["failed"]

    def test_last_job_of_a_key_must_run(self) -> None:
        lines = [*added("1", key="k"), *added("2", 5, key="k"), *added("3", 9, key="other")]
        assert rules(*lines, *ran("1", 1, 2), *ran("3", 9, 10)) == ["lost"]
        assert rules(*lines, *ran("2", 6, 7), *ran("3", 9, 10)) == []

    def test_job_that_may_have_replaced_the_last_one_may_run_instead(self) -> None:
        uncertain = AddRequest(at=5, token="2", task=ASYNC, key="k")
        assert rules(*added("1", key="k"), uncertain, *ran("2", 6, 7)) == []
        assert rules(*added("1", key="k"), uncertain) == ["lost"]


def removed(key: str, at: float, job: int | None, *, running: bool = False) -> list[Line]:
    return [
        RemoveRequest(at=at, token=f"r{at}", key=key),
        JobRemoved(at=at + 0.01, token=f"r{at}", job=job, running=running),
    ]


class TestRemovedJobs:
    def test_removed_job_need_not_run(self) -> None:
        assert rules(*added("1", key="k"), *removed("k", 1, 1)) == []

    def test_job_added_after_the_removal_must_run(self) -> None:
        lines = [*added("1", key="k"), *removed("k", 1, 1), *added("2", 2, key="k")]
        assert rules(*lines) == ["lost"]
        assert rules(*lines, *ran("2", 3, 4)) == []

    def test_removal_of_another_key_does_not_excuse_a_lost_job(self) -> None:
        assert rules(*added("1", key="k"), *removed("l", 1, None)) == ["lost"]

    def test_unconfirmed_removal_may_have_happened_later(self) -> None:
        assert rules(RemoveRequest(at=1, token="r", key="k"), *added("1", 2, key="k")) == []
        assert rules(RemoveRequest(at=1, token="r", key="k"), *added("1", 1000, key="k")) == ["lost"]

    def test_removed_job_must_not_run(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 2, 3)]
        assert rules(*lines, *removed("k", 1, 1)) == ["removed"]
        assert rules(*lines, *removed("k", 1, 1, running=True)) == []
        assert rules(*lines, *removed("k", 2.5, 1, running=True)) == []

    def test_running_job_that_lost_its_key_may_remain(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 1, None), *killed(FIRST, 2), left("1", attempts=25)]
        assert rules(*lines, *removed("k", 1.5, 1, running=True)) == []
        assert rules(*lines) == ["lost", "left"]


class TestEveryExtraRunHasACause:
    def test_extra_run_without_a_fault_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)) == ["extra run"]

    def test_death_of_another_worker_does_not_explain_an_extra_run(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)]
        assert rules(*lines, *killed(SECOND, 1.5)) == ["extra run"]

    def test_earlier_or_later_fault_does_not_explain_an_extra_run(self) -> None:
        lines = [*added("1"), *ran("1", 10, 11), *ran("1", 30, 31, attempt=2)]
        assert rules(*lines, fault("cut", 8, 9, FIRST)) == ["extra run"]
        assert rules(*lines, fault("cut", 20, 20.1, FIRST)) == ["extra run"]

    @pytest.mark.parametrize("kind", ["clock", "idle transaction", "exhaust", "fork"])
    def test_harmless_fault_does_not_explain_an_extra_run(self, kind: str) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 3, 4, attempt=2)]
        assert rules(*lines, fault(kind, 0, 5, FIRST)) == ["extra run"]

    def test_death_of_its_worker_explains_an_extra_run(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 12, 13, attempt=2, pid=SECOND)]
        audit = run_audit(*lines, *killed(FIRST, 2))
        assert audit.violations == []
        assert [(cause.kind, cause.expected) for cause in audit.causes] == [("kill", True)]

    def test_restart_of_the_server_explains_extra_runs_of_all_workers(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2), *ran("1", 6, 7, attempt=2)]
        audit = run_audit(*lines, fault("restart immediate", 2.5, 4))
        assert audit.violations == []
        assert [cause.expected for cause in audit.causes] == [False], (
            "a restart should not cause a second run"
        )

    def test_freeze_is_expected_to_cause_extra_runs_only_beyond_the_lease(self) -> None:
        lines = [*added("1"), *ran("1", 1, 60), *ran("1", 45, 46, attempt=2, pid=SECOND)]
        for seconds, expected in ((50, True), (5, False)):
            causes = run_audit(*lines, fault("freeze", 2, 2 + seconds, FIRST)).causes
            assert [cause.expected for cause in causes] == [expected]

    def test_job_released_from_a_dead_node_worker_may_run_again(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 4, 5, attempt=2, pid=SECOND)]
        gone = ProcessExited(at=2, slot=3, pid=FIRST, program="node", status=1, intended=False)
        assert rules(*lines, gone, fault(NODE_LOCKS_RELEASED, 2, 3, locks={"pool-1": [1]})) == []
        assert rules(*lines, gone, fault(NODE_LOCKS_RELEASED, 2, 3, locks={"pool-1": [2]})) == ["extra run"]


def test_job_reported_as_complete_must_not_run_again() -> None:
    lines = [*added("1"), *ran("1", 1, 2), *ran("1", 12, 13, attempt=2, pid=SECOND), *killed(FIRST, 2.5)]
    completed = WorkerEvent(at=2.1, name="job:complete", worker="python-100", pid=FIRST, job=1, attempt=1)
    lost = WorkerEvent(at=2.1, name="job:lost", worker="python-100", pid=FIRST, job=1, attempt=1)
    assert rules(*lines, lost) == []
    assert rules(*lines, completed) == ["complete"]


class TestRunsDoNotOverlap:
    def test_overlapping_runs_of_a_queue_are_a_violation(self) -> None:
        lines = [*added("1"), *ran("1", 1, 3, queue="q"), *added("2"), *ran("2", 2, 4, queue="q")]
        assert rules(*lines) == ["overlap"]

    def test_short_run_within_a_long_one_hides_no_later_overlap(self) -> None:
        lines = [*added("1"), *ran("1", 1, 9, queue="q"), *added("2"), *ran("2", 2, 3, queue="q")]
        assert rules(*lines, *added("3"), *ran("3", 8, 10, queue="q")) == ["overlap", "overlap"]

    def test_overlapping_runs_of_different_queues_are_allowed(self) -> None:
        lines = [*added("1"), *ran("1", 1, 3, queue="q"), *added("2"), *ran("2", 2, 4, queue="r")]
        assert rules(*lines) == []

    def test_overlapping_runs_of_one_job_are_a_violation(self) -> None:
        lines = [*added("1"), *ran("1", 1, 30), *ran("1", 12, 13, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("cut", 2, 3, FIRST)) == ["overlap"]

    def test_run_without_an_end_ends_with_its_process(self) -> None:
        lines = [
            *added("1"),
            *ran("1", 1, None, queue="q"),
            *ran("1", 9, 10, attempt=2, pid=SECOND, queue="q"),
        ]
        assert rules(*lines, *killed(FIRST, 2)) == []
        assert rules(*lines, *killed(FIRST, 9.5)) == ["extra run", "overlap"], "the process was still running"
        assert rules(*lines, fault("cut", 2, 3, FIRST)) == ["overlap"], "the process never ended"

    def test_run_may_continue_briefly_after_a_freeze_beyond_the_lease(self) -> None:
        lines = [*added("1"), *ran("1", 45, 51.5, attempt=2, pid=SECOND)]
        assert rules(*lines, *ran("1", 1, 51, CANCELLED), fault("long freeze", 1, 51, FIRST)) == []
        assert rules(*lines, *ran("1", 1, 58), fault("long freeze", 1, 51, FIRST)) == ["overlap"]
        thread = ran("1", 1, 58, task=THREAD)
        assert rules(*lines, *thread, fault("long freeze", 1, 51, FIRST)) == ["overlap"], (
            "its process could have ended"
        )

    def test_frozen_run_counts_once_for_any_number_of_overlaps(self) -> None:
        others = [
            line for n in range(2, 9) for line in (*added(f"{n}"), *ran(f"{n}", 40 + n, 40.5 + n, queue="q"))
        ]
        frozen = [*added("1"), *ran("1", 1, 51, pid=SECOND, queue="q"), fault("long freeze", 1, 51, SECOND)]
        audit = run_audit(*others, *frozen)
        assert (audit.violations, len(audit.frozen)) == ([], 1)

    def test_run_may_not_overlap_after_a_freeze_within_the_lease(self) -> None:
        lines = [*added("1"), *ran("1", 1, 16), *ran("1", 15, 16.5, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("freeze", 1, 16, FIRST)) == ["overlap"]
        cut = fault("cut", 2, 2.1, FIRST)
        assert rules(*lines, fault("freeze", 1, 16, FIRST), cut) == [], "its sessions had ended"

    def test_run_of_a_disconnected_worker_may_not_overlap(self) -> None:
        lines = [*added("1"), *ran("1", 1, 51), *ran("1", 45, 46, attempt=2, pid=SECOND)]
        assert rules(*lines, fault("long blackhole", 1, 51, FIRST)) == ["overlap"], (
            "the worker should have stopped it"
        )


def kept(token: str, outcome: str, *, attempt: int = 1, pid: int = FIRST) -> KeptAttempt:
    return KeptAttempt(job=int(token), attempt=attempt, outcome=outcome, worker=f"python-{pid}")


def reported(token: str, at: float, *, attempt: int = 1, pid: int = FIRST) -> WorkerEvent:
    return WorkerEvent(
        at=at, name="job:complete", worker=f"python-{pid}", pid=pid, job=int(token), attempt=attempt
    )


class TestHistoryIsComplete:
    READ = HistoryRead(attempts=1)
    FAILED_ONCE = (*added("1", fails=1), *ran("1", 1, 2, RAISED), *ran("1", 5, 6, attempt=2))

    def test_history_that_matches_the_runs_has_no_violations(self) -> None:
        attempts = [kept("1", "failed"), kept("1", "completed", attempt=2)]
        events = [reported("1", 2.1), reported("1", 6.1, attempt=2)]
        assert rules(*self.FAILED_ONCE, *events, *attempts, self.READ) == []

    def test_history_is_judged_only_if_it_was_read(self) -> None:
        assert rules(*self.FAILED_ONCE) == []

    def test_reported_attempt_must_be_in_the_history(self) -> None:
        attempts = [kept("1", "completed", attempt=2)]
        assert rules(*self.FAILED_ONCE, reported("1", 2.1), *attempts, self.READ) == ["history"]

    def test_done_job_must_be_in_the_history_without_a_report_too(self) -> None:
        assert rules(*self.FAILED_ONCE, kept("1", "failed"), self.READ) == ["history"]

    def test_attempt_must_not_be_in_the_history_twice(self) -> None:
        attempts = [kept("1", "failed"), kept("1", "failed"), kept("1", "completed", attempt=2)]
        assert rules(*self.FAILED_ONCE, *attempts, self.READ) == ["history"]

    def test_attempt_that_did_not_end_must_not_be_in_the_history(self) -> None:
        cancelled = (*added("1"), *ran("1", 1, 2, CANCELLED), *ran("1", 3, 4))
        attempts = [kept("1", "completed")]
        events = [fault("term", 1, 2, FIRST)]
        assert rules(*cancelled, *events, *attempts, self.READ) == []
        assert rules(*cancelled, *events, *attempts, kept("1", "failed"), self.READ) == ["history"]

    def test_attempt_of_another_worker_does_not_count(self) -> None:
        attempts = [kept("1", "failed", pid=SECOND), kept("1", "completed", attempt=2)]
        assert rules(*self.FAILED_ONCE, *attempts, self.READ) == ["history"]

    def test_attempt_whose_worker_died_needs_no_end(self) -> None:
        died = (*added("1"), *ran("1", 1, None), *killed(FIRST, 1.5), *ran("1", 9, 10, attempt=2, pid=SECOND))
        attempts = [kept("1", "worker_died"), kept("1", "completed", attempt=2, pid=SECOND)]
        assert rules(*died, *attempts, self.READ) == []


class TestNothingRemains:
    def test_job_that_stays_locked_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), left("1", locked_by="python-1")) == ["locked"]

    def test_queue_that_stays_locked_is_a_violation(self) -> None:
        assert rules(LockedQueue(queue="q", locked_by="python-1")) == ["locked"]

    def test_remaining_job_that_could_run_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2), left("1")) == ["left"]

    def test_remaining_job_that_was_never_added_is_a_violation(self) -> None:
        assert rules(left("7", attempts=25)) == ["left"]

    def test_remaining_job_that_was_superseded_while_running_is_allowed(self) -> None:
        lines = [*added("1", key="k"), *ran("1", 1, None), *killed(FIRST, 2)]
        audit = run_audit(
            *lines, *added("2", 1.5, key="k"), *ran("2", 3, 4, pid=SECOND), left("1", attempts=25)
        )
        assert (audit.violations, audit.superseded) == ([], 1)


class TestAttemptsAreCounted:
    def test_skipped_attempt_is_a_violation(self) -> None:
        lines = [*added("1", fails=1), *ran("1", 1, 2, RAISED), *ran("1", 6, 7, attempt=3)]
        assert rules(*lines) == ["attempts"]

    def test_first_run_with_a_later_attempt_is_a_violation(self) -> None:
        assert rules(*added("1"), *ran("1", 1, 2, attempt=2)) == ["attempts"]

    def test_first_run_may_have_a_later_attempt_if_a_worker_died(self) -> None:
        assert rules(*added("1"), *ran("1", 9, 10, attempt=2), *killed(SECOND, 1)) == []

    def test_repeated_attempt_is_a_violation(self) -> None:
        lines = [*added("1"), *ran("1", 1, None), *ran("1", 12, 13, pid=SECOND)]
        assert rules(*lines, *killed(FIRST, 2)) == ["attempts"]

    def test_repeated_attempt_of_a_released_job_is_allowed(self) -> None:
        lines = [*added("1"), *ran("1", 1, 2, CANCELLED), *ran("1", 3, 4, pid=SECOND)]
        assert rules(*lines, fault("term", 1, 2.5, FIRST)) == []

    def test_decreasing_attempt_is_a_violation(self) -> None:
        lines = [*added("1", fails=3), *ran("1", 1, 2, RAISED), *ran("1", 6, 7, RAISED, attempt=2)]
        shrunk = [*ran("1", 9, 10, RAISED), *ran("1", 12, 13, attempt=2)]
        assert rules(*lines, *shrunk) == ["attempts"]

    def test_two_job_ids_for_one_request_are_a_violation(self) -> None:
        again = RunStarted(
            at=3, run="r", job=2, token="1", attempt=2, task=ASYNC, queue=None, worker="python-1", pid=FIRST
        )
        lines = [*added("1", fails=1), *ran("1", 1, 2, RAISED), again, RunEnded(at=4, run="r", outcome=OK)]
        assert rules(*lines) == ["attempts"]


def test_worker_that_ends_by_itself_is_a_violation() -> None:
    ready = WorkerReady(at=0, slot=0, worker="python-1", pid=FIRST)
    exited = ProcessExited(at=5, slot=0, pid=FIRST, program="python", status=1, intended=False)
    node = ProcessExited(at=5, slot=0, pid=FIRST, program="node", status=1, intended=False)
    assert rules(ready, exited) == ["ended"]
    assert rules(exited) == [], "the worker was never ready"
    assert rules(ready, node) == [], "Node workers are not audited"


def test_worker_that_lost_its_lease_may_end() -> None:
    ready = WorkerReady(at=0, slot=0, worker="python-1", pid=FIRST)
    exited = ProcessExited(at=39, slot=0, pid=FIRST, program="python", status=1, intended=False)
    assert rules(ready, exited, fault("long blackhole", 1, 51, FIRST)) == []
    assert rules(ready, exited, fault("long blackhole", 1, 51, SECOND)) == ["ended"]
    assert rules(ready, exited, fault("clock", 1, 51, FIRST)) == ["ended"]


def test_declaring_a_live_worker_dead_is_a_violation() -> None:
    ready = WorkerReady(at=0, slot=0, worker="python-1", pid=FIRST)
    declared = WorkerEvent(at=40, name="worker:recovered", worker="python-2", pid=SECOND, about="python-1")
    assert rules(ready, declared) == ["declared dead"]
    assert rules(ready, declared, fault("hold gil", 35, 40, FIRST)) == ["declared dead"]
    assert rules(ready, declared, *killed(FIRST, 30)) == []
    assert rules(ready, declared, fault("long freeze", 1, 51, FIRST)) == []
    assert rules(ready, declared, fault("freeze", 30, 45, FIRST)) == ["declared dead"]
    assert rules(ready, declared, fault("freeze", 30, 45, FIRST), fault("cut", 31, 31, FIRST)) == []
    assert rules(ready, declared, fault(PAUSED, 30, 45, FIRST), fault("cut", 31, 31, FIRST)) == []
    assert rules(ready, declared, fault(PAUSED, 30, 45, SECOND), fault("cut", 31, 31, FIRST)) == [
        "declared dead"
    ]


def test_pause_caused_by_an_injected_freeze_is_not_another_fault() -> None:
    freeze = fault("freeze", 30, 45, FIRST)
    echo, other = fault(PAUSED, 29.9, 45, FIRST), fault(PAUSED, 30, 45, SECOND)
    assert History.of([echo, freeze, other]).faults == [freeze, other]
    longer = fault(PAUSED, 20, 70, FIRST)
    assert History.of([freeze, longer]).faults == [longer, freeze]


def test_pause_too_short_to_lose_jobs_explains_nothing() -> None:
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
            WorkerReady(at=0, slot=0, worker="python-100", pid=FIRST),
            WorkerReady(at=0, slot=1, worker="python-200", pid=SECOND),
        ]

    def test_recovery_time_runs_from_the_fault_to_the_next_run(self) -> None:
        [recovery] = recoveries(History.of(self.lines(12)), LEASES)
        assert (recovery.seconds, recovery.alone, recovery.repeated) == (10, True, False)

    def test_recovery_of_a_claimed_job_that_had_not_started_counts(self) -> None:
        kill = fault("kill", 2, 2.1, FIRST, locks={"python-100": [1]})
        history = History.of([*self.both(), kill, *added("1"), *ran("1", 9, 10, attempt=2, pid=SECOND)])
        assert [(recovery.seconds, recovery.repeated) for recovery in recoveries(history, LEASES)] == [
            (7, False)
        ]

    def test_second_recovery_of_a_job_is_marked_as_repeated(self) -> None:
        lines = [*self.lines(12)[:-3], *ran("1", 12, None, attempt=2, pid=SECOND), *killed(SECOND, 13)]
        history = History.of([*lines, *killed(FIRST, 2), *ran("1", 30, 31, attempt=3, pid=300)])
        assert [recovery.repeated for recovery in recoveries(history, LEASES)] == [False, True]

    def test_job_that_its_worker_still_finished_is_not_a_recovery(self) -> None:
        history = History.of([*added("1"), *ran("1", 1, 9), fault("freeze", 2, 8, FIRST)])
        assert recoveries(history, LEASES) == []

    def test_recovery_is_attributed_to_the_first_fault_known_to_lose_jobs(self) -> None:
        others = [fault("hold gil", 1.5, 2, FIRST), fault("cut", 1.6, 1.6, FIRST), fault("kill", 5, 5, FIRST)]
        [recovery] = recoveries(History.of([*self.lines(12), *others]), LEASES)
        assert (recovery.fault.kind, recovery.fault.at) == ("kill", 2)

    def test_late_recovery_is_a_violation(self) -> None:
        late = late_recoveries(History.of(self.lines(23)), LEASES)
        assert [violation.rule for violation in late] == ["late"]
        assert late_recoveries(History.of(self.lines(12)), LEASES) == []

    def test_late_recovery_is_allowed_during_another_fault(self) -> None:
        for other in (
            fault("restart long", 5, 17),
            fault("freeze", 5, 17, SECOND, slots=[1]),
            fault("long blackhole", 0, 17, FIRST, slots=[0]),
        ):
            assert late_recoveries(History.of([*self.lines(23), other]), LEASES) == []

    def test_late_recovery_is_a_violation_if_the_other_fault_is_irrelevant(self) -> None:
        third = WorkerReady(at=0, slot=2, worker="python-300", pid=300)
        for other in (fault("freeze", 5, 17, SECOND, slots=[1]), fault("clock", 5, 17, 300, slots=[2])):
            assert len(late_recoveries(History.of([*self.lines(23), third, other]), LEASES)) == 1

    def test_recovery_may_be_late_while_a_child_process_keeps_the_sockets(self) -> None:
        forked = [*added("9"), *ran("9", 0.5, 0.6, task="fork"), fault("fork", 0, 10, note="9")]
        assert late_recoveries(History.of([*self.lines(40), *forked]), LEASES) == []
        assert len(late_recoveries(History.of([*self.lines(58), *forked]), LEASES)) == 1


def test_throughput_is_counted_per_phase() -> None:
    phases = [Phase(at=0, name="before"), Phase(at=10, name="during"), Phase(at=12, name="over")]
    before, during = throughput(
        History.of([*phases, *added("1"), *ran("1", 1, 2), *added("2", 1), *ran("2", 9, 11)])
    )
    assert (before.added, before.succeeded, during.added, during.succeeded) == (0.2, 0.1, 0, 0.5)


def test_incomplete_last_line_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    line, path = added("1")[0], tmp_path / "a.ledger"
    path.write_bytes(f"{encode_line(line)}\n{encode_line(line)}".encode())
    assert read_file(path) == [line]


class TestSchedule:
    def plan(self, seed: int) -> list[Any]:
        return list(schedule(seed, 300, list(KINDS), slots=3, scale=1.0))

    def test_the_same_seed_gives_the_same_faults(self) -> None:
        assert self.plan(1) == self.plan(1)
        assert self.plan(1) != self.plan(2)

    def test_schedule_has_every_kind_and_ends_in_time(self) -> None:
        planned = self.plan(5)
        assert {fault.kind for fault in planned} == set(KINDS)
        assert max(fault.at + fault.seconds for fault in planned) <= 300
        assert {fault.slot for fault in planned} == {0, 1, 2}

    def test_faults_that_do_not_fit_are_left_out(self) -> None:
        assert "long freeze" not in kinds_that_fit(list(KINDS), 30, 1.0)
        assert "long freeze" in kinds_that_fit(list(KINDS), 30, 0.2)
