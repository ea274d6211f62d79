"""The type and the traceback of a job's last failure, and failed jobs grouped by error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import App, Cancel, Fail, WorkerUtils, doctor, run_once
from graphile_worker._base.tracebacks import error_type, format_traceback
from graphile_worker.cli.live.details import Details
from graphile_worker.cli.times import format_time
from support.commands import Cli
from support.computing import sum_up
from support.jobs import AUTOCOMMITS, add
from test_history_partitions import Service, create_day

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class OrderError(Exception): ...


ORDER_ERROR = f"{__name__}.OrderError"


@pytest.fixture
async def app(database: str) -> AsyncIterator[App]:
    async with App(dsn=database) as app:
        yield app


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


def raise_deeply(depth: int, message: str = "deep") -> None:
    if depth == 0:
        raise OrderError(message)
    raise_deeply(depth - 1, message)


async def on_the_loop(n: int) -> None:
    raise OrderError(f"order {n} is gone")


def on_a_thread(n: int) -> None:
    raise OrderError(f"order {n} is gone")


class TestFacts:
    @pytest.mark.parametrize("function", [on_the_loop, on_a_thread])
    async def test_failed_job_has_type_and_traceback(self, app: App, function: Any) -> None:
        job = await app.task("task")(function).enqueue(n=7)
        await app.run_once()
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        assert found.last_error == "order 7 is gone", "as Node shows it"
        assert found.error_type == ORDER_ERROR
        assert found.traceback is not None
        lines = found.traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert function.__name__ in lines[1], "the first frame is the task's"
        assert lines[-1] == f"{ORDER_ERROR}: order 7 is gone"
        assert "graphile_worker/_worker" not in found.traceback

    async def test_top_shows_time_type_and_traceback_of_a_failed_job(self, app: App) -> None:
        job = await app.task("task")(on_the_loop).enqueue(n=7)
        await app.run_once()
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        shown = "\n".join(line.plain for line in Details(found).render(200, 100))
        assert f"failed {format_time(found.failed_at)}" in shown
        assert f"error {ORDER_ERROR}" in shown
        assert "in on_the_loop" in shown

    async def test_failed_process_task_has_type_and_traceback(self, app: App) -> None:
        app.include(sum_up)
        job = await sum_up.enqueue(n=-1)
        await app.run_once()
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        assert found.error_type == "ValueError"
        assert found.traceback is not None
        assert found.traceback.endswith("ValueError: -1 is negative")
        assert "in sum_up" in found.traceback

    async def test_cause_of_a_permanent_failure_is_its_type(self, app: App) -> None:
        @app.task
        async def task() -> None:
            try:
                raise_deeply(3)
            except OrderError as error:
                raise Fail("no use") from error

        job = await task.enqueue()
        await app.run_once()
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        assert found.error_type == ORDER_ERROR
        assert found.traceback is not None
        assert "raise_deeply" in found.traceback

    async def test_cancelled_job_has_no_type(self, app: App) -> None:
        @app.task
        async def task() -> None:
            raise Cancel("not needed")

        job = await task.enqueue()
        await app.run_once()
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        assert (found.error_type, found.traceback) == (None, None)

    @AUTOCOMMITS
    async def test_facts_are_the_same_on_the_callers_connection(
        self, app: App, db: asyncpg.Connection
    ) -> None:
        job = await app.task("task")(on_the_loop).enqueue(n=7)
        await app.run_once()
        assert await app.utils.get_job(id=job.id, connection=db) == await app.utils.get_job(id=job.id)

    async def test_facts_of_an_earlier_failure_are_not_shown(self, app: App, db: asyncpg.Connection) -> None:
        job = await app.task("task")(on_the_loop).enqueue(n=7)
        await app.run_once()
        await db.execute("update graphile_worker._private_jobs set last_error = 'by Node'")
        found = await app.utils.get_job(id=job.id)
        assert found is not None
        assert (found.error_type, found.traceback) == (None, None)
        assert await app.utils.list_jobs(error_type="OrderError") == []

    def test_long_traceback_is_shortened_in_the_middle(self) -> None:
        try:
            raise_deeply(0, "x" * 20_000)
        except OrderError as error:
            text = format_traceback(error)
        assert text is not None
        assert len(text) < 8_100
        assert text.startswith("Traceback (most recent call last):")
        assert "characters left out" in text

    def test_deep_recursion_is_limited(self) -> None:
        try:
            raise_deeply(400)
        except OrderError as error:
            text = format_traceback(error)
        assert text is not None
        assert text.count("in raise_deeply") <= 50
        assert text.endswith("OrderError: deep")

    def test_error_without_frames_of_a_task_has_no_traceback(self) -> None:
        assert format_traceback(OrderError("never raised")) is None

    def test_type_has_its_module_unless_it_is_built_in_or_ours(self) -> None:
        assert error_type(KeyError()) == "KeyError"
        assert error_type(Fail()) == "Fail"
        assert error_type(asyncpg.PostgresError()) == "asyncpg.exceptions._base.PostgresError"


class TestGroups:
    async def test_equal_errors_are_one_group(self, database: str) -> None:
        uuid, hexadecimal = "6f9619ff-8b86-d011-b42d-00c04fc964ff", "0xdeadbeef"

        def task(payload: Any) -> None:
            raise OrderError(payload["error"])

        async with WorkerUtils(database) as utils:
            for error in (
                f"order 7 of {uuid} at {hexadecimal}\nmore",
                f"order 123 of {uuid[::-1].replace('-', '0')} at 0x1",
                "something else",
            ):
                await utils.add_job("task", {"error": error})
            await utils.add_job("task", {"error": "order 1 of 2 at 3"}, max_attempts=1)
            await run_once({"task": task}, database)
            first, second = await utils.failures()
            assert (first.fingerprint, first.jobs, first.permanent) == ("order # of # at #", 3, 1)
            assert (first.error_type, first.example_id) == (ORDER_ERROR, 4)
            assert first.last_failed_at is not None
            assert (second.fingerprint, second.jobs) == ("something else", 1)
            assert await utils.failures(task="other") == []
            assert await utils.failures(limit=1) == [first]

    async def test_failures_of_other_programs_are_included(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db)
        await db.execute("update graphile_worker._private_jobs set last_error = 'by Node 7', attempts = 1")
        async with WorkerUtils(database) as utils:
            [group] = await utils.failures()
        assert (group.fingerprint, group.error_type, group.last_failed_at) == ("by Node #", None, None)

    async def test_jobs_are_selected_by_type_with_or_without_module(self, app: App) -> None:
        job = await app.task("task")(on_the_loop).enqueue(n=7)
        await app.run_once()
        for name in ("OrderError", ORDER_ERROR):
            assert [one.id for one in await app.utils.list_jobs(error_type=name)] == [job.id]
        for name in ("Error", "rError", "%"):
            assert await app.utils.list_jobs(error_type=name) == []


class TestCommands:
    async def test_failures_and_show_name_the_error(self, app: App, cli: Cli) -> None:
        app.task("task")(on_the_loop)
        for n in (7, 8):
            await app.add_job("task", {"n": n})
        await app.run_once()
        [group] = await cli.json("failures")
        assert (group["jobs"], group["fingerprint"]) == (2, "order # is gone")
        assert "order # is gone" in await cli.out("failures", "--task", "task")
        shown = await cli.out("show", str(group["example_id"]))
        assert f"error_type       {ORDER_ERROR}" in shown
        assert "Traceback (most recent call last):" in shown
        assert (await cli.out("list", "--error", "OrderError", "--ids")).split() == ["1", "2"]
        assert (await cli.out("list", "--error", "ValueError", "--ids")).split() == []

    async def test_history_lists_shows_and_counts_attempts(self, database: str, cli: Cli) -> None:
        async with App(dsn=database, history="all") as app:
            app.task("bad")(on_the_loop)

            @app.task(keep_result=True)
            async def good() -> int:
                return 5

            await app.add_job("bad", {"n": 7})
            await good.enqueue()
            await app.run_once()
        found = await cli.json("history", "list", "--since", "1h")
        assert [(one["job_id"], one["outcome"]) for one in found] == [(2, "completed"), (1, "failed")]
        assert [one["job_id"] for one in await cli.json("history", "list", "--outcome", "failed")] == [1]
        assert [one["result"] for one in await cli.json("history", "list", "--job", "2")] == [5]
        assert len((await cli.out("history", "list", "-n", "1")).splitlines()) == 1
        shown = await cli.out("history", "show", "1")
        assert "Traceback (most recent call last):" in shown
        assert "order 7 is gone" in shown
        stats = await cli.json("history", "stats")
        assert {one["task_identifier"]: one["completed"] for one in stats} == {"bad": 0, "good": 1}
        ended = await cli.out("show", "2")
        assert "jobs that Node or Rust workers ran are not" in ended, (
            "the job is gone, but its attempt is not"
        )
        assert (await cli.json("show", "2"))[0]["history"][0]["outcome"] == "completed"

    async def test_history_says_what_it_does_not_have(self, cli: Cli) -> None:
        done = await cli("history", "show", "99")
        assert done.returncode == 1
        assert "The history has no attempt of job 99. Only attempts of Python workers" in done.stderr
        wrong = await cli("history", "list", "--job", "1", "--task", "x")
        assert wrong.returncode == 2
        assert "--job cannot be combined with other filters." in wrong.stderr

    async def test_prune_removes_old_days(self, db: asyncpg.Connection, cli: Cli) -> None:
        await create_day(db, 9)
        assert await cli.json("history", "prune", "--older-than", "4d", "--yes") == {"days": 1, "attempts": 0}


class TestDoctor:
    async def findings(self, dsn: str) -> list[Any]:
        return [one async for one in doctor.examine(dsn) if one.check == "history"]

    async def test_history_in_order_is_ok(self, database: str) -> None:
        [finding] = await self.findings(database)
        assert (finding.level, finding.message) == (doctor.Level.OK, "0 days of history")

    async def test_missing_partitions_are_a_warning(self, db: asyncpg.Connection, database: str) -> None:
        await create_day(db, 1)
        await db.execute(
            """insert into graphile_worker._private_python_runs
            (job_id, attempt, outcome, final, ended_at, run_at, created_at, task_id)
            values (1, 1, 1, true, $1, $1, $1, 1)""",
            datetime.now(UTC) + timedelta(days=9),
        )
        [finding] = await self.findings(database)
        assert finding.level is doctor.Level.WARNING
        assert "attempts go to the default partition" in finding.message
        service = Service(database)
        await service.keeping(30 * 86_400).maintain()
        await service.pool.close()
        [finding] = await self.findings(database)
        assert finding.level is doctor.Level.OK
