"""Many Python and Node workers, on jobs that other clients change all the time.

The tasks write a ledger, and an audit checks it: every job ran, jobs of one queue never overlapped, each
attempt was one run, and nothing is left locked. Keyed adds and removes are essential, because
they are the calls that conflict with a claim.
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
from support.jobs import fetch_one
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
  if (payload.fail >= attempts) throw new Error('on purpose');
};
""" % (BEGIN, END)  # noqa: UP031 - the text is full of braces


async def work(ledger: asyncpg.Pool, payload: dict[str, Any], ctx: JobContext) -> None:
    """Write start and end into the ledger, and sleep in between."""
    job = ctx.job
    # Shielded, so that every run that started is in the ledger.
    insertion = asyncio.ensure_future(
        ledger.fetchval(BEGIN, job.id, job.attempts, job.job_queue_id, ctx.worker_id)
    )
    try:
        await asyncio.shield(insertion)
        await asyncio.sleep(payload["ms"] / 1000)
        await ledger.execute(END, insertion.result(), False)
    except asyncio.CancelledError:
        await ledger.execute(END, await insertion, True)
        raise
    if payload["fail"] >= job.attempts:
        raise ValueError("on purpose")


class RandomClient:
    """A client that adds, replaces and removes jobs in random transactions.

    Args:
        moving: Whether a key may move to another queue. A Node worker locks the queue in which it found a
            job, even if the job has moved to another queue since. Next to Node, keys must stay in one queue.
    """

    def __init__(self, dsn: str, seed: int, *, moving: bool) -> None:
        self._dsn = dsn
        self._moving = moving
        self._rng = random.Random(seed)
        self._keys = [f"key {n}" for n in range(15)]
        self.unkeyed: set[int] = set()

    async def run(self, calls: int) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            for _ in range(calls):
                await self._run_transaction(connection)
        finally:
            await connection.close()

    async def _run_transaction(self, connection: asyncpg.Connection) -> None:
        rng = self._rng
        transaction = connection.transaction()
        await transaction.start()
        added: set[int] = set()
        # Sorted, so that these transactions do not deadlock with each other.
        for key in sorted(rng.sample(self._keys, rng.choice([0, 1, 1, 2]))):
            if rng.random() < 0.2:
                await connection.execute("select graphile_worker.remove_job($1)", key)
            else:
                await self._add(connection, key)
        for _ in range(rng.choice([0, 1, 3])):
            added.add(await self._add(connection, None))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 0.03))
        if rng.random() < 0.15:
            await transaction.rollback()
        else:
            await transaction.commit()
            self.unkeyed |= added

    async def _add(self, connection: asyncpg.Connection, key: str | None) -> int:
        rng = self._rng
        queues = [None, None, *(f"queue {n}" for n in range(8))]
        queue = rng.choice(queues)
        if key is not None and not self._moving:
            queue = queues[self._keys.index(key) % len(queues)]
        row = await fetch_one(
            connection,
            """select * from graphile_worker.add_job('work', json_build_object('ms', $1::int, 'fail',
            $2::int), queue_name => $3, priority => $4, job_key => $5, max_attempts => $6, job_key_mode =>
            $7)""",
            rng.choice([0, 0, 1, 3]),
            rng.choice([0, 0, 0, 0, 1, 2]),
            queue,
            rng.choice([-1, 0, 0, 0, 5]),
            key,
            rng.choice([1, 3, 25]),
            rng.choice(["replace", "preserve_run_at"]),
        )
        return int(row["id"])


@contextlib.asynccontextmanager
async def node_worker(dsn: str, folder: Path) -> AsyncIterator[None]:
    """Run a Node worker. Skip the test if Node is not installed."""
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


async def kill_sessions(db: asyncpg.Pool, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.1, 0.6))
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'graphile-worker' and datname = current_database()
            order by random() limit 1"""
        )


async def skip_back_off(dsn: str) -> None:
    """Make retries due at once, because the test has no time for the back-off."""
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


async def audit(db: asyncpg.Connection, unkeyed: set[int]) -> None:
    ran = {row["job_id"] for row in await db.fetch("select distinct job_id from ledger")}
    assert unkeyed <= ran, f"never ran: {sorted(unkeyed - ran)[:10]}"
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
        list(unkeyed),
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
    rng = random.Random(seed)
    await db.execute(LEDGER)
    # Created first, because transactions that add them in different orders would deadlock with each other.
    await db.execute("insert into graphile_worker._private_tasks (identifier) values ('work')")
    await db.execute(
        """insert into graphile_worker._private_job_queues (queue_name)
        select 'queue ' || n from generate_series(0, 7) as n"""
    )
    clients = [RandomClient(dsn, seed * 100 + n, moving=not with_node) for n in range(4)]
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as killer,
        asyncpg.create_pool(dsn, min_size=1, max_size=6) as ledger,
        node_worker(dsn, folder) if with_node else contextlib.nullcontext(),
    ):
        runners = [
            await start_worker(dsn, ledger, concurrency=4),
            await start_worker(dsn, ledger, concurrency=3, prefetch=rng.choice([5, 30])),
            await start_worker(dsn, ledger, concurrency=1, listen=False),
        ]
        background = [
            asyncio.create_task(kill_sessions(killer, rng)),
            asyncio.create_task(skip_back_off(dsn)),
        ]
        try:
            await asyncio.gather(*(client.run(calls) for client in clients))
            # One worker stops in the middle, and a new one starts.
            await runners.pop(0).stop(grace=rng.choice([0, None]))
            # A worker that loses its connection while it starts rightly fails.
            killing = background.pop(0)
            killing.cancel()
            await asyncio.wait([killing])
            runners.append(await start_worker(dsn, ledger, concurrency=4, prefetch=10))

            async def all_jobs_ran() -> bool:
                return not await db.fetchval(
                    """select exists (select from graphile_worker._private_jobs
                    where locked_at is not null or attempts < max_attempts)"""
                )

            await until(all_jobs_ran, "all jobs ran")
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for runner in runners:
                await runner.stop(grace=5)
    await audit(db, set(itertools.chain.from_iterable(client.unkeyed for client in clients)))
    assert await db.fetchval("select count(*) from ledger") > calls


with_or_without_node = pytest.mark.parametrize("with_node", [False, True], ids=["alone", "with node"])


@pytest.mark.sample(1)
@with_or_without_node
async def test_no_job_is_lost_overlaps_or_stays_locked_under_stress(
    db: asyncpg.Connection, database: str, tmp_path: Path, with_node: bool
) -> None:
    await stress(database, db, tmp_path, 1, calls=60, with_node=with_node)


@pytest.mark.slow
@with_or_without_node
@pytest.mark.parametrize("seed", range(10, 13))
async def test_no_job_is_lost_overlaps_or_stays_locked_under_longer_stress(
    db: asyncpg.Connection, database: str, tmp_path: Path, seed: int, with_node: bool
) -> None:
    await stress(database, db, tmp_path, seed, calls=400, with_node=with_node)
