"""Progress that tasks report with `ctx.progress`."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import App, InvalidJobError, JobContext, WorkerUtils, run_once, task
from graphile_worker.testing import context, drain, reported_progress
from support import computing
from support.commands import Cli
from support.jobs import add
from support.waiting import DEADLINE, until
from support.workers import running

if TYPE_CHECKING:
    import asyncpg

ROWS = "select count(*) from graphile_worker._private_python_progress"


class TestProgress:
    @pytest.mark.parametrize("on_thread", [False, True])
    async def test_progress_of_a_failed_job_survives_and_goes_when_the_job_succeeds(
        self, on_thread: bool, db: asyncpg.Connection, database: str
    ) -> None:
        def act(_payload: Any, ctx: JobContext) -> None:
            ctx.progress(ctx.job.attempts / 10, "page")
            if ctx.job.attempts == 1:
                raise ValueError("no")

        async def act_on_loop(payload: Any, ctx: JobContext) -> None:
            act(payload, ctx)

        job = await add(db)
        tasks: dict[str, Any] = {"task": act if on_thread else act_on_loop}
        await run_once(tasks, database, handle_signals=False)
        async with WorkerUtils(database) as utils:
            found = await utils.progress(job["id"])
            assert found is not None
            assert (found.value, found.message) == (0.1, "page")
            await utils.reschedule_jobs([job["id"]], run_at=timedelta(0))
        await run_once(tasks, database, handle_signals=False)
        assert await db.fetchval(ROWS) == 0

    async def test_progress_is_visible_while_the_job_runs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        release = asyncio.Event()

        async def act(_payload: Any, ctx: JobContext) -> None:
            ctx.progress(None, "starting")
            await release.wait()

        job = await add(db)
        async with running({"task": act}, database), WorkerUtils(database) as utils:

            async def visible() -> bool:
                return await utils.progress(job["id"]) is not None

            await until(visible, "the progress is stored")
            [listed] = await utils.many.running()
            assert listed.progress is not None
            assert listed.progress.message == "starting"
            release.set()

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("where", ["thread", "process"])
    async def test_handle_and_show_have_the_progress_of_a_running_job(
        self, where: str, database: str, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)

        @task(keep_result=True)
        def report_in_thread(gate: str, ctx: JobContext) -> str:
            ctx.progress(0.5, "half")
            return Path(gate).read_text()

        reporting = report_in_thread if where == "thread" else computing.report_half
        async with App(database) as app:
            app.include(reporting)
            job = await reporting.enqueue(str(gate))
            assert await job.progress() is None
            async with app.running():

                async def visible() -> bool:
                    return await job.progress() is not None

                await until(visible, "the progress is stored", within=60)
                found = await job.progress()
                assert found is not None
                assert (found.value, found.message) == (0.5, "half")
                assert "50 %" in await Cli(database, tmp_path).out("show", str(job.id))
                await asyncio.to_thread(gate.write_text, "done")
                assert await job.result(timeout=DEADLINE) == "done"
            assert await job.progress() is None

    async def test_report_of_a_run_that_lost_its_job_is_ignored(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async def act(_payload: Any, ctx: JobContext) -> None:
            await db.execute(
                "update graphile_worker._private_jobs set locked_by = 'other', "
                "locked_at = locked_at + interval '1 second'"
            )
            ctx.progress(0.5)

        await add(db)
        await run_once({"task": act}, database, handle_signals=False)
        assert await db.fetchval(ROWS) == 0

    async def test_drained_job_has_its_reports(self, database: str) -> None:
        app = App(database)

        @app.task
        async def load(ctx: JobContext) -> None:
            ctx.progress(0.5, "half")
            ctx.progress(1)

        job = await load.enqueue()
        await drain(app)
        assert [report.value for report in reported_progress(job)] == [0.5, 1.0]
        await app.close()

    @pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), "0.5", True, object()])
    def test_invalid_progress_is_rejected(self, value: Any) -> None:
        with pytest.raises(InvalidJobError, match="must be a number from 0 to 1"):
            context().progress(value)

    def test_context_keeps_reports_and_cuts_long_messages(self) -> None:
        ctx = context()
        ctx.progress(0, "x" * 1000)
        assert len(ctx.reported[0].message or "") == 500
        assert ctx.reported[0].at <= datetime.now(UTC)
