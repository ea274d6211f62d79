"""A task in a process may fork, and its child processes never report a job's outcome."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Job, JobContext, JobState, Middleware, RunSummary, WorkerUtils, run_once
from graphile_worker._worker.processes import child_process
from graphile_worker._worker.processes.protocol import Done
from support import forking
from support.postgres import ROOT
from support.programs import is_alive, program
from support.waiting import DEADLINE, until
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphile_worker.testing import Databases

TASKS: dict[str, Callable[..., Any]] = {
    name: getattr(forking, name)
    for name in ("fork", "fork_on_loop", "fork_pool", "list_open_sockets", "run_for", "wait_at")
}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(autouse=True)
def _long_exit_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for a process to exit, so that a slow machine does not make it look hung."""
    monkeypatch.setattr(child_process, "_TIME_TO_END", DEADLINE)


class OutcomeRecorder(Middleware):
    """Middleware that records what each job returned, and whether the job was in the ledger by then."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.returned: dict[int, Any] = {}
        self.raised: dict[int, str] = {}
        self.ran: dict[int, bool] = {}

    async def execute(self, ctx: JobContext, proceed: Callable[..., Any]) -> Any:
        try:
            self.returned[ctx.job.id] = await proceed()
        except Exception as error:
            self.raised[ctx.job.id] = str(error)
            raise
        finally:
            text = self.ledger.read_text() if self.ledger.exists() else ""
            self.ran[ctx.job.id] = str(ctx.job.id) in text.split()


async def add(utils: WorkerUtils, *jobs: tuple[str, dict[str, Any]]) -> list[int]:
    return [(await utils.add_job(name, payload)).id for name, payload in jobs]


async def check_jobs_after_fork(
    forking_job: tuple[str, dict[str, Any]], database: str, tmp_path: Path
) -> list[int]:
    """Run that job, then three in the same process. Check that each has its own outcome, after it ran."""
    ledger = tmp_path / "ledger"
    outcomes = OutcomeRecorder(ledger)
    later: dict[str, Any] = {"seconds": 0.05, "ledger": str(ledger)}
    async with WorkerUtils(database) as utils:
        ids = await add(
            utils,
            forking_job,
            ("run_for", later),
            ("run_for", {**later, "seconds": 0.0, "error": "on purpose"}),
            ("run_for", {**later, "seconds": 0.02}),
        )
        summary = await run_once(
            TASKS,
            database,
            handle_signals=False,
            concurrency=1,
            max_task_processes=1,
            middleware=[outcomes],
        )
        left = {job.id: job.last_error for job in await utils.list_jobs()}
    forked, first, failed, last = ids
    assert outcomes.returned == {forked: forked, first: first, last: last}
    assert outcomes.raised == {failed: "on purpose"}
    assert all(outcomes.ran[job] for job in (first, failed, last)), "an outcome arrived before its job ran"
    assert left == {failed: "on purpose"}
    assert summary == RunSummary(3, 1)
    return ids


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("return", 0),
        ("raise", 1),
        ("exit", 7),
        ("print", 0),
        ("fork again", 0),
        ("fork in C", 0),
        ("start a thread", 0),
    ],
)
async def test_forked_child_that_returns_from_the_task_reports_no_outcome_for_later_jobs(
    how: str, status: int, database: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "status"
    job = ("fork", {"how": how, "path": str(path), "gate": ""})
    await check_jobs_after_fork(job, database, tmp_path)
    assert path.read_text() == str(status), "the child must exit like any program"
    output = capfd.readouterr()
    if how == "raise":
        assert "ValueError: in the child" in output.err
    if how == "print":
        assert {"printed by the child", "written by the child"} <= set(output.out.splitlines())
    if how == "start a thread":
        assert (tmp_path / "status.thread").read_text() == "joined"


async def test_forked_child_that_the_task_does_not_wait_for_reports_no_outcome(
    database: str, tmp_path: Path
) -> None:
    job = ("fork", {"how": "return unattended", "path": str(tmp_path / "child"), "gate": ""})
    await check_jobs_after_fork(job, database, tmp_path)


async def test_forked_child_that_returns_after_its_job_is_recorded_reports_no_outcome(
    database: str, tmp_path: Path
) -> None:
    recorder, gate, path = EventRecorder(), tmp_path / "gate", tmp_path / "status"
    os.mkfifo(gate)
    outcomes = OutcomeRecorder(tmp_path / "ledger")
    async with running(
        TASKS, database, recorder=recorder, max_task_processes=1, middleware=[outcomes]
    ) as runner:
        await runner.add_job("fork", {"how": "return late", "path": str(path), "gate": str(gate)})
        await recorder.until("job:complete")
        child = int(path.read_text())
        gate.write_text("")  # The child returns now.
        await until(lambda: _has_exited(child), "the child has ended")
        payload = {"seconds": 0.05, "ledger": str(tmp_path / "ledger")}
        job = await runner.add_job("run_for", payload)
        await recorder.until("job:complete", 2)
    assert outcomes.returned[job.id] == job.id
    assert outcomes.ran[job.id]


async def test_child_forked_on_an_event_loop_reports_no_outcome(database: str, tmp_path: Path) -> None:
    await check_jobs_after_fork(("fork_on_loop", {"path": str(tmp_path / "status")}), database, tmp_path)
    assert (tmp_path / "status").read_text() == "0"


async def test_task_can_use_multiprocessing_with_the_fork_method(database: str, tmp_path: Path) -> None:
    await check_jobs_after_fork(("fork_pool", {"path": str(tmp_path / "output")}), database, tmp_path)
    assert (tmp_path / "output").read_text() == "1 2"


async def test_forked_child_cannot_use_the_worker_connection(database: str, tmp_path: Path) -> None:
    payload = {"how": "use the context", "path": str(tmp_path / "output"), "gate": ""}
    async with WorkerUtils(database) as utils:
        await utils.add_job("fork", payload, flags=["timeout:600"])
        async with asyncio.timeout(DEADLINE):
            assert await run_once(TASKS, database, handle_signals=False) == RunSummary(1, 0)
        assert await utils.list_jobs() == []
    for number in (0, 1):
        text = (tmp_path / f"output.{number}").read_text()
        assert re.match("TaskError: .*fork.*worker's connection", text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_program_started_with_open_descriptors_inherits_no_connection_to_the_worker(
    database: str, tmp_path: Path
) -> None:
    await check_jobs_after_fork(("list_open_sockets", {"path": str(tmp_path / "output")}), database, tmp_path)
    listed = (tmp_path / "output").read_text().splitlines()
    numbers = {int(line.split(" -> ")[0].split()[-1]) for line in listed if " -> " in line}
    assert max(numbers) <= 3, f"only the standard streams and the folder that ls reads may be open: {listed}"


async def test_job_running_after_a_fork_stays_locked_when_the_worker_is_killed(
    database: str, tmp_path: Path
) -> None:
    gate, path = tmp_path / "gate", tmp_path / "output"
    os.mkfifo(gate)
    async with WorkerUtils(database) as utils:
        payload = {"how": "return unattended", "path": str(tmp_path / "status"), "gate": ""}
        _, waiting = await add(utils, ("fork", payload), ("wait_at", {"gate": str(gate), "path": str(path)}))
        async with _running_command(database, tmp_path) as worker:
            await until(lambda: _is(path.exists), "the second job runs")
            # An outcome that the fork had reported for the job would be recorded before that of this one.
            marker = await utils.add_job("mark", {"path": str(tmp_path / "marked")})
            await until(lambda: _is_gone(utils, marker.id), "the outcome of another job is recorded")
            worker.send(signal.SIGKILL)
            await worker.end()
        job = await utils.get_job(id=waiting)
    assert job is not None, "the job was completed before it ended"
    assert (job.state, job.attempts) == (JobState.RUNNING, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("logs", [True, False])
async def test_reply_for_another_request_interrupts_the_job_and_ends_the_process(
    logs: bool,
    database: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No known bug causes this, but such a reply must never become a job's outcome."""
    logger = logging.Logger("broken")  # noqa: LOG001 - used by this test only
    monkeypatch.setattr(logger, "handle", lambda _record: 1 / 0)
    receive, changed = child_process.ChildProcess.receive, False

    async def change_request(self: child_process.ChildProcess) -> Any:
        nonlocal changed
        message = await receive(self)
        if not changed and isinstance(message, Done) and message.value is not None:
            changed = True
            message = message._replace(request=message.request._replace(attempt=9))
        return message

    monkeypatch.setattr(child_process.ChildProcess, "receive", change_request)
    recorder, ledger = EventRecorder(), tmp_path / "ledger"
    async with running(TASKS, database, recorder=recorder, logger=None if logs else logger) as runner:
        job = await runner.add_job("run_for", {"seconds": 0, "ledger": str(ledger)})
        await recorder.until("job:complete")
    assert recorder.counts["job:interrupted"] == 1
    assert recorder.counts["job:error"] == 0
    again: Job = recorder.named("job:complete")[0].job
    assert again.attempts == 1, "the interrupted run must refund its attempt"
    assert ledger.read_text().split() == [str(job.id)] * 2
    assert bool(re.search(rf"\b{job.id}\b.*another job|another job.*\b{job.id}\b", caplog.text)) == logs


def _running_command(database: str, tmp_path: Path) -> Any:
    (tmp_path / "served.py").write_text(
        "from support import forking\n"
        "from support.forking import write\n"
        "async def mark(payload): write(payload['path'], 'marked')\n"
        "tasks = {name: getattr(forking, name) for name in ('fork', 'wait_at')} | {'mark': mark}\n"
    )
    environment = os.environ | {"DATABASE_URL": database, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    environment |= {"GRAPHILE_WORKER_MAX_TASK_PROCESSES": "1"}
    command = [sys.executable, "-m", "graphile_worker", "run", "served:tasks", "--jobs", "2"]
    return program(*command, folder=tmp_path, environment=environment, with_errors=True)


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


async def _has_exited(pid: int) -> bool:
    return not is_alive(pid)


async def _is_gone(utils: WorkerUtils, job_id: int) -> bool:
    return await utils.get_job(id=job_id) is None
