"""Payloads over max_payload_size are rejected, and large ones are sent in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    InvalidJobError,
    JobContext,
    JobSpec,
    WorkerUtils,
    run_once,
)
from graphile_worker._client.bulk import JobFilter
from graphile_worker._db.queries import bulk_insert, transfer
from support.commands import Cli
from support.jobs import count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import asyncpg

LIMIT = 1000
TOO_LARGE = {"text": "x" * LIMIT}
TOO_LARGE_ERROR = r"1,011 bytes.*max_payload_size.*1,000\..*[Ss]tore large data elsewhere"


class TestMaxPayloadSize:
    async def test_worker_utils_reject_payloads_over_max_payload_size(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database, max_payload_size=LIMIT) as utils:
            with pytest.raises(InvalidJobError, match=TOO_LARGE_ERROR) as caught:
                await utils.add_job("task", TOO_LARGE)
            assert caught.value.argument == "payload"
            with pytest.raises(InvalidJobError, match=TOO_LARGE_ERROR):
                await utils.add_jobs([JobSpec("task", {}), JobSpec("task", TOO_LARGE)])
            assert await count(db) == 0
            await utils.add_job("task", {"text": "x" * (LIMIT - 11)})
        assert await count(db) == 1

    async def test_app_and_its_tasks_reject_payloads_over_max_payload_size(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database, max_payload_size=LIMIT)
        errors: list[str] = []

        @app.task
        async def task(ctx: JobContext, text: str) -> None:
            with pytest.raises(InvalidJobError, match=TOO_LARGE_ERROR) as caught:
                await ctx.add_job("task", {"text": text})
            errors.append(str(caught.value))

        async with app:
            with pytest.raises(InvalidJobError, match=TOO_LARGE_ERROR):
                await task.enqueue(text="x" * LIMIT)
            with pytest.raises(InvalidJobError, match=TOO_LARGE_ERROR):
                await task.enqueue_many(iter([TOO_LARGE]))
            # The limit is for adding only: a job added in SQL or by another program runs, whatever its size.
            await db.execute(
                "select graphile_worker.add_job('task', json_build_object('text', repeat('x', 1000)))"
            )
            await app.run_once()
        assert len(errors) == 1
        assert await count(db) == 0

    async def test_run_once_applies_max_payload_size_to_jobs_that_tasks_add(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("select graphile_worker.add_job('task')")

        async def task(_payload: object, ctx: JobContext) -> None:
            await ctx.add_job("task", TOO_LARGE)

        await run_once({"task": task}, database, max_payload_size=LIMIT, handle_signals=False)
        assert "max_payload_size" in await db.fetchval("select last_error from graphile_worker.jobs")

    @pytest.mark.parametrize("size", [0, -1, 2**30, "16MB", 1.5, True])
    def test_invalid_max_payload_size_is_rejected(self, size: object) -> None:
        with pytest.raises(ConfigurationError, match=r"max_payload_size .*number of bytes"):
            WorkerUtils("postgresql://user@localhost:1/nowhere", max_payload_size=size)  # type: ignore[arg-type]

    async def test_command_reads_max_payload_size_from_its_settings(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        cli = Cli(database, tmp_path)
        (tmp_path / "graphile-worker.toml").write_text('max_payload_size = "1KB"\n')
        done = await cli("add", "task", '{"text": "' + "x" * LIMIT + '"}')
        assert (done.returncode, await count(db)) == (1, 0)
        assert "max_payload_size" in done.stderr


class TestChunks:
    async def test_add_jobs_sends_chunks_limited_by_payload_size(
        self, database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A chunk of large payloads has few jobs, and the iterator runs no more than one chunk ahead."""
        monkeypatch.setattr(bulk_insert, "_CHUNK_BYTES", 50_000)
        generated = 0
        generated_when_sent: list[int] = []

        def specs() -> Iterator[JobSpec]:
            nonlocal generated
            for number in range(40):
                generated += 1
                yield JobSpec("task", {"n": number, "text": "x" * 10_000})

        real_arguments = bulk_insert._arguments

        def arguments(chunk: bulk_insert.Chunk) -> list[object]:
            generated_when_sent.append(generated)
            assert sum(map(len, chunk.payloads)) < 60_000
            return real_arguments(chunk)

        monkeypatch.setattr(bulk_insert, "_arguments", arguments)
        async with WorkerUtils(database) as utils:
            jobs = await utils.add_jobs(specs())
        assert [job.payload["n"] for job in jobs] == list(range(40))
        assert await count(db) == 40
        assert generated_when_sent == list(range(5, 41, 5))

    async def test_import_sends_batches_limited_by_line_size(
        self, database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer, "_BATCH_BYTES", 5_000)
        line = b'{"task_identifier": "task", "payload": "' + b"x" * 2_000 + b'"}\n'
        async with WorkerUtils(database) as utils:
            steps = [step.jobs async for step in utils.many.import_lines([line] * 5, new_ids=True)]
            assert steps == [2, 4, 5]
            assert len([job async for page in utils.many.export(JobFilter()) for job in page]) == 5
        assert await count(db) == 5
