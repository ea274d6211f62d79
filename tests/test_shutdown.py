"""A stopping worker loses no job and leaves no lock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    DatabaseError,
    JobContext,
    JobSpec,
    SchemaMissingError,
    ShutdownError,
    WorkerUtils,
    run,
    run_once,
)
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection import connect, listen
from graphile_worker._worker import lifecycle
from graphile_worker._worker.loop import Worker
from graphile_worker._worker.service import Service
from graphile_worker.testing import Databases
from support import programs
from support.jobs import add, count, existing, get
from support.proxy import proxied
from support.waiting import DEADLINE, until
from support.workers import EventRecorder, Gate, drop_schema, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker._db.queries.exchange import Answer


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class TestStop:
    @pytest.mark.parametrize("fails", [False, True])
    async def test_stop_waits_for_running_jobs_and_records_them(
        self, db: asyncpg.Connection, database: str, fails: bool
    ) -> None:
        """Graphile Worker leaves such a job locked, and runs it again after four hours."""
        recorder, gate = EventRecorder(), Gate()

        async def task(payload: Any) -> None:
            await gate(payload)
            if fails:
                raise ValueError("failed while stopping")

        runner = await run({"task": task}, database, events=recorder.events, handle_signals=False)
        job = await runner.add_job("task", queue_name="q")
        await gate.until_started()
        stopping = asyncio.create_task(runner.stop())
        await recorder.until("pool:gracefulShutdown")
        assert not stopping.done()
        gate.open()
        await stopping

        assert await locked(db) == []
        row = await get(db, job.id)
        assert (row is not None) == fails
        assert row is None or row["last_error"] == "failed while stopping"
        assert recorder.counts["job:complete"] == 1

    async def test_stop_may_be_called_repeatedly_and_concurrently(self, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        runner = await run({"task": gate}, database, events=recorder.events, handle_signals=False)
        await runner.add_job("task")
        await gate.until_started()
        stopping = [asyncio.create_task(runner.stop()) for _ in range(3)]
        await recorder.until("stop")
        gate.open()
        await asyncio.gather(*stopping)
        await runner.stop()
        await runner.wait()
        assert recorder.counts["stop"] == recorder.counts["pool:release"] == 1

    async def test_stopping_worker_claims_nothing(self, db: asyncpg.Connection, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        runner = await run(
            {"task": gate}, database, events=recorder.events, handle_signals=False, concurrency=2
        )
        await runner.add_job("task", 1)
        await gate.until_started()
        stopping = asyncio.create_task(runner.stop())
        await recorder.until("stop")
        await add(db, payload=2)
        gate.open()
        await stopping
        assert gate.started == [1]

    async def test_stop_releases_prefetched_jobs(self, db: asyncpg.Connection, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        runner = await run(
            {"task": gate}, database, events=recorder.events, handle_signals=False, prefetch=10
        )
        await runner.utils.add_jobs(JobSpec("task", n, queue_name=f"q{n % 2}") for n in range(8))
        await gate.until_started()
        stopping = asyncio.create_task(runner.stop())
        await recorder.until("stop")
        gate.open()
        await stopping
        assert await locked(db) == []
        rows = await db.fetch("select attempts from graphile_worker._private_jobs")
        assert [row["attempts"] for row in rows] == [0] * 7

    async def test_async_jobs_are_cancelled_and_released_after_the_grace_period(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        runner = await run({"task": gate}, database, events=recorder.events, handle_signals=False)
        job = await runner.add_job("task", queue_name="q")
        await gate.until_started()
        await runner.stop(grace=0.01)
        row = await existing(db, job.id)
        assert (row["attempts"], row["last_error"], row["is_available"]) == (0, None, True)
        assert row["run_at"] == job.run_at
        assert await locked(db) == []
        assert gate.cancelled == [{}]
        assert recorder.counts["job:interrupted"] == recorder.counts["pool:forcefulShutdown"] == 1
        assert recorder.counts["job:error"] == 0

    async def test_interrupted_delay_postpones_interrupted_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate = Gate()
        runner = await run({"task": gate}, database, handle_signals=False, interrupted_delay=60)
        job = await runner.add_job("task")
        await gate.until_started()
        await runner.stop(grace=0)
        row = await existing(db, job.id)
        assert 55 < (row["run_at"] - job.run_at).total_seconds() < 80

    async def test_tasks_can_observe_stop_requested(self, database: str) -> None:
        recorder, seen = EventRecorder(), list[str]()

        async def asynchronous(_payload: Any, ctx: JobContext) -> None:
            await ctx.stop_requested
            seen.append("async")

        def plain(_payload: Any, ctx: JobContext) -> None:
            assert ctx.stop_requested.wait(20)
            seen.append("plain")

        runner = await run(
            {"async": asynchronous, "plain": plain},
            database,
            events=recorder.events,
            handle_signals=False,
            concurrency=2,
        )
        await runner.add_job("async")
        await runner.add_job("plain")
        await recorder.until("job:start", 2)
        await runner.stop()
        assert sorted(seen) == ["async", "plain"]
        assert recorder.counts["job:success"] == 2

    async def test_thread_keeps_its_job_and_queue_locked_until_it_ends(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, release = EventRecorder(), threading.Event()
        runner = await run(
            {"task": lambda _: release.wait(20)}, database, events=recorder.events, handle_signals=False
        )
        job = await runner.add_job("task", queue_name="q")
        await recorder.until("job:start")
        stopping = asyncio.create_task(runner.stop(grace=0))
        await recorder.until("pool:forcefulShutdown")
        assert await locked(db) == [("job", job.id), ("queue", job.job_queue_id)]
        assert not stopping.done()
        release.set()
        await stopping
        assert await get(db, job.id) is None
        assert await locked(db) == []

    async def test_stop_waits_for_a_task_that_ignores_its_cancellation(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, ignored, release = EventRecorder(), asyncio.Event(), asyncio.Event()

        async def stubborn(_payload: Any) -> None:
            try:
                await release.wait()
            except asyncio.CancelledError:
                ignored.set()
                await release.wait()

        runner = await run({"task": stubborn}, database, events=recorder.events, handle_signals=False)
        await runner.add_job("task")
        await recorder.until("job:start")
        stopping = asyncio.create_task(runner.stop(grace=0))
        await ignored.wait()
        assert not stopping.done()
        release.set()
        await stopping
        assert await count(db) == 0

    async def test_second_stop_can_shorten_the_grace_period(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate = Gate()
        runner = await run({"task": gate}, database, handle_signals=False)
        await runner.add_job("task")
        await gate.until_started()
        patient = asyncio.create_task(runner.stop())
        await asyncio.sleep(0)
        await runner.stop(grace=0)
        await patient
        assert gate.cancelled
        assert await locked(db) == []

    async def test_cancelled_wait_or_stop_interrupts_no_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate = Gate()
        runner = await run({"task": gate}, database, handle_signals=False)
        await runner.add_job("task")
        await gate.until_started()
        for waiting in (runner.wait, runner.stop):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting(), 0.01)
        gate.open()
        await runner.stop()
        assert gate.ended == [{}]
        assert await count(db) == 0

    async def test_cancelled_start_leaves_no_connection(self, db: asyncpg.Connection, database: str) -> None:
        for n in range(6):
            starting = asyncio.create_task(run({"task": nothing}, database, handle_signals=False))
            await asyncio.sleep(n * 0.01)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).stop()
        used = "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"

        async def are_closed() -> bool:
            return bool(await db.fetchval(used) == 0)

        await until(are_closed, "the connections are closed")

    async def test_stop_waits_for_another_transaction_that_locks_its_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        runner = await run({"task": gate}, database, events=recorder.events, handle_signals=False)
        await runner.add_job("task", job_key="k")
        await gate.until_started()
        await db.execute("begin")
        await db.execute("select graphile_worker.remove_job('k')")
        gate.open()
        await recorder.until("job:success")
        stopping = asyncio.create_task(runner.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        await db.execute("commit")
        await stopping
        assert await count(db) == 0

    @pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
    async def test_stop_at_a_random_moment_under_load_loses_no_job_and_leaves_no_lock(
        self, db: asyncpg.Connection, database: str, seed: int
    ) -> None:
        chance = random.Random(seed)
        ran: list[int] = []

        async def task(n: int) -> None:
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
            ran.append(n)

        async with WorkerUtils(database) as utils:
            await utils.add_jobs(
                JobSpec("task", n, queue_name=chance.choice([None, None, "a", "b"])) for n in range(1500)
            )
        for _ in range(12):
            runner = await run(
                {"task": task},
                database,
                handle_signals=False,
                concurrency=chance.choice([1, 4, 30]),
                prefetch=chance.choice([0, 0, 5, 100]),
            )
            await asyncio.sleep(chance.uniform(0, 0.06))
            await runner.stop(grace=chance.choice([None, 0, 0.005]))
            assert await locked(db) == []
        await run_once({"task": task}, database, concurrency=10, handle_signals=False)
        assert sorted(set(ran)) == list(range(1500))
        assert await count(db) == 0


class TestServices:
    async def test_service_stops_after_a_tick_that_swallows_its_cancellation(self) -> None:
        class Stubborn(Service):
            async def tick(self) -> float | None:
                started.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                return None

        started = asyncio.Event()
        service = Stubborn(ScopedLogger(logging.getLogger("graphile_worker"), {}))
        service.start()
        await started.wait()
        async with asyncio.timeout(DEADLINE):
            await service.stop()

    async def test_slowly_closing_connection_does_not_delay_stop(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The notifier is stopped while it closes a connection on which no answer arrives."""
        closing, close = asyncio.Event(), asyncpg.Connection.close
        listening_connection: object = None

        async def closes(connection: asyncpg.Connection, **options: Any) -> None:
            if connection is listening_connection:
                closing.set()
                await asyncio.Event().wait()
            await close(connection, **options)

        monkeypatch.setattr(asyncpg.Connection, "close", closes)
        recorder = EventRecorder()
        runner = await run({"task": nothing}, database, events=recorder.events, handle_signals=False)
        listening_connection = (await recorder.until("pool:listen:success")).client
        assert runner._parts.notifier._listener is not None
        runner._parts.notifier._listener.closed.set()
        await closing.wait()
        async with asyncio.timeout(DEADLINE):
            await runner.stop()


