"""Tasks that compute, in processes of their own: `executor="process"`."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import re
import signal
import sys
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from graphile_worker import (
    BatchError,
    ConfigurationError,
    Drained,
    InvalidPayloadError,
    Job,
    JobContext,
    JobState,
    Middleware,
    TaskError,
    TaskProcessError,
    TaskTimeoutError,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._runtime import member, processes
from graphile_worker._runtime.carried import RemoteTraceback
from graphile_worker._runtime.handlers import read_handlers
from graphile_worker._runtime.pulse import Pulse
from graphile_worker.liveness import since_boot
from graphile_worker.process_member import Watch
from graphile_worker.tasks import task_of
from support import computing
from support.postgres import ROOT
from support.programs import lives, program
from support.waiting import DEADLINE, until
from support.workers import Heard, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has died is told from one that hangs, however long the machine takes."""
    monkeypatch.setattr(member, "_TIME_TO_END", DEADLINE)


@pytest.fixture(autouse=True)
async def no_member_is_left() -> AsyncIterator[None]:
    yield
    assert members_of(os.getpid()) == []


def members_of(pid: int) -> list[int]:
    """Processes that run tasks for that one."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "graphile_worker.process_member" in " ".join(_command(child))]


def _no_space() -> None:
    raise OSError(28, os.strerror(28))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def tasks() -> dict[str, Callable[..., Any]]:
    found = {name: thing for name, thing in vars(computing).items() if task_of(thing) is not None}
    return {getattr(thing, "identifier", name): thing for name, thing in found.items()}


def these(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: tasks()[name] for name in names}


async def result(
    database: str, name: str, heard: Heard | None = None, payload: Any = None, **options: Any
) -> Job | None:
    """The job after its first run, if it is still there."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job(name, payload)
        served = these(name)
        await once(served, database, events=heard.events if heard else None, **options)
        return await utils.get_job(id=job.id)


async def words_of(path: Path) -> list[str]:
    """What a task says there, once it does."""
    await until(lambda: _exists(path), f"{path.name} is written")
    return path.read_text().split()


async def pid_of(path: Path) -> int:
    return int((await words_of(path))[0])


async def _exists(path: Path) -> bool:
    return path.exists()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def until_gone(pid: int) -> None:
    async def gone() -> bool:
        return not lives(pid)

    await until(gone, f"process {pid} is gone")


class TestRunning:
    async def test_a_job_runs_in_another_process(self, database: str, tmp_path: Path) -> None:
        assert await result(database, "tell", payload={"path": str(tmp_path / "told")}) is None
        pid, parent, worker_id = (tmp_path / "told").read_text().split()
        assert int(pid) != os.getpid() == int(parent)
        assert worker_id.startswith("python-")

    async def test_an_async_def_runs_on_an_event_loop_there(self, database: str, tmp_path: Path) -> None:
        path = tmp_path / "told"
        async with WorkerUtils(database) as utils:
            await utils.add_job("on_a_loop", {"path": str(path)})
            assert await once(these("on_a_loop"), database) == Drained(1, 0)
            pid, job_id = map(int, path.read_text().split())
            assert pid != os.getpid()
            added = await utils.get_job(id=job_id)
        assert added is not None
        assert added.payload == {"path": str(path)}

    async def test_payloads_become_arguments_of_their_types(self, database: str, tmp_path: Path) -> None:
        path = str(tmp_path / "told")
        big = 2**80
        payload = {"path": path, "crop": {"left": 1, "size": {"width": 2}}, "numbers": [1, big], "_cron": {}}
        assert await result(database, "typed", payload=payload) is None
        expected = repr((computing.Crop(1, computing.Size(width=2)), [1, big], None))
        assert (tmp_path / "told").read_text() == expected
        assert await result(database, "resize", payload={"path": path, "width": 3}) is None
        assert (tmp_path / "told").read_text() == "3 resize"

    async def test_one_that_does_not_fit_is_refused_as_everywhere(self, database: str) -> None:
        heard = Heard()
        job = await result(database, "tell", heard, {"path": 3}, on_invalid_payload="fail")
        assert job is not None
        assert job.state == JobState.FAILED
        assert "The payload does not fit: path" in (job.last_error or "")
        assert isinstance(heard.named("job:error")[0].error, InvalidPayloadError)

    async def test_a_payload_of_a_middleware_that_is_no_json_fails_its_job_and_ends_no_process(
        self, database: str, tmp_path: Path
    ) -> None:
        class Spoils(Middleware):
            async def execute(self, ctx: JobContext, proceed: Callable[..., Any]) -> Any:
                return await (proceed({"path": object()}) if ctx.job.payload["path"] == "" else proceed())

        heard = Heard()
        async with running(these("tell"), database, heard=heard, middleware=[Spoils()]) as runner:
            await runner.add_job("tell", {"path": str(tmp_path / "told")})
            await heard.until("job:complete")
            await runner.add_job("tell", {"path": ""})
            failed = await heard.until("job:error")
            assert members_of(os.getpid()) == [await pid_of(tmp_path / "told")]
        assert isinstance(failed.error, TaskError)
        assert "The payload cannot be sent to the process that is to run 'tell'" in str(failed.error)

    async def test_it_is_told_its_deadline_and_the_time(self, database: str, tmp_path: Path) -> None:
        assert await result(database, "look_at_deadline", payload={"path": str(tmp_path / "told")}) is None
        left, stopping = (tmp_path / "told").read_text().split()
        assert 30 < float(left) < 90
        assert stopping == "False"

    async def test_what_middleware_gives_it_counts_from_when_it_begins(
        self, database: str, tmp_path: Path
    ) -> None:
        class Gives(Middleware):
            async def execute(self, ctx: JobContext, proceed: Any) -> Any:
                ctx.extend_deadline(600)
                return await proceed()

        async with WorkerUtils(database) as utils:
            await utils.add_job("look_at_deadline", {"path": str(tmp_path / "told")})
        served = these("look_at_deadline")
        assert await once(served, database, middleware=[Gives()]) == Drained(1, 0)
        assert float((tmp_path / "told").read_text().split()[0]) > 300

    async def test_batches_fail_item_by_item(self, database: str) -> None:
        heard = Heard()
        job = await result(database, "items", heard, [1, 2, "x", 3, 5, 6])
        assert job is not None
        assert job.payload == [2, "x", 3, 6]
        error = heard.named("job:error")[0].error
        assert isinstance(error, BatchError)
        assert error.places == (1, 2, 3, 5)
        assert [type(one).__name__ for one in error.errors] == [
            "OddError",
            "InvalidPayloadError",
            "Fail",
            "OddError",
        ]
        assert "[1] even (2)" in (job.last_error or "")
        job = await result(database, "miscount", payload=[1, 2])
        assert job is not None
        assert "returned 3 results for 2 items" in (job.last_error or "")


