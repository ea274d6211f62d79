"""Tasks that run in task processes: `executor="process"`."""

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
    InvalidPayloadError,
    Job,
    JobContext,
    JobState,
    Middleware,
    RunSummary,
    TaskError,
    TaskProcessError,
    TaskTimeoutError,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._task_process import Watch
from graphile_worker._worker.execution.handlers import read_handlers
from graphile_worker._worker.processes import child_process, pool
from graphile_worker._worker.processes.remote_errors import RemoteTraceback
from graphile_worker._worker.processes.shared_heartbeat import SharedHeartbeat
from graphile_worker.tasks import task_of
from graphile_worker.workers import since_boot
from support import computing
from support.postgres import ROOT
from support.programs import is_alive, program
from support.waiting import DEADLINE, until
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(autouse=True)
def _long_exit_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for a process to exit, so that a slow machine does not make it look hung."""
    monkeypatch.setattr(child_process, "_TIME_TO_END", DEADLINE)


@pytest.fixture(autouse=True)
async def no_task_process_is_left() -> AsyncIterator[None]:
    yield
    assert task_processes_of(os.getpid()) == []


def task_processes_of(pid: int) -> list[int]:
    """Return the ids of the task processes of that worker process."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "graphile_worker._task_process" in " ".join(_command(child))]


def _no_space() -> None:
    raise OSError(28, os.strerror(28))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def tasks() -> dict[str, Callable[..., Any]]:
    found = {name: value for name, value in vars(computing).items() if task_of(value) is not None}
    return {getattr(value, "identifier", name): value for name, value in found.items()}


def select_tasks(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: tasks()[name] for name in names}