class TestFatalErrors:
    async def test_dropped_schema_ends_the_worker_with_a_clear_error(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The runner of Graphile Worker ends without an error."""
        recorder = EventRecorder()
        runner = await run(
            {"task": nothing}, database, events=recorder.events, handle_signals=False, poll_interval=0.05
        )
        await drop_schema(db)
        with pytest.raises(SchemaMissingError, match="is not installed"):
            await runner.wait()
        await runner.stop()
        assert recorder.counts["pool:fatalError"] == 1
        assert recorder.names[-1] == "pool:release"

    async def test_leaving_the_context_manager_raises_the_fatal_error(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async def leave() -> None:
            async with await run(
                {"task": nothing}, database, handle_signals=False, poll_interval=0.05
            ) as runner:
                await drop_schema(db)
                with pytest.raises(SchemaMissingError):
                    await runner.wait()

        with pytest.raises(SchemaMissingError):
            await leave()

    async def test_run_once_raises_the_fatal_error(self, db: asyncpg.Connection, database: str) -> None:
        async def drop(_payload: Any) -> None:
            await drop_schema(db)

        await add(db)
        with pytest.raises(SchemaMissingError):
            await run_once({"task": drop}, database, handle_signals=False)

    async def test_revoked_privileges_end_the_worker(self, db: asyncpg.Connection, database: str) -> None:
        role = f"gw_{os.getpid()}"
        await db.execute(f"create role {role} login in role postgres")
        runner = await run(
            {"task": nothing},
            database.replace("postgres@", f"{role}@"),
            handle_signals=False,
            poll_interval=0.05,
        )
        await db.execute(f"revoke postgres from {role}")
        with pytest.raises(DatabaseError, match="schema"):
            await runner.wait()
        await runner.stop()
        await db.execute(f"drop role {role}")


class TestUnreachable:
    async def test_stop_gives_up_and_names_jobs_it_could_not_record(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lifecycle, "GIVE_UP_AFTER", 0.3)
        recorder, gate = EventRecorder(), Gate()
        async with proxied(database) as (proxy, dsn):
            runner = await run({"task": gate}, dsn, events=recorder.events, handle_signals=False)
            job = await runner.add_job("task")
            await gate.until_started()
            proxy.refusing = True
            proxy.cut_all()
            gate.open()
            with pytest.raises(ShutdownError, match=f"the outcomes of 1 job: {job.id}") as raised:
                await runner.stop(grace=0.1)
            assert raised.value.jobs == (job.id,)
            with pytest.raises(ShutdownError):
                await runner.wait()
        assert recorder.counts["pool:gracefulShutdown:workerError"] == 1
        assert recorder.named("worker:fatalError")[0].job_error is None
        assert recorder.counts["pool:gracefulShutdown:error"] == 1
        assert (await existing(db, job.id))["locked_by"] == runner.id

    async def test_stop_gives_up_on_a_server_that_does_not_answer(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lifecycle, "GIVE_UP_AFTER", 0.3)
        monkeypatch.setattr(connect, "_CLOSE_TIMEOUT", 0.3)
        monkeypatch.setattr(listen, "_UNLISTEN_TIMEOUT", 0.3)
        recorder, gate = EventRecorder(), Gate()
        async with proxied(database) as (proxy, dsn):
            runner = await run({"task": gate}, dsn, events=recorder.events, handle_signals=False)
            job = await runner.add_job("task")
            await gate.until_started()
            proxy.frozen = True
            gate.open()
            await recorder.until("job:success")
            async with asyncio.timeout(25):
                with pytest.raises(ShutdownError):
                    await runner.stop(grace=0.1)
            proxy.frozen = False
        assert (await get(db, job.id) is None) or await locked(db)


SCRIPT = """
import asyncio, contextlib, signal, sys, threading, time
from graphile_worker import Events, run
from graphile_worker._worker import lifecycle

begun = threading.Semaphore(0)

async def slow(seconds):
    print("begun", flush=True)
    begun.release()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    print("ended", flush=True)

def thread(seconds):
    print("begun", flush=True)
    begun.release()
    time.sleep(seconds)

@contextlib.asynccontextmanager
async def stuck():
    yield
    print("closing", flush=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("not closed", flush=True)
        raise

async def until_begun(count):
    for _ in range(count):
        await asyncio.to_thread(begun.acquire)

async def main():
    options = eval(sys.argv[2])
    if options.pop("custom", False):
        signal.signal(signal.SIGTERM, lambda *_: (print("passed on", flush=True), sys.exit(7)))
    forget = options.pop("forget", False)
    impatient = options.pop("impatient", False)
    after = options.pop("after", 0)
    if options.pop("print_events", False):
        options["events"] = events = Events()
        events.on("gracefulShutdown", lambda _: print("graceful", flush=True))
        events.on("forcefulShutdown", lambda _: print("forceful", flush=True))
    is_stuck = options.pop("stuck", False)
    if is_stuck:
        options["lifespan"] = stuck
    lifecycle.GIVE_UP_AFTER = options.pop("give_up_after", lifecycle.GIVE_UP_AFTER)
    runner = await run({"slow": slow, "thread": thread}, sys.argv[1], **options)
    if is_stuck:
        print("open", flush=True)
    await until_begun(after)
    if impatient:
        await asyncio.wait_for(runner.stop(), impatient)
    if forget:
        await asyncio.sleep(float(forget))
        raise SystemExit(5)
    await runner.wait()
    await asyncio.sleep(30)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def program(folder: Path, dsn: str, **options: Any) -> AsyncIterator[programs.Program]:
    """Run a worker in a separate program."""
    script = folder / "program.py"
    script.write_text(SCRIPT)
    async with programs.program(sys.executable, script, dsn, repr(options)) as running:
        yield running


class TestSignals:
    async def test_first_signal_waits_for_running_jobs_and_then_ends_the_process(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        job = await add(db, "slow", payload=0.5)
        async with program(tmp_path, database) as worker:
            await worker.until("begun")
            worker.send(signal.SIGTERM)
            assert await worker.end() == -signal.SIGTERM
        assert "ended" in worker.lines
        assert await get(db, job["id"]) is None
        assert await locked(db) == []

    async def test_signal_interrupts_jobs_after_the_grace_period(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        job = await add(db, "slow", payload=60)
        async with program(tmp_path, database, shutdown_grace=0.2) as worker:
            await worker.until("begun")
            worker.send(signal.SIGHUP)
            assert await worker.end() == -signal.SIGHUP
        assert "cancelled" in worker.lines
        assert (await existing(db, job["id"]))["attempts"] == 0
        assert await locked(db) == []

    async def test_second_signal_interrupts_jobs_at_once(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await add(db, "slow", payload=60)
        async with program(tmp_path, database, shutdown_grace=3600, print_events=True) as worker:
            await worker.until("begun")
            worker.send(signal.SIGTERM)
            await worker.until("graceful")  # Two signals at once would be delivered as one.
            worker.send(signal.SIGTERM)
            await worker.until("cancelled")
            assert await worker.end() == -signal.SIGTERM
        assert await locked(db) == []

    async def test_second_signal_does_not_wait_for_a_closing_lifespan(
        self, database: str, tmp_path: Path
    ) -> None:
        async with program(tmp_path, database, shutdown_grace=3600, stuck=True) as worker:
            await worker.until("open")
            worker.send(signal.SIGTERM)
            await worker.until("closing")
            worker.send(signal.SIGTERM)
            assert await worker.end() == -signal.SIGTERM
        assert "not closed" in worker.lines

    async def test_third_signal_kills_the_process(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        job = await add(db, "thread", payload=60)
        async with program(tmp_path, database, shutdown_grace=3600, print_events=True) as worker:
            await worker.until("begun")
            for event in ("graceful", "forceful"):
                worker.send(signal.SIGTERM)
                await worker.until(event)
            worker.send(signal.SIGTERM)
            assert await worker.end() == -signal.SIGTERM
        assert ("job", job["id"]) in await locked(db)

    async def test_previous_signal_handler_runs_after_the_worker_stops(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await add(db, "slow", payload=0.3)
        async with program(tmp_path, database, custom=True) as worker:
            await worker.until("begun")
            worker.send(signal.SIGTERM)
            assert await worker.end() == 7
        assert [line for line in worker.lines if line] == ["begun", "ended", "passed on"]
        assert await locked(db) == []

    async def test_ctrl_c_raises_keyboard_interrupt_after_the_worker_stops(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await add(db, "slow", payload=0.3)
        async with program(tmp_path, database) as worker:
            await worker.until("begun")
            worker.send(signal.SIGINT)
            assert await worker.end() == -signal.SIGINT
        assert "ended" in worker.lines
        assert await locked(db) == []

    async def test_signal_stops_all_workers_of_a_process(self, database: str) -> None:
        caught: list[int] = []
        before = signal.signal(signal.SIGUSR2, lambda number, _frame: caught.append(number))
        try:
            runners = [await run({"task": nothing}, database) for _ in range(2)]
            await runners.pop(0).stop()
            runners.append(await run({"task": nothing}, database))
            os.kill(os.getpid(), signal.SIGUSR2)
            async with asyncio.timeout(20):
                for runner in runners:
                    await runner.wait()

            async def is_caught() -> bool:
                return bool(caught)

            await until(is_caught, "the signal reaches its handler")
            assert caught == [signal.SIGUSR2]
        finally:
            signal.signal(signal.SIGUSR2, before)


class TestProgramWithoutStop:
    async def test_program_that_ends_without_stop_leaves_no_lock(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_jobs([JobSpec("slow", 60)] * 3 + [JobSpec("slow", 0)] * 500)
        async with program(
            tmp_path, database, forget=0.3, handle_signals=False, concurrency=5, prefetch=20
        ) as worker:
            assert await worker.end() == 5
        assert await locked(db) == []
        rows = await db.fetch("select attempts from graphile_worker._private_jobs")
        assert len(rows) >= 3
        assert {row["attempts"] for row in rows} == {0}

    # The program leaves its connections open too.
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    async def test_program_that_ends_during_an_exchange_sent_ahead_leaves_no_lock(
        self,
        db: asyncpg.Connection,
        database: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        sent, passes = asyncio.Event(), 0
        send_ahead = Worker._send_ahead

        async def cancel_or_note(self: Any, answer: Answer) -> None:
            if not passes:
                self._task.cancel()  # As closing the loop does, but at this exact moment.
                self._task.add_done_callback(lambda _: sent.set())
            else:
                sent.set()
            await send_ahead(self, answer)

        async def run_without_stopping() -> None:
            nonlocal sent
            sent = asyncio.Event()  # An event of this loop.
            await run({"task": nothing}, database, handle_signals=False, concurrency=5, prefetch=20)
            await sent.wait()
            for _ in range(passes):
                await asyncio.sleep(0)

        monkeypatch.setattr(Worker, "_send_ahead", cancel_or_note)
        async with WorkerUtils(database) as utils:
            for passes in range(8):  # noqa: B007 - both functions above read it
                await utils.add_jobs([JobSpec("task")] * 2000)
                await asyncio.to_thread(asyncio.run, run_without_stopping())
                assert await locked(db) == []
                assert await db.fetchval("select max(attempts) from graphile_worker._private_jobs") == 0
        gc.collect()
        assert "before" not in caplog.text, "everything must be recorded"

    async def test_program_that_cancels_stop_leaves_no_lock(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(JobSpec("slow", 60, queue_name=f"q{n}") for n in range(3))
        async with program(
            tmp_path, database, after=3, impatient=0.2, handle_signals=False, concurrency=5
        ) as worker:
            assert await worker.end() == 1
        assert await locked(db) == []
        assert await db.fetchval("select max(attempts) from graphile_worker._private_jobs") == 0

    async def test_program_that_ends_without_stop_records_a_slow_thread(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await add(db, "thread", payload=2, queue_name="q")
        async with program(
            tmp_path, database, after=1, forget=0.2, give_up_after=0.5, handle_signals=False
        ) as worker:
            assert await worker.end() == 5
        assert await locked(db) == []
        assert await count(db) == 0

    async def test_error_inside_the_context_manager_stops_the_worker_and_is_raised(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            async with running({"task": nothing}, database):
                1 / 0  # noqa: B018
        assert await locked(db) == []
