"""The exchange has one plan, whatever the statistics of the tables say."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import psutil
import pytest

from graphile_worker._db.queries.exchange import Position
from graphile_worker.outcome import Completed, Failed, Returned
from support.jobs import add
from test_exchange import ExchangeWorker, ids, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from graphile_worker.outcome import Outcome

# Pages without rows: the planner expects at most one row, however many there are by now.
EMPTY_STATISTICS = """
    select graphile_worker.add_job('task', queue_name => 'q' || n) from generate_series(1, 400) as n;
    delete from graphile_worker._private_jobs;
    delete from graphile_worker._private_job_queues;
    analyze graphile_worker._private_jobs;
    analyze graphile_worker._private_job_queues;
"""
EXPLAIN = """
    load 'auto_explain';
    set auto_explain.log_min_duration = 0;
    set auto_explain.log_nested_statements = on;
    set auto_explain.log_format = 'json';
    set auto_explain.log_level = 'notice';
"""
TABLES = ("_private_jobs", "_private_job_queues")
WHATEVER_STATISTICS = pytest.mark.parametrize(
    "statistics", ["select", EMPTY_STATISTICS], ids=["never analyzed", "of empty tables"]
)
ADD_MANY = """
    select graphile_worker.add_jobs(array(
      select row('task', null, null, null, null, null, null, null)::graphile_worker.job_spec
      from generate_series(1, $1)))
"""

ADD_QUEUED = """
    select graphile_worker.add_jobs(array(
      select row('task' || n / $1 % $3, null, 'q' || n % $1, null, null, null, null, null)
        ::graphile_worker.job_spec
      from generate_series(0, $2 - 1) as n))
"""
ROWS_READ = """
    select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index
    where indrelid = 'graphile_worker._private_jobs'::regclass
"""


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(database)
    worker = ExchangeWorker(connection, "worker")
    worker.timeout = 600  # no test in here is about waiting
    yield worker
    await connection.close()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


def reads_a_whole_table(node: dict[str, Any]) -> bool:
    """Whether the number of rows that the node reads depends on the size of a table."""
    kind = node["Node Type"]
    if node.get("Relation Name") not in TABLES or not kind.endswith("Scan"):
        return False
    return kind != "Tid Scan" and "Index Cond" not in node


async def read_plans(worker: ExchangeWorker) -> list[dict[str, Any]]:
    """Start to collect the plans of all statements inside the exchange; skip if the server cannot."""
    try:
        await worker.connection.execute(EXPLAIN)
    except asyncpg.UndefinedFileError:
        pytest.skip("this server comes without auto_explain")
    plans: list[dict[str, Any]] = []

    def collect(_connection: object, message: asyncpg.PostgresLogMessage) -> None:
        plans.append(json.loads(str(message.message).partition("plan:\n")[2]))

    worker.connection.add_log_listener(collect)
    return plans


@WHATEVER_STATISTICS
async def test_no_statement_of_the_exchange_reads_a_whole_table(
    db: asyncpg.Connection, worker: ExchangeWorker, statistics: str
) -> None:
    plans = await read_plans(worker)
    await db.execute(statistics)
    worker.identifiers = ("task", "another")
    later = datetime.now(UTC) + timedelta(hours=1)
    for number in range(5):
        await add(db, queue_name=f"q{number}")
        await add(db, "another", queue_name=f"q{number}", priority=number)
        await add(db, queue_name="later", run_at=later, priority=number)
        await add(db, max_attempts=number + 1, priority=number)
    # Hides the other queues, so that they are visited one by one.
    await db.execute("select graphile_worker.add_job('task', queue_name => 'q0') from generate_series(1, 50)")

    claimed = await worker.claim(3, run_length=2, startable=1)
    claimed += await worker.claim(8)
    assert len(claimed) > 5
    await db.execute(
        "update graphile_worker._private_jobs set locked_by = null where id = $1", ids(claimed)[0]
    )
    outcomes: list[Outcome] = [Completed(), Failed(ValueError()), Returned()]
    results = [result_of(job, outcomes[place % 3]) for place, job in enumerate(claimed)]
    reply = await worker.exchange(results, 10, run_length=2, queues_first=True)
    assert reply.lost
    assert reply.claimed
    await worker.exchange([result_of(job) for job in reply.claimed], 5, forbidden_flags=["x"])

    inside = [plan for plan in plans if "_v3(" not in plan["Query Text"] and "_private_job" in str(plan)]
    assert len({plan["Query Text"] for plan in inside}) > 12, "the exchange has about 20 statements"
    whole = {
        (plan["Query Text"], node["Relation Name"], node["Node Type"])
        for plan in inside
        for node in nodes(plan["Plan"])
        if reads_a_whole_table(node)
    }
    assert not whole


@WHATEVER_STATISTICS
async def test_returning_thousands_of_jobs_takes_linear_time(
    db: asyncpg.Connection, worker: ExchangeWorker, statistics: str
) -> None:
    """Measured in CPU time of the server process, because other programs may use the machine."""
    await db.execute(statistics)
    backend = psutil.Process(worker.connection.get_server_pid())

    async def seconds_for(number: int) -> float:
        await db.execute(ADD_MANY, number)
        held = await worker.claim(number)
        assert len(held) == number
        before = backend.cpu_times()
        reply = await worker.exchange([result_of(job, Returned()) for job in held], 0)
        after = backend.cpu_times()
        assert not reply.busy
        assert await db.fetchval("select max(attempts) from graphile_worker._private_jobs") == 0
        await db.execute("delete from graphile_worker._private_jobs")
        return after.user + after.system - before.user - before.system

    few = max(await seconds_for(1000), 0.05)  # the clock has steps of 0.01 s
    assert await seconds_for(8000) < 8 * 4 * few, "64 times as long if quadratic"


@WHATEVER_STATISTICS
@pytest.mark.parametrize(
    ("tasks", "has_mark"), [(1, True), (4, False)], ids=["from a position", "of several tasks"]
)
async def test_claim_from_many_serial_queues_reads_few_jobs(
    db: asyncpg.Connection, worker: ExchangeWorker, statistics: str, tasks: int, has_mark: bool
) -> None:
    """A claim of tiny jobs takes many jobs of each queue, but need not read them of all queues."""
    await db.execute(statistics)
    worker.identifiers = tuple(f"task{number}" for number in range(tasks))
    await db.execute(ADD_QUEUED, 60, 6000, tasks)
    held = await worker.claim(60)
    assert len({job.queue.id for job in held if job.queue}) == 60
    await worker.claim(0)  # registers the tasks, which is not counted
    mark = Position(*min(job.order for job in held)) if has_mark else None

    async with worker.connection.transaction():
        before = await worker.connection.fetchval(ROWS_READ)
        reply = await worker.exchange([result_of(job) for job in held], 60, run_length=50, mark=mark)
        read = await worker.connection.fetchval(ROWS_READ) - before
    assert len(reply.claimed) == 60
    assert read < 60 * 25 * tasks, "60 queues with 50 jobs each are 3,000 for each task"
