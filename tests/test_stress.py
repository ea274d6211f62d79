"""Many workers, ours and npm's, on one queue that others change all the time.

What is promised is audited in a ledger that the tasks write: every job ran, jobs of one queue never
overlapped, each attempt was one run, and nothing is left locked. Without keyed adds and removes such a test
shows nothing: those are what make a claim go wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import JobContext, Runner, run
from support import node
from support.jobs import one
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LEDGER = """
create table ledger (
  run serial primary key, job_id bigint, attempt int, queue_id int, worker text,
  begun timestamptz default clock_timestamp(), ended timestamptz, interrupted boolean default false
)"""
BEGIN = "insert into ledger (job_id, attempt, queue_id, worker) values ($1, $2, $3, $4) returning run"
END = "update ledger set ended = clock_timestamp(), interrupted = $2 where run = $1"

NODE_TASK = """
module.exports = async (payload, helpers) => {
  const { id, attempts, job_queue_id } = helpers.job;
  const { rows } = await helpers.query(`%s`, [id, attempts, job_queue_id, 'node']);
  await new Promise((resolve) => setTimeout(resolve, payload.ms));
  await helpers.query(`%s`, [rows[0].run, false]);
  if (payload.fail >= attempts) throw new Error('as told');
};
""" % (BEGIN, END)  # noqa: UP031 - it is full of braces


async def work(ledger: asyncpg.Pool, payload: dict[str, Any], ctx: JobContext) -> None:
    """Write what happens into the ledger, and do nothing for a while."""
    job = ctx.job
    # Not to be interrupted: what began is in the ledger.
    beginning = asyncio.ensure_future(
        ledger.fetchval(BEGIN, job.id, job.attempts, job.job_queue_id, ctx.worker_id)
    )
    try:
        await asyncio.shield(beginning)
        await asyncio.sleep(payload["ms"] / 1000)
        await ledger.execute(END, beginning.result(), False)
    except asyncio.CancelledError:
        await ledger.execute(END, await beginning, True)
        raise
    if payload["fail"] >= job.attempts:
        raise ValueError("as told")


class Troublemaker:
    """Adds, replaces and removes jobs, in transactions of all kinds.

    Args:
        moving: Whether a key may go from queue to queue. npm's worker locks the queue in which a job was when
            it looked, and not the one in which it finds it: beside it keys have to stay where they are.
    """

    def __init__(self, dsn: str, seed: int, *, moving: bool) -> None:
        self._dsn = dsn
        self._moving = moving
        self._chance = random.Random(seed)
        self._keys = [f"key {n}" for n in range(15)]
        self.plain: set[int] = set()

    async def cause(self, calls: int) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            for _ in range(calls):
                await self._once(connection)
        finally:
            await connection.close()

    async def _once(self, connection: asyncpg.Connection) -> None:
        chance = self._chance
        transaction = connection.transaction()
        await transaction.start()
        added: set[int] = set()
        # In one order, so that these transactions do not deadlock with each other.
        for key in sorted(chance.sample(self._keys, chance.choice([0, 1, 1, 2]))):
            if chance.random() < 0.2:
                await connection.execute("select graphile_worker.remove_job($1)", key)
            else:
                await self._add(connection, key)
        for _ in range(chance.choice([0, 1, 3])):
            added.add(await self._add(connection, None))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0, 0.03))
        if chance.random() < 0.15:
            await transaction.rollback()
        else:
            await transaction.commit()
            self.plain |= added

    async def _add(self, connection: asyncpg.Connection, key: str | None) -> int:
        chance = self._chance
        queues = [None, None, *(f"queue {n}" for n in range(8))]
        queue = chance.choice(queues)
        if key is not None and not self._moving:
            queue = queues[self._keys.index(key) % len(queues)]
        row = await one(
            connection,
            """select * from graphile_worker.add_job('work', json_build_object('ms', $1::int, 'fail',
            $2::int), queue_name => $3, priority => $4, job_key => $5, max_attempts => $6, job_key_mode =>
            $7)""",
            chance.choice([0, 0, 1, 3]),
            chance.choice([0, 0, 0, 0, 1, 2]),
            queue,
            chance.choice([-1, 0, 0, 0, 5]),
            key,
            chance.choice([1, 3, 25]),
            chance.choice(["replace", "preserve_run_at"]),
        )
        return int(row["id"])


@contextlib.asynccontextmanager
async def nodes_worker(dsn: str, folder: Path) -> AsyncIterator[None]:
    """npm's; skips the test where it is missing."""
    command = node.command("0.18.0")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "work.js").write_text(NODE_TASK)
    process = await asyncio.create_subprocess_exec(
        command, "--jobs", "3", "--poll-interval", "50", cwd=folder,
        env={**node.environment(dsn), "NO_LOG_SUCCESS": "1"},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def start_worker(dsn: str, ledger: asyncpg.Pool, **options: Any) -> Runner:
    tasks = {"work": functools.partial(work, ledger)}
    return await run(tasks, dsn, handle_signals=False, poll_interval=0.1, **options)


async def kill_sessions(db: asyncpg.Pool, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'graphile-worker' and datname = current_database()
            order by random() limit 1"""
        )


async def hurry(dsn: str) -> None:
    """Retries are due at once: the test has no time for the back-off."""
    connection = await asyncpg.connect(dsn)
    try:
        while True:
            await connection.execute(
                """update graphile_worker._private_jobs set run_at = now() where id in (
                select id from graphile_worker._private_jobs
                where is_available and attempts > 0 and run_at > now() for update skip locked)"""
            )
            await asyncio.sleep(0.05)
    finally:
        connection.terminate()


async def audit(db: asyncpg.Connection, plain: set[int]) -> None:
    ran = {row["job_id"] for row in await db.fetch("select distinct job_id from ledger")}
    assert plain <= ran, f"never ran: {sorted(plain - ran)[:10]}"
    assert await locked(db) == []
    overlaps = await db.fetch(
        """select a.job_id, b.job_id, a.queue_id, a.worker, b.worker, a.begun, a.ended, b.begun, b.ended
        from ledger as a join ledger as b on a.queue_id = b.queue_id and a.run < b.run
        where a.begun < coalesce(b.ended, 'infinity') and b.begun < coalesce(a.ended, 'infinity')"""
    )
    assert overlaps == []
    attempts = await db.fetch(
        """select job_id, array_agg(attempt order by run) as attempts from ledger
        where job_id = any ($1) and not interrupted group by job_id""",
        list(plain),
    )
    for row in attempts:
        assert row["attempts"] == list(range(1, len(row["attempts"]) + 1)), dict(row)
    left = await db.fetch(
        "select * from graphile_worker._private_jobs where attempts < max_attempts and run_at <= now()"
    )
    assert left == []


async def stress(
    dsn: str, db: asyncpg.Connection, folder: Path, seed: int, calls: int, *, with_node: bool
) -> None:
    chance = random.Random(seed)
    await db.execute(LEDGER)
    # There from the start, or transactions that add them in different orders deadlock with each other.
    await db.execute("insert into graphile_worker._private_tasks (identifier) values ('work')")
    await db.execute(
        """insert into graphile_worker._private_job_queues (queue_name)
        select 'queue ' || n from generate_series(0, 7) as n"""
    )
    trouble = [Troublemaker(dsn, seed * 100 + n, moving=not with_node) for n in range(4)]
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as killer,
        asyncpg.create_pool(dsn, min_size=1, max_size=6) as ledger,
        nodes_worker(dsn, folder) if with_node else contextlib.nullcontext(),
    ):
        runners = [
            await start_worker(dsn, ledger, concurrency=4),
            await start_worker(dsn, ledger, concurrency=3, prefetch=chance.choice([5, 30])),
            await start_worker(dsn, ledger, concurrency=1, listen=False),
        ]
        background = [
            asyncio.create_task(kill_sessions(killer, chance)),
            asyncio.create_task(hurry(dsn)),
        ]
        try:
            await asyncio.gather(*(maker.cause(calls) for maker in trouble))
            # One of them leaves in the middle, and a new one comes.
            await runners.pop(0).stop(grace=chance.choice([0, None]))
            # A start that loses its connection is an error, and rightly so.
            killing = background.pop(0)
            killing.cancel()
            await asyncio.wait([killing])
            runners.append(await start_worker(dsn, ledger, concurrency=4, prefetch=10))

            async def drained() -> bool:
                return not await db.fetchval(
                    """select exists (select from graphile_worker._private_jobs
                    where locked_at is not null or attempts < max_attempts)"""
                )

            await until(drained, "all jobs ran")
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for runner in runners:
                await runner.stop(grace=5)
    await audit(db, set(itertools.chain.from_iterable(maker.plain for maker in trouble)))
    assert await db.fetchval("select count(*) from ledger") > calls


beside = pytest.mark.parametrize("with_node", [False, True], ids=["alone", "beside npm's"])


@beside
async def test_nothing_is_lost_overlaps_or_stays_locked(
    db: asyncpg.Connection, database: str, tmp_path: Path, with_node: bool
) -> None:
    await stress(database, db, tmp_path, 1, calls=60, with_node=with_node)


@pytest.mark.slow
@beside
@pytest.mark.parametrize("seed", range(10, 13))
async def test_nothing_is_lost_overlaps_or_stays_locked_for_longer(
    db: asyncpg.Connection, database: str, tmp_path: Path, seed: int, with_node: bool
) -> None:
    await stress(database, db, tmp_path, seed, calls=400, with_node=with_node)
