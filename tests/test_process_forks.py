"""A task in a process may fork: what it forks never answers for a job."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Drained, Job, JobContext, JobState, Middleware, WorkerUtils, run_once
from graphile_worker._runtime import member
from graphile_worker._runtime.wire import Done
from support import forking
from support.postgres import ROOT
from support.programs import lives, program
from support.waiting import DEADLINE, until
from support.workers import Heard, running

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
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has died is told from one that hangs, however long the machine takes."""
    monkeypatch.setattr(member, "_TIME_TO_END", DEADLINE)


class Values(Middleware):
    """Keeps what each job returned, and what the ledger said by then."""

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


async def check_those_after(forks: tuple[str, dict[str, Any]], database: str, tmp_path: Path) -> list[int]:
    """Run that job, then three in the same process; each must come to its own outcome, after it ran."""
    ledger = tmp_path / "ledger"
    values = Values(ledger)
    later: dict[str, Any] = {"seconds": 0.05, "ledger": str(ledger)}
    async with WorkerUtils(database) as utils:
        ids = await add(
            utils,
            forks,
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
            middleware=[values],
        )
        left = {job.id: job.last_error for job in await utils.list_jobs()}
    forked, first, failed, last = ids
    assert values.returned == {forked: forked, first: first, last: last}
    assert values.raised == {failed: "on purpose"}
    assert all(values.ran[job] for job in (first, failed, last)), "each is answered for after it ran"
    assert left == {failed: "on purpose"}
    assert summary == Drained(3, 1)
    return ids


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
async def test_child_that_leaves_the_task_does_not_answer_for_later_jobs(
    how: str, status: int, database: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "status"
    job = ("fork", {"how": how, "path": str(path), "gate": ""})
    await check_those_after(job, database, tmp_path)
    assert path.read_text() == str(status), "the child ends as a program would"
    said = capfd.readouterr()
    if how == "raise":
        assert "ValueError: in the child" in said.err
    if how == "print":
        assert {"printed by the child", "written by the child"} <= set(said.out.splitlines())
    if how == "start a thread":
        assert (tmp_path / "status.thread").read_text() == "joined"


async def test_child_that_nobody_waits_for_does_not_answer(database: str, tmp_path: Path) -> None:
    job = ("fork", {"how": "return unattended", "path": str(tmp_path / "child"), "gate": ""})
    await check_those_after(job, database, tmp_path)


async def test_child_that_returns_after_the_job_is_recorded_does_not_answer(
    database: str, tmp_path: Path
) -> None:
    heard, gate, path = Heard(), tmp_path / "gate", tmp_path / "status"
    os.mkfifo(gate)
    values = Values(tmp_path / "ledger")
    async with running(TASKS, database, heard=heard, max_task_processes=1, middleware=[values]) as runner:
        await runner.add_job("fork", {"how": "return late", "path": str(path), "gate": str(gate)})
        await heard.until("job:complete")
        child = int(path.read_text())
        gate.write_text("")  # it returns now
        await until(lambda: _gone(child), "the child has ended")
        payload = {"seconds": 0.05, "ledger": str(tmp_path / "ledger")}
        job = await runner.add_job("run_for", payload)
        await heard.until("job:complete", 2)
    assert values.returned[job.id] == job.id
    assert values.ran[job.id]


async def test_fork_on_an_event_loop_does_not_answer(database: str, tmp_path: Path) -> None:
    await check_those_after(("fork_on_loop", {"path": str(tmp_path / "status")}), database, tmp_path)
    assert (tmp_path / "status").read_text() == "0"


async def test_multiprocessing_by_fork_works(database: str, tmp_path: Path) -> None:
    await check_those_after(("fork_pool", {"path": str(tmp_path / "told")}), database, tmp_path)
    assert (tmp_path / "told").read_text() == "1 2"


async def test_child_cannot_use_the_worker(database: str, tmp_path: Path) -> None:
    payload = {"how": "use the context", "path": str(tmp_path / "told"), "gate": ""}
    async with WorkerUtils(database) as utils:
        await utils.add_job("fork", payload, flags=["timeout:600"])
        async with asyncio.timeout(DEADLINE):
            assert await run_once(TASKS, database, handle_signals=False) == Drained(1, 0)
        assert await utils.list_jobs() == []
    for number in (0, 1):
        said = (tmp_path / f"told.{number}").read_text()
        assert said.startswith("TaskError: A process that a task forks cannot use the worker's connection")


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
async def test_program_that_closes_nothing_inherits_no_connection_to_the_worker(
    database: str, tmp_path: Path
) -> None:
    await check_those_after(("list_open_sockets", {"path": str(tmp_path / "told")}), database, tmp_path)
    listed = (tmp_path / "told").read_text().splitlines()
    numbers = {int(line.split(" -> ")[0].split()[-1]) for line in listed if " -> " in line}
    assert max(numbers) <= 3, f"standard streams, and the folder that ls reads: {listed}"


async def test_job_that_runs_after_a_fork_survives_kill_of_the_worker(database: str, tmp_path: Path) -> None:
    gate, path = tmp_path / "gate", tmp_path / "told"
    os.mkfifo(gate)
    async with WorkerUtils(database) as utils:
        forks = {"how": "return unattended", "path": str(tmp_path / "status"), "gate": ""}
        _, waiting = await add(utils, ("fork", forks), ("wait_at", {"gate": str(gate), "path": str(path)}))
        async with _command_on(database, tmp_path) as worker:
            await until(lambda: _is(path.exists), "the second job runs")
            # Whatever an answer for it came to is recorded before the job that comes now.
            marker = await utils.add_job("mark", {"path": str(tmp_path / "marked")})
            await until(lambda: _is_gone(utils, marker.id), "another job is recorded")
            worker.send(signal.SIGKILL)
            await worker.end()
        job = await utils.get_job(id=waiting)
    assert job is not None, "it has not ended, so it is not complete"
    assert (job.state, job.attempts) == (JobState.RUNNING, 1)


@pytest.mark.parametrize("logs", [True, False])
async def test_reply_for_another_request_interrupts_the_job_and_ends_the_process(
    logs: bool,
    database: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot happen, as far as we know, must still not be taken for an answer."""
    logger = logging.Logger("broken")  # noqa: LOG001 - gone after the test
    monkeypatch.setattr(logger, "handle", lambda _record: 1 / 0)
    receive, spoilt = member.Member.receive, False

    async def spoil(self: member.Member) -> Any:
        nonlocal spoilt
        message = await receive(self)
        if not spoilt and isinstance(message, Done) and message.value is not None:
            spoilt = True
            message = message._replace(request=message.request._replace(attempt=9))
        return message

    monkeypatch.setattr(member.Member, "receive", spoil)
    heard, ledger = Heard(), tmp_path / "ledger"
    async with running(TASKS, database, heard=heard, logger=None if logs else logger) as runner:
        job = await runner.add_job("run_for", {"seconds": 0, "ledger": str(ledger)})
        await heard.until("job:complete")
    assert heard.counts["job:interrupted"] == 1
    assert heard.counts["job:error"] == 0
    again: Job = heard.named("job:complete")[0].job
    assert again.attempts == 1, "the first run gave its attempt back"
    assert ledger.read_text().split() == [str(job.id)] * 2
    assert (f"answered for another job than {job.id}" in caplog.text) == logs


def _command_on(database: str, tmp_path: Path) -> Any:
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


async def _gone(pid: int) -> bool:
    return not lives(pid)


async def _is_gone(utils: WorkerUtils, job_id: int) -> bool:
    return await utils.get_job(id=job_id) is None