async def run_job(
    database: str, name: str, recorder: EventRecorder | None = None, payload: Any = None, **options: Any
) -> Job | None:
    """Return the job after its first run, or None if it was deleted."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job(name, payload)
        served = select_tasks(name)
        await once(served, database, events=recorder.events if recorder else None, **options)
        return await utils.get_job(id=job.id)


async def words_of(path: Path) -> list[str]:
    """Wait for a task to write the file, and return the words in it."""
    await until(lambda: _has_words(path), f"{path.name} is written")
    return path.read_text().split()


async def pid_of(path: Path) -> int:
    return int((await words_of(path))[0])


async def _has_words(path: Path) -> bool:
    # A file exists before it has its text.
    return path.exists() and path.stat().st_size > 0


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def until_exited(pid: int) -> None:
    async def has_exited() -> bool:
        return not is_alive(pid)

    await until(has_exited, f"process {pid} has exited")


class TestRunning:
    async def test_job_of_a_process_task_runs_in_another_process(self, database: str, tmp_path: Path) -> None:
        assert await run_job(database, "report_process", payload={"path": str(tmp_path / "output")}) is None
        pid, parent, worker_id = (tmp_path / "output").read_text().split()
        assert int(pid) != os.getpid() == int(parent)
        assert worker_id.startswith("python-")

    async def test_async_task_runs_on_an_event_loop_in_its_process(
        self, database: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "output"
        async with WorkerUtils(database) as utils:
            await utils.add_job("add_on_event_loop", {"path": str(path)})
            assert await once(select_tasks("add_on_event_loop"), database) == RunSummary(1, 0)
            pid, job_id = map(int, path.read_text().split())
            assert pid != os.getpid()
            added = await utils.get_job(id=job_id)
        assert added is not None
        assert added.payload == {"path": str(path)}

    async def test_process_converts_payloads_to_typed_arguments(self, database: str, tmp_path: Path) -> None:
        path = str(tmp_path / "output")
        big = 2**80
        payload = {"path": path, "crop": {"left": 1, "size": {"width": 2}}, "numbers": [1, big], "_cron": {}}
        assert await run_job(database, "typed", payload=payload) is None
        expected = repr((computing.Crop(1, computing.Size(width=2)), [1, big], None))
        assert (tmp_path / "output").read_text() == expected
        assert await run_job(database, "resize", payload={"path": path, "width": 3}) is None
        assert (tmp_path / "output").read_text() == "3 resize"

    async def test_process_task_rejects_an_invalid_payload(self, database: str) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "report_process", recorder, {"path": 3}, on_invalid_payload="fail")
        assert job is not None
        assert job.state == JobState.FAILED
        assert "path" in (job.last_error or "")
        assert isinstance(recorder.named("job:error")[0].error, InvalidPayloadError)

    async def test_unserializable_payload_from_middleware_fails_the_job_and_keeps_the_process(
        self, database: str, tmp_path: Path
    ) -> None:
        class ReplacesPayload(Middleware):
            async def execute(self, ctx: JobContext, proceed: Callable[..., Any]) -> Any:
                return await (proceed({"path": object()}) if ctx.job.payload["path"] == "" else proceed())

        recorder = EventRecorder()
        async with running(
            select_tasks("report_process"), database, recorder=recorder, middleware=[ReplacesPayload()]
        ) as runner:
            await runner.add_job("report_process", {"path": str(tmp_path / "output")})
            await recorder.until("job:complete")
            await runner.add_job("report_process", {"path": ""})
            failed = await recorder.until("job:error")
            assert task_processes_of(os.getpid()) == [await pid_of(tmp_path / "output")]
        assert isinstance(failed.error, TaskError)
        assert re.search("payload cannot be sent.*'report_process'", str(failed.error))

    async def test_process_task_knows_its_deadline(self, database: str, tmp_path: Path) -> None:
        assert await run_job(database, "write_deadline", payload={"path": str(tmp_path / "output")}) is None
        left, stop_requested = (tmp_path / "output").read_text().split()
        assert 30 < float(left) < 90
        assert stop_requested == "False"

    async def test_deadline_extended_by_middleware_counts_from_the_start_of_the_task(
        self, database: str, tmp_path: Path
    ) -> None:
        class ExtendsDeadline(Middleware):
            async def execute(self, ctx: JobContext, proceed: Any) -> Any:
                ctx.extend_deadline(600)
                return await proceed()

        async with WorkerUtils(database) as utils:
            await utils.add_job("write_deadline", {"path": str(tmp_path / "output")})
        served = select_tasks("write_deadline")
        assert await once(served, database, middleware=[ExtendsDeadline()]) == RunSummary(1, 0)
        assert float((tmp_path / "output").read_text().split()[0]) > 300

    @pytest.mark.slow
    async def test_batch_in_a_process_fails_item_by_item(self, database: str) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "items", recorder, [1, 2, "x", 3, 5, 6])
        assert job is not None
        assert job.payload == [2, "x", 3, 6]
        error = recorder.named("job:error")[0].error
        assert isinstance(error, BatchError)
        assert error.indexes == (1, 2, 3, 5)
        assert [type(one).__name__ for one in error.errors] == [
            "OddError",
            "InvalidPayloadError",
            "Fail",
            "OddError",
        ]
        assert "[1] even (2)" in (job.last_error or "")
        job = await run_job(database, "miscount", payload=[1, 2])
        assert job is not None
        assert "returned 3 results for 2 items" in (job.last_error or "")


class TestTaskProcesses:
    async def test_process_starts_with_the_first_job_that_needs_it(
        self, database: str, tmp_path: Path
    ) -> None:
        recorder = EventRecorder()
        served = select_tasks("typed_job", "report_process")
        async with running(served, database, recorder=recorder) as runner:
            await runner.add_job("typed_job", {"n": 1})
            await recorder.until("job:complete")
            assert task_processes_of(os.getpid()) == []
            await runner.add_job("report_process", {"path": str(tmp_path / "output")})
            await recorder.until("job:complete", 2)
            assert task_processes_of(os.getpid()) == [await pid_of(tmp_path / "output")]
        assert task_processes_of(os.getpid()) == []

    async def test_one_process_runs_several_jobs(self, database: str, tmp_path: Path) -> None:
        assert len(await _pids_of(3, database, tmp_path)) == 1

    async def test_process_is_replaced_after_max_jobs_per_task_process(
        self, database: str, tmp_path: Path
    ) -> None:
        assert len(await _pids_of(4, database, tmp_path, max_jobs_per_task_process=2)) == 2

    @pytest.mark.slow
    async def test_max_task_processes_limits_the_processes(self, database: str, tmp_path: Path) -> None:
        recorder, paths = EventRecorder(), [tmp_path / str(number) for number in range(3)]
        gates = [make_gate(tmp_path / f"gate{number}") for number in range(3)]
        options = {"concurrency": 3, "max_task_processes": 2}
        async with running(select_tasks("wait"), database, recorder=recorder, **options) as runner:
            for path, gate in zip(paths, gates, strict=True):
                await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            await recorder.until("job:start", 3)
            await until(lambda: _is(lambda: sum(path.exists() for path in paths) == 2), "two have started")
            assert len(task_processes_of(os.getpid())) == 2
            for gate in gates:
                await _open(gate)
            await recorder.until("job:complete", 3)
        assert len({path.read_text() for path in paths}) == 2

    async def test_job_fails_with_the_reason_if_its_process_cannot_start(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", _no_space)
        recorder = EventRecorder()
        job = await run_job(database, "quick", recorder)
        assert job is not None
        assert "[Errno 28] No space left on device" in (job.last_error or "")
        assert isinstance(recorder.named("job:error")[0].error, TaskError)

    @pytest.mark.slow
    async def test_processes_started_concurrently_share_one_heartbeat(
        self, database: str, tmp_path: Path
    ) -> None:
        """If there were two heartbeats, the worker would update one only.

        A process with the other would stop its job after a while, as if the worker were frozen.
        """
        gates = [make_gate(tmp_path / f"gate{n}") for n in range(3)]
        paths = [tmp_path / f"output{n}" for n in range(3)]
        async with WorkerUtils(database) as utils:
            for path, gate in zip(paths, gates, strict=True):
                await utils.add_job("wait", {"path": str(path), "gate": str(gate)})
        recorder = EventRecorder()
        async with running(
            select_tasks("wait"), database, recorder=recorder, concurrency=3, max_task_processes=3
        ):
            pids = [await pid_of(path) for path in paths]
            assert len({_command(psutil.Process(pid))[-1] for pid in pids}) == 1
            for gate in gates:
                await _open(gate)
            await recorder.until("job:complete", 3)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("how", "status"), [("kill", "was killed by SIGKILL"), ("exit", "exited with code 3")]
    )
    async def test_crashed_process_fails_its_own_job_only(
        self, how: str, status: str, database: str, tmp_path: Path
    ) -> None:
        recorder, gate, path = EventRecorder(), make_gate(tmp_path / "gate"), tmp_path / "output"
        served = select_tasks("crash", "wait", "report_process")
        async with running(
            served, database, recorder=recorder, concurrency=2, max_task_processes=2
        ) as runner:
            await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            crashed = await runner.add_job("crash", {"how": how}, max_attempts=1)
            failed = await recorder.until("job:error")
            assert isinstance(failed.error, TaskProcessError)
            assert status in str(failed.error)
            await runner.add_job("report_process", {"path": str(tmp_path / "next")})
            await recorder.until("job:complete", 2)  # The crashed job and this one.
            assert await pid_of(tmp_path / "next") != pid
            await _open(gate)
            done = await recorder.until("job:complete", 3)
            assert done.job.task_identifier == "wait"
            job = await runner.utils.get_job(id=crashed.id)
        assert job is not None
        assert job.attempts == 1
        assert status in (job.last_error or "")

    async def test_segmentation_fault_is_named_in_last_error(self, database: str) -> None:
        job = await run_job(database, "crash", payload={"how": "segfault"})
        assert job is not None
        assert "was killed by SIGSEGV" in (job.last_error or "")

    async def test_exit_of_a_process_is_noticed_despite_its_forked_child_which_is_killed(
        self, database: str, tmp_path: Path
    ) -> None:
        job = await run_job(database, "leave_fork_behind", payload={"path": str(tmp_path / "output")})
        assert job is not None
        assert "exited with code 4" in (job.last_error or "")
        _, forked = await words_of(tmp_path / "output")
        await until_exited(int(forked))

    @pytest.mark.slow
    async def test_killed_idle_process_is_replaced(self, database: str, tmp_path: Path) -> None:
        recorder = EventRecorder()
        async with running(select_tasks("report_process"), database, recorder=recorder) as runner:
            await runner.add_job("report_process", {"path": str(tmp_path / "first")})
            await recorder.until("job:complete")
            first = await pid_of(tmp_path / "first")
            os.kill(first, signal.SIGKILL)
            # The process is gone before the worker knows. A thread waits for it, reports the exit, and ends.
            watcher = f"graphile-worker process {first}"
            await until(lambda: _is(lambda: watcher not in thread_names()), "the worker notices the exit")
            await runner.add_job("report_process", {"path": str(tmp_path / "second")})
            await recorder.until("job:complete", 2)
        assert recorder.counts["job:error"] == 0


class TestFailing:
    async def test_exception_from_a_process_keeps_its_type_and_traceback(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "fail", recorder, {"how": "known"})
        assert job is not None
        error = recorder.named("job:error")[0].error
        assert type(error) is computing.KnownError
        assert job.last_error == "as it is"
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 660, (
            "the delay must follow the retry policy of the task"
        )
        assert isinstance(error.__cause__, RemoteTraceback)
        assert 'raise KnownError("as it is")' in caplog.text
        assert "graphile_worker/_task_process.py" not in caplog.text

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("how", "name", "text"),
        [
            ("odd", "OddError", "cannot be unpickled (3)"),
            ("local", "LocalError", "only this process has it"),
        ],
    )
    async def test_unpicklable_exception_keeps_its_name_and_text(
        self, how: str, name: str, text: str, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "fail", recorder, {"how": how})
        assert job is not None
        error = recorder.named("job:error")[0].error
        assert (type(error).__name__, str(error)) == (name, text)
        assert job.last_error == text
        assert "computing.py" in caplog.text

    async def test_sys_exit_in_a_process_fails_that_job_only(self, database: str) -> None:
        job = await run_job(database, "fail", payload={"how": "exit"})
        assert job is not None
        assert job.last_error == "SystemExit: enough"

    @pytest.mark.slow
    async def test_process_task_can_retry_fail_snooze_and_cancel_its_job(self, database: str) -> None:
        recorder = EventRecorder()
        retried = await run_job(database, "choose", recorder, {"what": "retry"})
        assert retried is not None
        assert 500 <= (retried.run_at - retried.updated_at).total_seconds() < 560
        failed = await run_job(database, "choose", recorder, {"what": "fail"})
        assert failed is not None
        assert (failed.state, failed.last_error) == (JobState.FAILED, "never")
        snoozed = await run_job(database, "choose", recorder, {"what": "snooze"})
        assert snoozed is not None
        assert snoozed.attempts == 0
        assert recorder.named("job:snoozed")[0].delay == 400
        await run_job(database, "choose", recorder, {"what": "cancel"})
        assert recorder.named("job:cancelled")[0].reason == "unwanted"

    async def test_retry_from_a_process_keeps_the_cause_in_last_error(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "fail", recorder, {"how": "cause"})
        assert job is not None
        assert "300 s" in (job.last_error or "")
        assert "invalid literal for int() with base 10: 'beneath'" in (job.last_error or "")
        assert 300 <= (job.run_at - job.updated_at).total_seconds() < 360
        assert 'int("beneath")' in caplog.text


class TestStopping:
    async def test_timed_out_process_is_killed_with_its_child_processes(
        self, database: str, tmp_path: Path
    ) -> None:
        recorder = EventRecorder()
        job = await run_job(database, "exceed_timeout", recorder, {"path": str(tmp_path / "output")})
        assert job is not None
        assert re.search("timeout of 600 s, shortened to [0-9.]+ s", job.last_error or "")
        assert isinstance(recorder.named("job:error")[0].error, TaskTimeoutError)
        for pid in await words_of(tmp_path / "output"):
            await until_exited(int(pid))

    async def test_process_task_can_extend_its_deadline(self, database: str, tmp_path: Path) -> None:
        recorder, gate, path = EventRecorder(), make_gate(tmp_path / "gate"), tmp_path / "output"
        async with running(select_tasks("extend"), database, recorder=recorder) as runner:
            await runner.add_job("extend", {"path": str(path), "gate": str(gate)})
            await pid_of(path)
            await asyncio.sleep(5.2)  # Longer than its original timeout.
            await _open(gate)
            await recorder.until("job:complete")
        assert recorder.counts["job:error"] == 0

    @pytest.mark.slow
    async def test_timeout_excludes_the_wait_for_a_process(self, database: str, tmp_path: Path) -> None:
        recorder, gate, path = EventRecorder(), make_gate(tmp_path / "gate"), tmp_path / "output"
        served = select_tasks("wait", "quick")
        async with running(
            served, database, recorder=recorder, concurrency=2, max_task_processes=1
        ) as runner:
            await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            await pid_of(path)
            await runner.add_job("quick")
            await recorder.until("job:start", 2)
            await asyncio.sleep(1.2)  # Longer than its timeout.
            await _open(gate)
            await recorder.until("job:complete", 2)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("name", ["stop_on_signal", "stop_on_signal_async"])
    async def test_stopping_worker_signals_stop_requested_to_process_tasks(
        self, name: str, database: str, tmp_path: Path
    ) -> None:
        recorder = EventRecorder()
        async with running(select_tasks(name), database, recorder=recorder) as runner:
            await runner.add_job(name, {"path": str(tmp_path / "output")})
            await pid_of(tmp_path / "output")
            async with asyncio.timeout(20):
                await runner.stop()
        assert recorder.counts["job:complete"] == 1

    async def test_interrupted_process_is_killed_and_its_attempt_refunded(
        self, database: str, tmp_path: Path
    ) -> None:
        recorder, gate, path = EventRecorder(), make_gate(tmp_path / "gate"), tmp_path / "output"
        async with running(select_tasks("wait"), database, recorder=recorder) as runner:
            job = await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            await runner.stop(grace=0)
            assert not psutil.pid_exists(pid)
        assert recorder.counts["job:interrupted"] == 1
        async with WorkerUtils(database) as utils:
            found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.attempts, found.last_error, found.state) == (0, None, JobState.READY)

    async def test_job_is_interrupted_while_its_process_starts(self, database: str, tmp_path: Path) -> None:
        recorder, gate = EventRecorder(), make_gate(tmp_path / "gate")
        async with running(select_tasks("wait"), database, recorder=recorder) as runner:
            await runner.add_job("wait", {"path": str(tmp_path / "output"), "gate": str(gate)})
            await recorder.until("job:start")
            await runner.stop(grace=0)
        assert recorder.counts["job:interrupted"] == 1


class TestContext:
    async def test_log_records_of_a_process_reach_the_handlers_of_the_worker(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("log")
            await once(select_tasks("log"), database)
        records = {record.getMessage(): record for record in caplog.records}
        record: Any = records["to be read by people"]
        assert (record.name, record.levelname) == ("graphile_worker", "INFO")
        assert (record.order, record.job_id) == (7, job.id)
        assert record.process != os.getpid()
        assert "lock" in record.odd
        assert "below the level" not in records
        assert "KnownError: as it is" in (records["with a traceback"].exc_text or "")

    async def test_fork_of_a_process_logs_by_itself(
        self, database: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert await run_job(database, "log_in_fork") is None
        assert "in the process" in caplog.text
        assert "in a fork" not in caplog.text
        assert "in a fork" in capfd.readouterr().err

    async def test_picklable_state_is_available_in_a_process(self, database: str, tmp_path: Path) -> None:
        @asynccontextmanager
        async def lifespan() -> AsyncIterator[Any]:
            yield Settings(computing.Crop(1, computing.Size(width=2)))

        payload = {"path": str(tmp_path / "output")}
        assert await run_job(database, "write_state", payload=payload, lifespan=lifespan) is None
        assert (tmp_path / "output").read_text() == "Settings(crop=Crop(left=1, size=Size(width=2)))"

    @pytest.mark.slow
    async def test_unpicklable_state_fails_only_tasks_that_use_it(
        self, database: str, tmp_path: Path
    ) -> None:
        @asynccontextmanager
        async def lifespan() -> AsyncIterator[Any]:
            yield Settings(threading.Lock())

        payload = {"path": str(tmp_path / "output")}
        assert await run_job(database, "report_process", payload=payload, lifespan=lifespan) is None
        job = await run_job(database, "write_state", payload=payload, lifespan=lifespan)
        assert job is not None
        assert re.search("ctx.state is not available.*Settings.*pickled", job.last_error or "")

    async def test_process_task_adds_jobs_through_the_worker(self, database: str, tmp_path: Path) -> None:
        served = select_tasks("add", "typed_job", "loose")
        async with WorkerUtils(database) as utils:
            await utils.add_job("add", {"path": str(tmp_path / "output")})
            assert await once(served, database) == RunSummary(4, 0)
        assert (tmp_path / "output").read_text().endswith(" 3")

    @pytest.mark.slow
    async def test_process_task_adds_jobs_from_instances_and_tasks(
        self, database: str, tmp_path: Path
    ) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_job("add_instances_and_tasks", {"path": str(tmp_path / "output")})
            await once(select_tasks("add_instances_and_tasks"), database)
            jobs = [(job.task_identifier, job.priority, job.payload) for job in await utils.list_jobs()]
        path = str(tmp_path / "output")
        assert sorted(jobs, key=str) == [
            ("loose", 0, {"crop": {"left": 1, "size": {"width": 2}}}),
            ("resize", 0, {"path": path, "width": 2}),
            ("resize", 3, {"path": path, "width": 1}),
        ]

    @pytest.mark.slow
    async def test_app_in_a_process_adds_jobs_through_the_worker(self, database: str, tmp_path: Path) -> None:
        path = tmp_path / "output"
        async with WorkerUtils(database) as utils:
            await utils.add_job("task_of_app", {"path": str(path)})
            await once(computing.app.tasks, database)
            assert [job.task_identifier for job in await utils.list_jobs()] == ["elsewhere"]

    @pytest.mark.slow
    async def test_unsupported_context_operations_in_a_process_explain_themselves(
        self, database: str
    ) -> None:
        served = select_tasks("add_invalid", "typed_job")
        async with WorkerUtils(database) as utils:
            completing = ("transaction", "complete", "complete_sync")
            for what in ("payload", "class", "utils", "connection", *completing):
                await utils.add_job("add_invalid", {"what": what})
            await once(served, database)
            errors = {job.payload["what"]: job.last_error or "" for job in await utils.list_jobs()}
        assert re.search(r"'typed_job'.*\bn\b", errors["payload"])
        assert re.search("Resize.*class.*instance", errors["class"])
        assert "ctx.utils.stats is not available in a process" in errors["utils"]
        assert "ctx.connection is not available in a process" in errors["connection"]
        for what in completing:
            assert f"ctx.{what} is not available in a process" in errors[what]


class TestDeclaration:
    def test_nested_function_is_rejected_as_a_process_task(self) -> None:
        def inside() -> None: ...

        for wrong in (inside, lambda: None):
            with pytest.raises(ConfigurationError, match="at the top level of a module"):
                task("inside", executor="process")(wrong)

    def test_process_task_that_cannot_be_imported_is_rejected_at_startup(self) -> None:
        lost = task("lost", executor="process")(computing.odd)
        with pytest.raises(ConfigurationError, match=r"support\.computing\.odd"):
            read_handlers({"lost": lost})

    def test_task_is_pickled_by_reference(self) -> None:
        assert pickle.loads(pickle.dumps(computing.report_process)) is computing.report_process
        included = computing.app.tasks["task_of_app"]
        assert pickle.loads(pickle.dumps(included)) is computing.task_of_app

    def test_executor_accepts_only_process(self) -> None:
        wrongs: list[Any] = ["thread", "loop", 3, []]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match=r"executor.*'process'"):
                task(executor=wrong)(computing.odd)

    @pytest.mark.parametrize("option", ["max_task_processes", "max_jobs_per_task_process"])
    async def test_process_options_must_be_at_least_one(self, option: str) -> None:
        wrong: Any = {option: 0}
        with pytest.raises(ConfigurationError, match=f"{option} is 0.*from 1"):
            await run_once(select_tasks("report_process"), "postgresql://", **wrong)

    async def test_task_of_the_main_program_runs_in_a_process(self, database: str, tmp_path: Path) -> None:
        (tmp_path / "shop.py").write_text(_PROGRAM)
        async with program(
            sys.executable, "shop.py", database, folder=tmp_path, with_errors=True
        ) as running_program:
            assert await running_program.end() == 0
        text = running_program.text
        assert "worked with State(n=3)" in text
        assert "RunSummary(succeeded=1, failed=1" in text
        assert "own error: OwnError('mine')" in text

    @pytest.mark.slow
    async def test_program_without_a_main_guard_gets_an_error_that_explains_it(
        self, database: str, tmp_path: Path
    ) -> None:
        unguarded = _PROGRAM.replace('if __name__ == "__main__":', "if True:")
        (tmp_path / "shop.py").write_text(unguarded)
        async with program(
            sys.executable, "shop.py", database, folder=tmp_path, with_errors=True
        ) as running_program:
            assert await running_program.end() == 0
        assert "RunSummary(succeeded=0, failed=2" in running_program.text
        assert 'if __name__ == "__main__":' in running_program.text

    async def test_tasks_from_a_folder_run_in_processes(self, database: str, tmp_path: Path) -> None:
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
        path = tmp_path / "output"
        async with WorkerUtils(database) as utils:
            await utils.add_job("mail/send-it", {"path": str(path)})
            assert await once(None, database, task_directory=folder) == RunSummary(1, 0)
        assert path.read_text() == "said"


class TestStoppingEarly:
    @pytest.mark.slow
    async def test_job_whose_process_is_starting_gets_the_stop_signal(
        self, database: str, tmp_path: Path
    ) -> None:
        recorder = EventRecorder()
        async with running(select_tasks("until_stopped"), database, recorder=recorder) as runner:
            await runner.add_job("until_stopped", {"path": str(tmp_path / "output")})
            await recorder.until("job:start")
            async with asyncio.timeout(20):
                await runner.stop()
        assert (tmp_path / "output").read_text() == "True"

    async def test_thread_left_by_a_job_cannot_extend_the_deadline_of_the_next(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_job("leave_thread_behind", priority=-1)
            late = await utils.add_job("sleep_long")
            served = select_tasks("leave_thread_behind", "sleep_long")
            assert await once(served, database, max_task_processes=1) == RunSummary(1, 1)
            job = await utils.get_job(id=late.id)
        assert job is not None
        assert "timeout of 0.3 s" in (job.last_error or "")

    async def test_cancelling_a_running_job_kills_its_process(self, database: str, tmp_path: Path) -> None:
        recorder, gate, path = EventRecorder(), make_gate(tmp_path / "gate"), tmp_path / "output"
        async with running(select_tasks("wait"), database, recorder=recorder) as runner:
            job = await runner.add_job("wait", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            assert await runner.utils.cancel_job(job.id, "called off") == "requested"
            await recorder.until("job:complete")
            await until_exited(pid)
            found = await runner.utils.get_job(id=job.id)
        assert found is not None
        assert (found.state, found.last_error) == (JobState.FAILED, "Cancelled: called off")
        assert recorder.counts["job:cancelled"] == 1

    async def test_slow_import_in_a_process_is_logged(
        self,
        database: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(pool, "_LONG_IMPORT", 0.05)
        gate, folder = make_gate(tmp_path / "gate"), tmp_path / "tasks"
        folder.mkdir()
        (folder / "slow.py").write_text(
            "import os\nfrom graphile_worker import task\n"
            f"if os.getpid() != {os.getpid()}:\n    open({str(gate)!r}).read()\n"
            '@task(executor="process", timeout=60)\ndef slow(): ...\n'
        )
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("slow")
        draining = asyncio.create_task(once(None, database, task_directory=folder))
        logged = re.compile(rf"Job {job.id} \(slow\).*0\.05 s.*imports")
        await until(lambda: _is(lambda: logged.search(caplog.text) is not None), "the worker logs it")
        await _open(gate)
        assert await draining == RunSummary(1, 0)

    async def test_process_starting_for_a_cancelled_job_serves_the_next_job(
        self, database: str, tmp_path: Path
    ) -> None:
        recorder, gate = EventRecorder(), make_gate(tmp_path / "gate")
        payload = {"path": str(tmp_path / "output"), "gate": str(gate)}
        async with running(select_tasks("wait"), database, recorder=recorder, max_task_processes=1) as runner:
            for number in range(1, 5):
                # The closed gate keeps the job from ending before it is cancelled.
                job = await runner.add_job("wait", payload)
                await recorder.until("job:start", number)
                assert await runner.utils.cancel_job(job.id) == "requested"
                await recorder.until("job:complete", number)
            last = make_gate(tmp_path / "last")  # A gate that no killed process has opened.
            await runner.add_job("wait", payload | {"gate": str(last)})
            await _open(last)
            await recorder.until("job:complete", 5)
            assert len(task_processes_of(os.getpid())) == 1


class TestDeath:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("name", ["wait", "hold_gil"])
    async def test_killed_worker_leaves_no_process_behind(
        self, name: str, database: str, tmp_path: Path
    ) -> None:
        if name == "hold_gil" and sys.platform != "linux":
            pytest.skip("only Linux can end a process that is running C code")
        gate, path, idle = make_gate(tmp_path / "gate"), tmp_path / "output", tmp_path / "idle"
        async with WorkerUtils(database) as utils:
            await utils.add_job("report_process", {"path": str(idle)})
            payload = {"path": str(path), **({"gate": str(gate)} if name == "wait" else {})}
            await utils.add_job(name, payload)
        async with _running_command(database, tmp_path) as worker:
            pids = [await pid_of(path), await pid_of(idle)]
            worker.send(signal.SIGKILL)
            for pid in pids:
                await until_exited(pid)

    @pytest.mark.slow
    async def test_processes_of_a_frozen_worker_stop_before_another_worker_runs_their_jobs(
        self, database: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "lines"
        leases = {"HEARTBEAT_INTERVAL": "500ms", "FAST_LEASE": "1500ms", "LEASE": "10s"}
        async with WorkerUtils(database) as utils:
            await utils.add_job("count_lines", {"path": str(path)}, queue_name="serial")
            async with _running_command(database, tmp_path, **leases) as frozen:
                await words_of(path)
                [task_process] = task_processes_of(frozen.process.pid)
                frozen.send(signal.SIGSTOP)
                async with _running_command(database, tmp_path, **leases) as other:
                    await until(lambda: _contains(path, "2"), "another worker runs the job", within=60)
                    assert not is_alive(task_process)
                    other.send(signal.SIGKILL)
                frozen.send(signal.SIGKILL)
        attempts = path.read_text().split()
        assert attempts == sorted(attempts)

    @pytest.mark.slow
    async def test_process_that_exits_while_its_worker_is_frozen_interrupts_its_job(
        self, database: str, tmp_path: Path
    ) -> None:
        path, gate = tmp_path / "lines", make_gate(tmp_path / "gate")
        leases = {"HEARTBEAT_INTERVAL": "250ms", "FAST_LEASE": "500ms", "LEASE": "2s"}
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("append_attempt", {"path": str(path), "gate": str(gate)})
            async with _running_command(database, tmp_path, **leases) as worker:
                first, _ = await words_of(path)
                worker.send(signal.SIGSTOP)
                await until_exited(int(first))
                worker.send(signal.SIGCONT)
                await until(lambda: _is(lambda: path.read_text().count("\n") == 2), "the job runs again")
                found = await utils.get_job(id=job.id)
                worker.send(signal.SIGKILL)
        _, attempt, second, again = path.read_text().split()
        assert first != second
        assert (attempt, again) == ("1", "1"), "the attempt must be refunded"
        assert found is not None
        assert (found.attempts, found.last_error) == (1, None)

    @pytest.mark.slow
    async def test_process_that_sees_no_heartbeat_interrupts_its_job_while_the_worker_is_alive(
        self, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After a freeze, the worker may see its process exit before it sees its own lease expire."""
        recorder, path, gate = EventRecorder(), tmp_path / "lines", make_gate(tmp_path / "gate")
        async with running(select_tasks("append_attempt"), database, recorder=recorder) as runner:
            await runner.add_job("append_attempt", {"path": str(path), "gate": str(gate)})
            pid = await pid_of(path)
            heartbeat = cast("Any", runner)._parts._processes._heartbeat

            async def has_exited() -> bool:
                heartbeat.beat(since_boot() - 3600)  # Repeated, because the worker updates the heartbeat too.
                return not is_alive(pid)

            await until(has_exited, "the process exits by itself")
            await recorder.until("job:interrupted")
            await until(lambda: _is(lambda: path.read_text().count("\n") == 2), "the job runs again")
            await _open(gate)
            await recorder.until("job:complete")
        assert recorder.counts["job:error"] == 0
        assert [line.split()[1] for line in path.read_text().splitlines()] == ["1", "1"]
        assert re.search("no heartbeat .*34 s", caplog.text)

    @pytest.mark.slow
    async def test_process_that_sees_no_heartbeat_interrupts_its_job_after_its_timeout_too(
        self, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The freeze was longer than the job's timeout."""
        recorder, path, gate = EventRecorder(), tmp_path / "lines", make_gate(tmp_path / "gate")
        loop = asyncio.get_running_loop()
        measure = loop.time
        async with running(select_tasks("append_attempt"), database, recorder=recorder) as runner:
            await runner.add_job("append_attempt", {"path": str(path), "gate": str(gate)}, timeout=600)
            pid = await pid_of(path)
            heartbeat = cast("Any", runner)._parts._processes._heartbeat
            while is_alive(pid):
                heartbeat.beat(since_boot() - 3600)
                time.sleep(0.001)  # Block the event loop, as a freeze does.
            monkeypatch.setattr(loop, "time", lambda: measure() + 3600)
            ended = ("job:interrupted", "job:error")
            await until(
                lambda: _is(lambda: any(recorder.counts[name] for name in ended)), "the job has ended"
            )
        assert recorder.counts["job:error"] == 0, [str(one.error) for one in recorder.named("job:error")]

    def test_shared_heartbeat_remembers_a_silence_that_a_process_may_have_seen(self) -> None:
        heartbeat, started = SharedHeartbeat(shortest_silence=10), since_boot()
        try:
            heartbeat.beat(started - 1)
            assert not heartbeat.was_silent(10, since=started)
            heartbeat.beat(started - 30)
            assert heartbeat.was_silent(10, since=started), "the silence goes on"
            heartbeat.beat(started)
            assert heartbeat.was_silent(10, since=started), (
                "the silence is over, but a process may have exited because of it"
            )
            assert not heartbeat.was_silent(60, since=started)
            assert not heartbeat.was_silent(10, since=since_boot()), "the silence ended before that moment"
        finally:
            heartbeat.close()

    def test_watch_checks_again_before_its_max_silence_ends(self) -> None:
        heartbeat = SimpleNamespace(last=since_boot())
        watch = Watch(os.getpid(), cast("Any", heartbeat))
        assert watch._seconds_left() == 1, "the interval between two checks"
        watch.max_silence = 0.5
        assert watch._seconds_left() <= 0.5
        heartbeat.last -= 1
        assert watch._seconds_left() <= -0.5

    @pytest.mark.slow
    async def test_process_ignores_signals_that_stop_the_worker(self, database: str, tmp_path: Path) -> None:
        gate, path = make_gate(tmp_path / "gate"), tmp_path / "output"
        async with WorkerUtils(database) as utils:
            await utils.add_job("wait", {"path": str(path), "gate": str(gate)})
            async with _running_command(database, tmp_path, SHUTDOWN_GRACE="60s") as worker:
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
    """Run so many jobs one after another, and return the ids of the processes that ran them."""
    paths = [tmp_path / str(number) for number in range(count)]
    async with WorkerUtils(database) as utils:
        for path in paths:
            await utils.add_job("report_process", {"path": str(path)})
        await once(select_tasks("report_process"), database, **options)
    return {path.read_text().split()[0] for path in paths}


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


def make_gate(path: Path) -> Path:
    """Create a named pipe on which a task can wait."""
    os.mkfifo(path)
    return path


async def _open(gate: Path) -> None:
    """Wait until a task waits at the gate, and let it continue."""

    async def is_open() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # No process reads the pipe yet.
            return False
        return True

    await until(is_open, "a task waits at the gate")


@asynccontextmanager
async def _running_command(database: str, tmp_path: Path, **settings: str) -> AsyncIterator[Any]:
    """Run the command with some tasks of `computing`."""
    (tmp_path / "served.py").write_text(
        "from support import computing\n"
        "names = ('report_process', 'wait', 'hold_gil', 'count_lines', 'append_attempt')\n"
        "tasks = {name: getattr(computing, name) for name in names}\n"
    )
    environment = os.environ | {"DATABASE_URL": database, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    environment |= {f"GRAPHILE_WORKER_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "graphile_worker", "run", "served:tasks", "--jobs", "2"]
    async with program(*command, folder=tmp_path, environment=environment, with_errors=True) as worker:
        yield worker


async def _contains(path: Path, word: str) -> bool:
    return word in path.read_text().split()