class TestMembers:
    async def test_without_such_a_job_there_is_no_process(self, database: str, tmp_path: Path) -> None:
        heard = Heard()
        served = these("typed_job", "tell")
        async with running(served, database, heard=heard) as runner:
            await runner.add_job("typed_job", {"n": 1})
            await heard.until("job:complete")
            assert members_of(os.getpid()) == []
            await runner.add_job("tell", {"path": str(tmp_path / "told")})
            await heard.until("job:complete", 2)
            assert members_of(os.getpid()) == [await pid_of(tmp_path / "told")]
        assert members_of(os.getpid()) == []

    async def test_one_process_runs_job_after_job(self, database: str, tmp_path: Path) -> None:
        assert len(await _pids_of(3, database, tmp_path)) == 1

    async def test_it_is_replaced_after_as_many_as_are_said(self, database: str, tmp_path: Path) -> None:
        assert len(await _pids_of(4, database, tmp_path, max_jobs_per_task_process=2)) == 2

    async def test_there_are_as_many_as_are_said(self, database: str, tmp_path: Path) -> None:
        heard, paths = Heard(), [tmp_path / str(number) for number in range(3)]
        gates = [gate_at(tmp_path / f"gate{number}") for number in range(3)]
        options = {"concurrency": 3, "max_task_processes": 2}
        async with running(these("wait"), database, heard=heard, **options) as runner:
            for path, gate in zip(paths, gates, strict=True):
                await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            await heard.until("job:start", 3)
            await until(lambda: _is(lambda: sum(path.exists() for path in paths) == 2), "two have begun")
            assert len(members_of(os.getpid())) == 2
            for gate in gates:
                await _open(gate)
            await heard.until("job:complete", 3)
        assert len({path.read_text() for path in paths}) == 2

    async def test_one_that_cannot_be_started_fails_its_job_with_the_reason(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", _no_space)
        heard = Heard()
        job = await result(database, "quick", heard)
        assert job is not None
        assert job.last_error == "No process can be started for it: [Errno 28] No space left on device."
        assert isinstance(heard.named("job:error")[0].error, TaskError)

    async def test_those_that_are_started_at_once_feel_the_same_pulse(
        self, database: str, tmp_path: Path
    ) -> None:
        """Of two the one that nobody beats would end its job, after a while, as if the worker were frozen."""
        gates = [gate_at(tmp_path / f"gate{n}") for n in range(3)]
        paths = [tmp_path / f"told{n}" for n in range(3)]
        async with WorkerUtils(database) as utils:
            for path, gate in zip(paths, gates, strict=True):
                await utils.add_job("wait", {"path": str(path), "gate": str(gate)})
        heard = Heard()
        async with running(these("wait"), database, heard=heard, concurrency=3, max_task_processes=3):
            pids = [await pid_of(path) for path in paths]
            assert len({_command(psutil.Process(pid))[-1] for pid in pids}) == 1
            for gate in gates:
                await _open(gate)
            await heard.until("job:complete", 3)

    @pytest.mark.parametrize(
        ("how", "status"), [("kill", "was killed by SIGKILL"), ("exit", "exited with code 3")]
    )
    async def test_one_that_crashes_fails_its_job_and_no_other(
        self, how: str, status: str, database: str, tmp_path: Path
    ) -> None:
        heard, gate, path = Heard(), gate_at(tmp_path / "gate"), tmp_path / "told"
        served = these("crash", "wait", "tell")
        async with running(served, database, heard=heard, concurrency=2, max_task_processes=2) as runner:
            await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            crashed = await runner.add_job("crash", {"how": how}, max_attempts=1)
            failed = await heard.until("job:error")
            assert isinstance(failed.error, TaskProcessError)
            assert f"The process that ran it {status} before it was done" in str(failed.error)
            await runner.add_job("tell", {"path": str(tmp_path / "next")})
            await heard.until("job:complete", 2)  # both that of the crash and this one
            assert await pid_of(tmp_path / "next") != pid
            await _open(gate)
            done = await heard.until("job:complete", 3)
            assert done.job.task_identifier == "wait"
            job = await runner.utils.get_job(id=crashed.id)
        assert job is not None
        assert job.attempts == 1
        assert status in (job.last_error or "")

    async def test_a_segmentation_fault_is_named(self, database: str) -> None:
        job = await result(database, "crash", payload={"how": "segfault"})
        assert job is not None
        assert "was killed by SIGSEGV" in (job.last_error or "")

    async def test_what_it_has_forked_does_not_hide_its_end_and_ends_with_it(
        self, database: str, tmp_path: Path
    ) -> None:
        job = await result(database, "leave_fork_behind", payload={"path": str(tmp_path / "told")})
        assert job is not None
        assert "exited with code 4" in (job.last_error or "")
        _, forked = await words_of(tmp_path / "told")
        await until_gone(int(forked))

    async def test_an_idle_one_that_is_killed_is_replaced(self, database: str, tmp_path: Path) -> None:
        heard = Heard()
        async with running(these("tell"), database, heard=heard) as runner:
            await runner.add_job("tell", {"path": str(tmp_path / "first")})
            await heard.until("job:complete")
            first = await pid_of(tmp_path / "first")
            os.kill(first, signal.SIGKILL)
            # It is gone before the worker knows: the thread that waits for its end tells, and then ends.
            watcher = f"graphile-worker process {first}"
            await until(lambda: _is(lambda: watcher not in threads()), "its end is noticed")
            await runner.add_job("tell", {"path": str(tmp_path / "second")})
            await heard.until("job:complete", 2)
        assert heard.counts["job:error"] == 0


class TestFailing:
    async def test_an_exception_comes_back_as_it_is(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        job = await result(database, "fail", heard, {"how": "known"})
        assert job is not None
        error = heard.named("job:error")[0].error
        assert type(error) is computing.KnownError
        assert job.last_error == "as it is"
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 660, "by the policy of the task"
        assert isinstance(error.__cause__, RemoteTraceback)
        assert 'raise KnownError("as it is")' in caplog.text
        assert "graphile_worker/process_member.py" not in caplog.text

    @pytest.mark.parametrize(
        ("how", "name", "text"),
        [
            ("odd", "OddError", "not made anew (3)"),
            ("local", "LocalError", "nobody else knows"),
        ],
    )
    async def test_one_that_cannot_be_made_anew_keeps_its_name_and_text(
        self, how: str, name: str, text: str, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        job = await result(database, "fail", heard, {"how": how})
        assert job is not None
        error = heard.named("job:error")[0].error
        assert (type(error).__name__, str(error)) == (name, text)
        assert job.last_error == text
        assert "computing.py" in caplog.text

    async def test_sys_exit_fails_the_job_alone(self, database: str) -> None:
        job = await result(database, "fail", payload={"how": "exit"})
        assert job is not None
        assert job.last_error == "SystemExit: enough"

    async def test_a_task_chooses_what_becomes_of_its_job(self, database: str) -> None:
        heard = Heard()
        retried = await result(database, "choose", heard, {"what": "retry"})
        assert retried is not None
        assert 500 <= (retried.run_at - retried.updated_at).total_seconds() < 560
        failed = await result(database, "choose", heard, {"what": "fail"})
        assert failed is not None
        assert (failed.state, failed.last_error) == (JobState.FAILED, "never")
        snoozed = await result(database, "choose", heard, {"what": "snooze"})
        assert snoozed is not None
        assert snoozed.attempts == 0
        assert heard.named("job:snoozed")[0].delay == 400
        await result(database, "choose", heard, {"what": "cancel"})
        assert heard.named("job:cancelled")[0].reason == "unwanted"

    async def test_with_what_made_it_choose(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        heard = Heard()
        job = await result(database, "fail", heard, {"how": "cause"})
        assert job is not None
        assert (
            job.last_error == "To be tried again in 300 s: invalid literal for int() with base 10: 'beneath'"
        )
        assert 300 <= (job.run_at - job.updated_at).total_seconds() < 360
        assert 'int("beneath")' in caplog.text


class TestStopping:
    async def test_when_its_time_is_over_it_is_killed_and_all_that_it_started(
        self, database: str, tmp_path: Path
    ) -> None:
        heard = Heard()
        job = await result(database, "overstay", heard, {"path": str(tmp_path / "told")})
        assert job is not None
        assert re.fullmatch("It took .* its timeout of 600 s, shortened to [0-9.]+ s", job.last_error or "")
        assert isinstance(heard.named("job:error")[0].error, TaskTimeoutError)
        for pid in await words_of(tmp_path / "told"):
            await until_gone(int(pid))

    async def test_it_may_ask_for_more_time(self, database: str, tmp_path: Path) -> None:
        heard, gate, path = Heard(), gate_at(tmp_path / "gate"), tmp_path / "told"
        async with running(these("extend"), database, heard=heard) as runner:
            await runner.add_job("extend", {"path": str(path), "gate": str(gate)})
            await pid_of(path)
            await asyncio.sleep(5.2)  # longer than it had
            await _open(gate)
            await heard.until("job:complete")
        assert heard.counts["job:error"] == 0

    async def test_waiting_for_a_process_is_no_part_of_its_time(self, database: str, tmp_path: Path) -> None:
        heard, gate, path = Heard(), gate_at(tmp_path / "gate"), tmp_path / "told"
        served = these("wait", "quick")
        async with running(served, database, heard=heard, concurrency=2, max_task_processes=1) as runner:
            await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            await pid_of(path)
            await runner.add_job("quick")
            await heard.until("job:start", 2)
            await asyncio.sleep(1.2)  # longer than it has
            await _open(gate)
            await heard.until("job:complete", 2)

    @pytest.mark.parametrize("name", ["stop_when_told", "stop_when_told_on_a_loop"])
    async def test_a_worker_that_stops_tells_it(self, name: str, database: str, tmp_path: Path) -> None:
        heard = Heard()
        async with running(these(name), database, heard=heard) as runner:
            await runner.add_job(name, {"path": str(tmp_path / "told")})
            await pid_of(tmp_path / "told")
            async with asyncio.timeout(20):
                await runner.stop()
        assert heard.counts["job:complete"] == 1

    async def test_one_that_is_interrupted_is_killed_and_gets_its_attempt_back(
        self, database: str, tmp_path: Path
    ) -> None:
        heard, gate, path = Heard(), gate_at(tmp_path / "gate"), tmp_path / "told"
        async with running(these("wait"), database, heard=heard) as runner:
            job = await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            await runner.stop(grace=0)
            assert not psutil.pid_exists(pid)
        assert heard.counts["job:interrupted"] == 1
        async with WorkerUtils(database) as utils:
            found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.attempts, found.last_error, found.state) == (0, None, JobState.READY)

    async def test_one_that_is_only_starting_can_be_interrupted_too(
        self, database: str, tmp_path: Path
    ) -> None:
        heard, gate = Heard(), gate_at(tmp_path / "gate")
        async with running(these("wait"), database, heard=heard) as runner:
            await runner.add_job("wait", {"path": str(tmp_path / "told"), "gate": str(gate)})
            await heard.until("job:start")
            await runner.stop(grace=0)
        assert heard.counts["job:interrupted"] == 1


class TestContext:
    async def test_what_it_logs_reaches_the_handlers_of_the_worker(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("log")
            await once(these("log"), database)
        records = {record.getMessage(): record for record in caplog.records}
        said: Any = records["to be read by people"]
        assert (said.name, said.levelname, said.order, said.job_id) == ("graphile_worker", "INFO", 7, job.id)
        assert said.process != os.getpid()
        assert "lock" in said.odd
        assert "to be read by nobody" not in records
        assert "KnownError: as it is" in (records["with a traceback"].exc_text or "")

    async def test_a_fork_of_it_logs_for_itself(
        self, database: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert await result(database, "log_in_fork") is None
        assert "in the process" in caplog.text
        assert "in a fork" not in caplog.text
        assert "in a fork" in capfd.readouterr().err

    async def test_state_goes_along_if_it_can_be_pickled(self, database: str, tmp_path: Path) -> None:
        @asynccontextmanager
        async def lifespan() -> AsyncIterator[Any]:
            yield Settings(computing.Crop(1, computing.Size(width=2)))

        payload = {"path": str(tmp_path / "told")}
        assert await result(database, "look_at_state", payload=payload, lifespan=lifespan) is None
        assert (tmp_path / "told").read_text() == "Settings(crop=Crop(left=1, size=Size(width=2)))"

    async def test_otherwise_only_who_asks_for_it_fails(self, database: str, tmp_path: Path) -> None:
        @asynccontextmanager
        async def lifespan() -> AsyncIterator[Any]:
            yield Settings(threading.Lock())

        payload = {"path": str(tmp_path / "told")}
        assert await result(database, "tell", payload=payload, lifespan=lifespan) is None
        job = await result(database, "look_at_state", payload=payload, lifespan=lifespan)
        assert job is not None
        expected = "ctx.state cannot be had in a process: it is a Settings, and that cannot be pickled"
        assert expected in (job.last_error or "")

    async def test_it_adds_jobs_through_the_worker(self, database: str, tmp_path: Path) -> None:
        served = these("add", "typed_job", "loose")
        async with WorkerUtils(database) as utils:
            await utils.add_job("add", {"path": str(tmp_path / "told")})
            assert await once(served, database) == Drained(4, 0)
        assert (tmp_path / "told").read_text().endswith(" 3")

    async def test_by_instances_and_tasks_too(self, database: str, tmp_path: Path) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_job("add_things", {"path": str(tmp_path / "told")})
            await once(these("add_things"), database)
            jobs = [(job.task_identifier, job.priority, job.payload) for job in await utils.list_jobs()]
        path = str(tmp_path / "told")
        assert sorted(jobs, key=str) == [
            ("loose", 0, {"crop": {"left": 1, "size": {"width": 2}}}),
            ("resize", 0, {"path": path, "width": 2}),
            ("resize", 3, {"path": path, "width": 1}),
        ]

    async def test_and_so_does_its_app(self, database: str, tmp_path: Path) -> None:
        path = tmp_path / "told"
        async with WorkerUtils(database) as utils:
            await utils.add_job("of_app", {"path": str(path)})
            await once(computing.app.tasks, database)
            assert [job.task_identifier for job in await utils.list_jobs()] == ["elsewhere"]

    async def test_what_it_cannot_do_it_is_told(self, database: str) -> None:
        served = these("add_badly", "typed_job")
        async with WorkerUtils(database) as utils:
            for what in ("payload", "class", "utils", "connection"):
                await utils.add_job("add_badly", {"what": what})
            await once(served, database)
            errors = {job.payload["what"]: job.last_error or "" for job in await utils.list_jobs()}
        assert "The task 'typed_job' cannot be given that: n" in errors["payload"]
        assert errors["class"].startswith("Resize is a class. Pass an instance of it")
        assert "ctx.utils.stats cannot be had in a process: jobs can be added there" in errors["utils"]
        assert "ctx.connection cannot be had in a process" in errors["connection"]


class TestFinding:
    def test_what_is_inside_of_a_function_is_refused_when_it_is_declared(self) -> None:
        def inside() -> None: ...

        for wrong in (inside, lambda: None):
            with pytest.raises(ConfigurationError, match="at the top level of a module"):
                task("inside", executor="process")(wrong)

    def test_what_is_not_where_it_says_is_refused_when_the_worker_starts(self) -> None:
        lost = task("lost", executor="process")(computing.odd)
        with pytest.raises(ConfigurationError, match=r"support.computing.odd: it is not there. Declare it"):
            read_handlers({"lost": lost})

    def test_a_task_is_pickled_as_the_place_where_it_is(self) -> None:
        assert pickle.loads(pickle.dumps(computing.tell)) is computing.tell
        included = computing.app.tasks["of_app"]
        assert pickle.loads(pickle.dumps(included)) is computing.of_app

    def test_only_process_can_be_said(self) -> None:
        wrongs: list[Any] = ["thread", "loop", 3, []]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match="it must be 'process', or left out"):
                task(executor=wrong)(computing.odd)

    @pytest.mark.parametrize("option", ["max_task_processes", "max_jobs_per_task_process"])
    async def test_there_must_be_one_at_least(self, option: str) -> None:
        wrong: Any = {option: 0}
        with pytest.raises(ConfigurationError, match=f"{option} is 0; it must be an integer from 1"):
            await run_once(these("tell"), "postgresql://", **wrong)

    async def test_a_task_of_the_program_itself(self, database: str, tmp_path: Path) -> None:
        (tmp_path / "shop.py").write_text(_PROGRAM)
        async with program(
            sys.executable, "shop.py", database, folder=tmp_path, with_errors=True
        ) as running_program:
            assert await running_program.end() == 0
        text = running_program.text
        assert "worked with State(n=3)" in text
        assert "Drained(done=1, failed=1)" in text
        assert "own error: OwnError('mine')" in text

    async def test_a_program_that_would_start_a_worker_when_it_is_imported_is_told(
        self, database: str, tmp_path: Path
    ) -> None:
        unguarded = _PROGRAM.replace('if __name__ == "__main__":', "if True:")
        (tmp_path / "shop.py").write_text(unguarded)
        async with program(
            sys.executable, "shop.py", database, folder=tmp_path, with_errors=True
        ) as running_program:
            assert await running_program.end() == 0
        assert "Drained(done=0, failed=2)" in running_program.text
        assert 'put what does so under if __name__ == "__main__":' in running_program.text

    async def test_tasks_of_a_folder(self, database: str, tmp_path: Path) -> None:
        folder = tmp_path / "tasks"
        (folder / "mail").mkdir(parents=True)
        (folder / "_shared.py").write_text(
            "from pathlib import Path\ndef say(p): Path(p).write_text('said')\n"
        )
        (folder / "mail.py").write_text("def mail(payload): ...\n")
        (folder / "mail" / "send-it.py").write_text(
            "from graphile_worker import task\nfrom .._shared import say\n"
            '@task(executor="process")\ndef send_it(path: str):\n    say(path)\n'
        )
        path = tmp_path / "told"
        async with WorkerUtils(database) as utils:
            await utils.add_job("mail/send-it", {"path": str(path)})
            assert await once(None, database, task_directory=folder) == Drained(1, 0)
        assert path.read_text() == "said"


class TestStoppingEarly:
    async def test_a_job_whose_process_is_being_started_is_told_too(
        self, database: str, tmp_path: Path
    ) -> None:
        heard = Heard()
        async with running(these("until_stopped"), database, heard=heard) as runner:
            await runner.add_job("until_stopped", {"path": str(tmp_path / "told")})
            await heard.until("job:start")
            async with asyncio.timeout(20):
                await runner.stop()
        assert (tmp_path / "told").read_text() == "True"

    async def test_what_a_job_has_left_behind_does_not_prolong_the_next(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_job("leave_thread_behind", priority=-1)
            late = await utils.add_job("sleep_long")
            served = these("leave_thread_behind", "sleep_long")
            assert await once(served, database, max_task_processes=1) == Drained(1, 1)
            job = await utils.get_job(id=late.id)
        assert job is not None
        assert job.last_error == "It took longer than its timeout of 0.3 s"

    async def test_one_that_is_cancelled_while_it_runs_is_killed(self, database: str, tmp_path: Path) -> None:
        heard, gate, path = Heard(), gate_at(tmp_path / "gate"), tmp_path / "told"
        async with running(these("wait"), database, heard=heard) as runner:
            job = await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            assert await runner.utils.cancel_job(job.id, "called off") == "requested"
            await heard.until("job:complete")
            await until_gone(pid)
            found = await runner.utils.get_job(id=job.id)
        assert found is not None
        assert (found.state, found.last_error) == (JobState.FAILED, "Cancelled: called off")
        assert heard.counts["job:cancelled"] == 1

    async def test_an_import_that_takes_long_is_told(
        self,
        database: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(processes, "_LONG_IMPORT", 0.05)
        gate, folder = gate_at(tmp_path / "gate"), tmp_path / "tasks"
        folder.mkdir()
        (folder / "slow.py").write_text(
            "import os\nfrom graphile_worker import task\n"
            f"if os.getpid() != {os.getpid()}:\n    open({str(gate)!r}).read()\n"
            '@task(executor="process", timeout=60)\ndef slow(): ...\n'
        )
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("slow")
        draining = asyncio.create_task(once(None, database, task_directory=folder))
        said = f"Job {job.id} (slow) has waited for 0.05 s until its process has imported the task"
        await until(lambda: _is(lambda: said in caplog.text), "the worker says it")
        await _open(gate)
        assert await draining == Drained(1, 0)

    async def test_starts_that_nobody_waits_for_are_left_to_the_next(
        self, database: str, tmp_path: Path
    ) -> None:
        heard, gate = Heard(), gate_at(tmp_path / "gate")
        payload = {"path": str(tmp_path / "told"), "gate": str(gate)}
        async with running(these("wait"), database, heard=heard, max_task_processes=1) as runner:
            for number in range(1, 5):
                # It cannot be done before it is cancelled, however fast its process starts.
                job = await runner.add_job("wait", payload)
                await heard.until("job:start", number)
                assert await runner.utils.cancel_job(job.id) == "requested"
                await heard.until("job:complete", number)
            last = gate_at(tmp_path / "last")  # which no process that was killed reads
            await runner.add_job("wait", payload | {"gate": str(last)})
            await _open(last)
            await heard.until("job:complete", 5)
            assert len(members_of(os.getpid())) == 1


class TestDying:
    @pytest.mark.parametrize("name", ["wait", "hold_gil"])
    async def test_a_worker_that_is_killed_leaves_no_process_behind(
        self, name: str, database: str, tmp_path: Path
    ) -> None:
        if name == "hold_gil" and sys.platform != "linux":
            pytest.skip("only Linux ends a process in the middle of C code")
        gate, path, idle = gate_at(tmp_path / "gate"), tmp_path / "told", tmp_path / "idle"
        async with WorkerUtils(database) as utils:
            await utils.add_job("tell", {"path": str(idle)})
            payload = {"path": str(path), **({"gate": str(gate)} if name == "wait" else {})}
            await utils.add_job(name, payload)
        async with _command_on(database, tmp_path) as worker:
            pids = [await pid_of(path), await pid_of(idle)]
            worker.send(signal.SIGKILL)
            for pid in pids:
                await until_gone(pid)

    async def test_a_worker_that_is_frozen_has_its_jobs_stopped_before_others_take_them(
        self, database: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "lines"
        leases = {"HEARTBEAT_INTERVAL": "500ms", "FAST_LEASE": "1500ms", "LEASE": "10s"}
        async with WorkerUtils(database) as utils:
            await utils.add_job("count_lines", {"path": str(path)}, queue_name="serial")
            async with _command_on(database, tmp_path, **leases) as frozen:
                await words_of(path)
                [member] = members_of(frozen.process.pid)
                frozen.send(signal.SIGSTOP)
                async with _command_on(database, tmp_path, **leases) as other:
                    await until(lambda: _says(path, "2"), "another worker has taken the job", within=60)
                    assert not lives(member)
                    other.send(signal.SIGKILL)
                frozen.send(signal.SIGKILL)
        attempts = path.read_text().split()
        assert attempts == sorted(attempts)

    async def test_process_that_ended_itself_while_its_worker_was_frozen_interrupts_its_job(
        self, database: str, tmp_path: Path
    ) -> None:
        path, gate = tmp_path / "lines", gate_at(tmp_path / "gate")
        leases = {"HEARTBEAT_INTERVAL": "250ms", "FAST_LEASE": "500ms", "LEASE": "2s"}
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("append_attempt", {"path": str(path), "gate": str(gate)})
            async with _command_on(database, tmp_path, **leases) as worker:
                first, _ = await words_of(path)
                worker.send(signal.SIGSTOP)
                await until_gone(int(first))
                worker.send(signal.SIGCONT)
                await until(lambda: _is(lambda: path.read_text().count("\n") == 2), "it runs again")
                found = await utils.get_job(id=job.id)
                worker.send(signal.SIGKILL)
        _, attempt, second, again = path.read_text().split()
        assert first != second
        assert (attempt, again) == ("1", "1"), "the attempt was given back"
        assert found is not None
        assert (found.attempts, found.last_error) == (1, None)

    async def test_process_that_saw_no_beat_interrupts_its_job_though_the_worker_is_well(
        self, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As after a freeze, if the worker sees the end of the process before that of its own lease."""
        heard, path, gate = Heard(), tmp_path / "lines", gate_at(tmp_path / "gate")
        async with running(these("append_attempt"), database, heard=heard) as runner:
            await runner.add_job("append_attempt", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            pulse = cast("Any", runner)._parts._processes._pulse

            async def gone() -> bool:
                pulse.beat(since_boot() - 3600)  # again and again, because the heartbeat goes on
                return not lives(pid)

            await until(gone, "the process has ended itself")
            await heard.until("job:interrupted")
            await until(lambda: _is(lambda: path.read_text().count("\n") == 2), "it runs again")
            await _open(gate)
            await heard.until("job:complete")
        assert heard.counts["job:error"] == 0
        assert [line.split()[1] for line in path.read_text().splitlines()] == ["1", "1"]
        assert "because no heartbeat of this worker was recorded for 34 s" in caplog.text

    async def test_process_that_saw_no_beat_interrupts_its_job_though_its_timeout_is_over_too(
        self, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a freeze that was longer than the job's timeout."""
        heard, path, gate = Heard(), tmp_path / "lines", gate_at(tmp_path / "gate")
        loop = asyncio.get_running_loop()
        measure = loop.time
        async with running(these("append_attempt"), database, heard=heard) as runner:
            await runner.add_job("append_attempt", {"path": str(path), "gate": str(gate)}, timeout=600)
            pid = await pid_of(path)
            pulse = cast("Any", runner)._parts._processes._pulse
            while lives(pid):
                pulse.beat(since_boot() - 3600)
                time.sleep(0.001)  # the event loop stands still, as in a freeze
            monkeypatch.setattr(loop, "time", lambda: measure() + 3600)
            ended = ("job:interrupted", "job:error")
            await until(lambda: _is(lambda: any(heard.counts[name] for name in ended)), "the job has ended")
        assert heard.counts["job:error"] == 0, [str(one.error) for one in heard.named("job:error")]

    def test_silence_that_a_process_may_have_seen_is_remembered(self) -> None:
        pulse, begun = Pulse(shortest_silence=10), since_boot()
        try:
            pulse.beat(begun - 1)
            assert not pulse.was_silent(10, since=begun)
            pulse.beat(begun - 30)
            assert pulse.was_silent(10, since=begun), "it lasts"
            pulse.beat(begun)
            assert pulse.was_silent(10, since=begun), "it has ended, and a process may have acted on it"
            assert not pulse.was_silent(60, since=begun)
            assert not pulse.was_silent(10, since=since_boot()), "it has ended before"
        finally:
            pulse.close()

    def test_it_looks_again_no_later_than_its_patience_ends(self) -> None:
        pulse = SimpleNamespace(last=since_boot())
        watch = Watch(os.getpid(), cast("Any", pulse))
        assert watch._patience_left() == 1, "the time between two looks"
        watch.patience = 0.5
        assert watch._patience_left() <= 0.5
        pulse.last -= 1
        assert watch._patience_left() <= -0.5

    async def test_a_signal_to_all_processes_is_the_workers_matter(
        self, database: str, tmp_path: Path
    ) -> None:
        gate, path = gate_at(tmp_path / "gate"), tmp_path / "told"
        async with WorkerUtils(database) as utils:
            await utils.add_job("wait", {"path": str(path), "gate": str(gate)})
            async with _command_on(database, tmp_path, SHUTDOWN_GRACE="60s") as worker:
                pid = await pid_of(path)
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(pid, number)
                os.killpg(worker.process.pid, signal.SIGINT)
                await worker.until("stopping")
                await _open(gate)
                await worker.until("Completed job")
                assert await worker.end() == -signal.SIGINT
            assert await utils.list_jobs() == []


@dataclass
class Settings:
    crop: Any


_PROGRAM = """
import asyncio, sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from graphile_worker import App, JobContext

class OwnError(Exception): ...

@dataclass
class State:
    n: int

@asynccontextmanager
async def lifespan(app):
    yield State(3)

app = App(sys.argv[1], lifespan=lifespan)

@app.task(executor="process")
def work(ctx: JobContext[State]) -> None:
    print("worked with", ctx.state)

@app.task(executor="process")
def fail() -> None:
    raise OwnError("mine")

async def main() -> None:
    app.events.on("job:error", lambda event: print("own error:", repr(event.error)))
    async with app:
        await work.enqueue()
        await fail.enqueue()
        print(await app.run_once())

if __name__ == "__main__":
    asyncio.run(main())
"""


async def _pids_of(count: int, database: str, tmp_path: Path, **options: Any) -> set[str]:
    """Of the processes in which so many jobs ran, one after another."""
    paths = [tmp_path / str(number) for number in range(count)]
    async with WorkerUtils(database) as utils:
        for path in paths:
            await utils.add_job("tell", {"path": str(path)})
        await once(these("tell"), database, **options)
    return {path.read_text().split()[0] for path in paths}


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


def gate_at(path: Path) -> Path:
    """What a task can wait for."""
    os.mkfifo(path)
    return path


async def _open(gate: Path) -> None:
    """Let the one that waits go on, once it does."""

    async def is_open() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody waits yet
            return False
        return True

    await until(is_open, "somebody waits at the gate")


@asynccontextmanager
async def _command_on(database: str, tmp_path: Path, **settings: str) -> AsyncIterator[Any]:
    """The command, with these tasks."""
    (tmp_path / "served.py").write_text(
        "from support import computing\n"
        "names = ('tell', 'wait', 'hold_gil', 'count_lines', 'append_attempt')\n"
        "tasks = {name: getattr(computing, name) for name in names}\n"
    )
    environment = os.environ | {"DATABASE_URL": database, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    environment |= {f"GRAPHILE_WORKER_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "graphile_worker", "run", "served:tasks", "--jobs", "2"]
    async with program(*command, folder=tmp_path, environment=environment, with_errors=True) as worker:
        yield worker


async def _says(path: Path, word: str) -> bool:
    return word in path.read_text().split()
