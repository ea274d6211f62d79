"""Small exchanges are plain statements. They keep the rules of the function, and leave the rest to it.

The rules that both share are in test_exchange.py. Here each guard is removed, and a promise breaks.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import pytest

from graphile_worker._db.connection.error_mapping import is_stale_session
from graphile_worker._db.queries import exchange as database, small_exchange as small_exchange_module
from graphile_worker._db.queries.exchange import AttemptRecord, ClaimRequest, ExchangeReply, Position, Result
from graphile_worker._db.queries.small_exchange import MOST_JOBS, is_small
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.outcome import Completed, Failed
from support.jobs import add, count, existing, get
from support.waiting import until_blocked
from support.workers import locked
from test_exchange import ExchangeWorker, claim_ids, ids, other, read_locked, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from graphile_worker._db.queries.exchange import ClaimedJob

__all__ = ["other"]

SCHEMA = Schema()
TOMORROW = timedelta(days=1)


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(
        database, server_settings={"search_path": "pg_catalog, pg_temp", "lock_timeout": "300"}
    )
    yield ExchangeWorker(connection, "worker", small=True)
    await connection.close()


async def exchange(
    worker: ExchangeWorker, held: Sequence[ClaimedJob] = (), wanted: int = 0, startable: int | None = None
) -> ExchangeReply:
    """Make a small exchange, without a call of the function after it."""
    tasks = await database.register_tasks(worker.connection, SCHEMA, worker.identifiers)
    request = ClaimRequest(wanted=wanted, startable=startable)
    return await worker.exchange_small([result_of(one) for one in held], request, tasks)


class TestWhatIsSmall:
    CLAIM = ClaimRequest(wanted=1, is_probably_filled=True)

    def result(self, outcome: Any = Completed(), **values: Any) -> Result:  # noqa: B008 - Completed has no state
        return Result(None, outcome, values.pop("queue", None), **values)  # type: ignore[arg-type]

    def test_completed_jobs_and_a_claim_that_is_probably_filled_are_small(self) -> None:
        assert is_small([self.result()], ClaimRequest())
        assert is_small([self.result()] * MOST_JOBS, self.CLAIM)
        assert is_small([], ClaimRequest(wanted=3, startable=2, is_probably_filled=True))

    @pytest.mark.parametrize(
        "values",
        [
            {"is_probably_filled": False},
            {"wanted": MOST_JOBS + 1},
            {"forbidden_flags": ["x"]},
            {"as_of": datetime.now(UTC)},
            {"mark": Position(0, datetime.now(UTC), 1)},
            {"left_out": [1]},
        ],
        ids=lambda values: next(reversed(values)),
    )
    def test_other_claims_are_made_by_the_function(self, values: dict[str, Any]) -> None:
        assert not is_small([], ClaimRequest(**{"wanted": 1, "is_probably_filled": True, **values}))

    def test_other_results_are_recorded_by_the_function(self) -> None:
        for result in (
            self.result(Failed(ValueError())),
            self.result(queue=object()),
            self.result(attempt=AttemptRecord(None, None)),
        ):
            assert not is_small([self.result(), result], self.CLAIM)
        assert not is_small([self.result()] * (MOST_JOBS + 1), self.CLAIM)


class TestClaiming:
    async def test_claim_of_all_wanted_jobs_needs_no_function(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db, priority=priority) for priority in (2, 1, 1)]
        await add(db, priority=9, queue_name="q")
        await add(db, priority=9, flags=["x"])
        reply = await exchange(worker, wanted=2)
        assert (ids(reply.claimed), reply.partial) == ([jobs[1]["id"], jobs[2]["id"]], False)
        reply = await exchange(worker, reply.claimed, 1)
        assert (ids(reply.claimed), reply.partial) == ([jobs[0]["id"]], False)
        assert await count(db) == 3

    async def test_empty_queue_needs_no_function(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, "other")
        reply = await exchange(worker, wanted=2)
        assert (reply.claimed, reply.partial, reply.contended, reply.next_queue) == ([], False, False, 0)

    async def test_jobs_of_several_tasks_are_claimed_as_far_as_one_task_is_next(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        worker.identifiers = ("x", "y")
        jobs = [await add(db, task) for task in "xxyx"]
        reply = await exchange(worker, wanted=3)
        assert (ids(reply.claimed), reply.partial) == ([job["id"] for job in jobs[:2]], True)
        reply = await exchange(worker, wanted=1)
        assert (ids(reply.claimed), reply.partial) == ([jobs[2]["id"]], False)

    async def test_claims_in_one_order_with_jobs_of_all_kinds(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        worker.identifiers = ("x", "y")
        kinds: list[dict[str, Any]] = [{}, {"flags": ["a"]}, {"queue_name": "q"}, {}, {}, {"flags": ["b"]}]
        jobs = [await add(db, "xy"[n % 2], priority=n % 3, **kind) for n, kind in enumerate(kinds * 2)]
        claimed: list[int] = []
        while batch := await worker.claim(1):
            claimed += ids(batch)
            await worker.exchange([result_of(held) for held in batch], 0)
        assert claimed == [job["id"] for priority in range(3) for job in jobs[priority::3]]

    async def test_job_in_its_last_attempt_is_claimed_only_to_start_at_once(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [(await add(db, max_attempts=attempts))["id"] for attempts in (1, 25, 1, 25)]
        reply = await exchange(worker, wanted=4, startable=1)
        assert (ids(reply.claimed), reply.withheld, reply.partial) == (jobs[:2], True, False)
        reply = await exchange(worker, wanted=2, startable=1)
        assert (ids(reply.claimed), reply.withheld) == (jobs[2:], False)

    async def test_several_workers_never_claim_a_job_twice(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        added = {(await add(db))["id"] for _ in range(120)}
        connections = [
            await asyncpg.connect(database, server_settings={"search_path": "pg_catalog, pg_temp"})
            for _ in range(3)
        ]

        async def drain(worker: ExchangeWorker) -> list[int]:
            claimed: list[int] = []
            results: list[Result] = []
            while await count(worker.connection):
                reply = await worker.exchange(results, 3)
                results = [one for one in results if one.held.claim in reply.busy]
                results += [result_of(held) for held in reply.claimed]
                claimed += ids(reply.claimed)
            return claimed

        workers = [ExchangeWorker(one, f"worker {n}", small=True) for n, one in enumerate(connections)]
        await exchange(workers[0])
        every = await asyncio.gather(*map(drain, workers))
        assert sorted(job for claimed in every for job in claimed) == sorted(added)
        for connection in connections:
            await connection.close()


async def test_exchanges_do_not_read_row_versions_of_heartbeats(
    db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
) -> None:
    """While an old transaction is open, each heartbeat leaves a version that nothing can remove."""
    await exchange(worker)
    await db.execute("insert into graphile_worker._private_workers values ('worker', now(), now(), '{}')")
    snapshot = other.transaction(isolation="repeatable_read")
    await snapshot.start()
    await other.fetchval("select 1 from graphile_worker._private_jobs")
    await db.execute("""do $$
      begin
        for n in 1 .. 2000 loop
          update graphile_worker._private_workers set last_heartbeat_at = clock_timestamp();
        end loop;
      end $$""")
    statement = statements_for(SCHEMA, "small_exchange.sql")["complete_and_claim"]
    function = statements_for(SCHEMA, "exchange.sql")["exchange"]
    rest = (None, None, 0, None, [1], 1, None, 1, False, *[None] * 5, 0, 1, False, *[None] * 11)
    for _ in range(2):  # The first call reads the catalog.
        plans = [
            await worker.connection.fetchval(f"explain (analyze, buffers, format json) {text}", *arguments)
            for text, arguments in (
                (statement, ("worker", 1, [], [], [1], 1, 1)),
                (function, ("worker", [], [], *rest)),
            )
        ]
    for plan in plans:
        top = json.loads(plan)[0]["Plan"]
        assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 30
    await snapshot.rollback()


async def test_lost_job_is_looked_up_by_its_id_although_statistics_say_that_there_are_no_jobs(
    db: asyncpg.Connection, worker: ExchangeWorker
) -> None:
    await exchange(worker)
    fill = """
        insert into graphile_worker._private_jobs (task_id, payload)
        select id, '{}' from graphile_worker._private_tasks, generate_series(1, 3000)"""
    await db.execute(fill)
    await db.execute("delete from graphile_worker._private_jobs where id < 3000")
    await db.execute("vacuum analyze graphile_worker._private_jobs")
    await db.execute(fill)
    statement = statements_for(SCHEMA, "small_exchange.sql")["complete"]
    lost = ([5, 6], [datetime.now(UTC)] * 2)
    for _ in range(2):  # The first call reads the catalog.
        text = await worker.connection.fetchval(
            f"explain (analyze, buffers, format json) {statement}", "worker", 1, *lost
        )
    top = json.loads(text)[0]["Plan"]
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 30


async def stale_session_changes_nothing(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    held = await add_and_claim(db, worker)
    pending = await add(db)
    await read_locked(worker, {})
    try:
        await exchange(worker, [held], 1)
    except Exception as error:
        if not is_stale_session(error):
            raise
    else:
        return False
    return await count(db) == 2 and (await existing(db, pending["id"]))["locked_by"] is None


async def new_session_waits_for_an_exchange(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await exchange(worker)
    async with worker.connection.transaction():
        await exchange(worker)
        try:
            await read_locked(ExchangeWorker(db, "worker"), {})
        except asyncpg.LockNotAvailableError:
            return True
    return False


async def exchange_never_waits_for_a_new_session(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await exchange(worker)
    await worker.connection.execute("set lock_timeout = 0; set statement_timeout = 1000")
    async with db.transaction():
        await db.execute("select from graphile_worker._private_python_sessions for update")
        try:
            await exchange(worker)
        except asyncpg.LockNotAvailableError:
            return True
        except asyncpg.QueryCanceledError:
            return False
    return False


async def add_and_claim(db: asyncpg.Connection, worker: ExchangeWorker, **options: Any) -> ClaimedJob:
    job = await add(db, **options)
    [held] = (await exchange(worker, wanted=1)).claimed
    assert held.job.id == job["id"]
    return held


async def result_of_another_workers_job_is_lost(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    held = await add_and_claim(db, worker)
    await db.execute("update graphile_worker._private_jobs set locked_by = 'other'")
    return claim_ids((await exchange(worker, [held])).lost) == {held.job.id} and await count(db) == 1


async def result_of_an_older_claim_is_lost(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    held = await add_and_claim(db, worker)
    await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
    [again] = (await exchange(worker, wanted=1)).claimed
    return claim_ids((await exchange(worker, [held])).lost) == {again.job.id} and await count(db) == 1


async def locked_result_is_busy(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    held = await add_and_claim(db, worker, job_key="k")
    async with db.transaction():
        await add(db, job_key="k")
        try:
            reply = await exchange(worker, [held])
        except asyncpg.LockNotAvailableError:
            return False
    return claim_ids(reply.busy) == {held.job.id} and reply.lost == set()


async def locked_job_is_skipped(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, job_key="k")
    second = await add(db)
    await exchange(worker)
    async with db.transaction():
        await add(db, job_key="k")
        try:
            return ids((await exchange(worker, wanted=1)).claimed) == [second["id"]]
        except asyncpg.LockNotAvailableError:
            return False


async def dead_worker_claims_nothing(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db)
    await db.execute("insert into graphile_worker._private_python_dead_workers values ('worker')")
    reply = await exchange(worker, wanted=1)
    return not reply.claimed and not reply.partial


async def job_waits_for_one_before_it(db: asyncpg.Connection, worker: ExchangeWorker, **first: Any) -> bool:
    await add(db, **first)
    await add(db)
    reply = await exchange(worker, wanted=1)
    return not reply.claimed and reply.partial


job_waits_for_one_with_flags = partial(job_waits_for_one_before_it, flags=["x"])
job_waits_for_one_with_a_queue = partial(job_waits_for_one_before_it, queue_name="q")


async def job_waits_for_one_of_another_task(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    worker.identifiers = ("x", "y")
    jobs = [await add(db, task) for task in "xyx"]
    return ids((await exchange(worker, wanted=2)).claimed) == [jobs[0]["id"]]


async def job_that_is_due_later_is_not_claimed(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, run_at=datetime.now(UTC) + TOMORROW)
    reply = await exchange(worker, wanted=1)
    return not reply.claimed and reply.partial


async def job_in_its_last_attempt_waits_for_a_slot(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for attempts in (25, 1):
        await add(db, max_attempts=attempts)
    return len((await exchange(worker, wanted=2, startable=1)).claimed) == 1


async def reply_tells_that_there_may_be_more(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db)
    await add(db, queue_name="q")
    reply = await exchange(worker, wanted=2)
    return len(reply.claimed) == 1 and reply.partial


Promise: TypeAlias = "Callable[[asyncpg.Connection, ExchangeWorker], Awaitable[bool]]"
_LOCKED = "job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = best.task_id"
_FENCE = "and job.locked_by = $1 and job.locked_at = given.locked_at\n    for update"
_VALID = "(select current_session.is_valid from current_session)"
_LOCK_RESULTS = "for update skip locked\n  ) as job\n  where ("
_LOCK_JOBS = "for update skip locked\n  ) as job\n  where best"
_SECOND = "or (job.run_at, job.id) < (best.second_run_at, best.second_id)"
GUARDS: dict[str, tuple[Promise, str, str]] = {
    "generation": (stale_session_changes_nothing, " and latest.generation = $2", " and $2::bigint > 0"),
    "results of a stale session": (
        stale_session_changes_nothing,
        f"where {_VALID}\n), deleted",
        "), deleted",
    ),
    "claim of a stale session": (stale_session_changes_nothing, f"where {_VALID} and not", "where not"),
    "lock of the session": (new_session_waits_for_an_exchange, "for share nowait", ""),
    "session without waiting": (exchange_never_waits_for_a_new_session, "for share nowait", "for share"),
    "fence by worker": (
        result_of_another_workers_job_is_lost,
        _FENCE,
        _FENCE.replace("job.locked_by = $1 and ", ""),
    ),
    "fence by time": (
        result_of_an_older_claim_is_lost,
        _FENCE,
        _FENCE.replace(" and job.locked_at = given.locked_at", ""),
    ),
    "results without waiting": (
        locked_result_is_busy,
        _LOCK_RESULTS,
        _LOCK_RESULTS.replace("skip locked", ""),
    ),
    "claim without waiting": (locked_job_is_skipped, _LOCK_JOBS, _LOCK_JOBS.replace("skip locked", "")),
    "dead worker": (dead_worker_claims_nothing, "where dead.worker_id = $1", "where false"),
    "flags first": (job_waits_for_one_with_flags, "and job.flags is not null", "and false"),
    "queue first": (job_waits_for_one_with_a_queue, "and job.job_queue_id is not null", "and false"),
    "other task first": (job_waits_for_one_of_another_task, _SECOND, "or true"),
    "due time": (job_that_is_due_later_is_not_claimed, "and job.run_at <= now()", ""),
    "last attempt": (job_in_its_last_attempt_waits_for_a_slot, "where not judged.stays", ""),
    "partial reply": (reply_tells_that_there_may_be_more, "then 'partial'", "then 'end'"),
}
CHANGES = {
    "claimed by another worker": (
        "update graphile_worker._private_jobs set locked_by = 'other', locked_at = now() where key = 'k'",
        ("job.is_available and ", ""),
    ),
    "in a queue": (
        "select graphile_worker.add_job('task', job_key => 'k', queue_name => 'q', run_at => '2020-01-01')",
        ("job.job_queue_id is null and ", ""),
    ),
    "with flags": (
        "select graphile_worker.add_job('task', job_key => 'k', flags => array['x'], run_at => '2020-01-01')",
        ("job.flags is null and ", ""),
    ),
    "of another task": (
        "select graphile_worker.add_job('other', job_key => 'k', run_at => '2020-01-01')",
        ("job.task_id = best.task_id", "(best.task_id > 0)"),
    ),
    "of a worse priority": (
        "select graphile_worker.add_job('task', job_key => 'k', priority => 9, run_at => '2020-01-01')",
        ("job.priority = best.priority", "job.priority >= best.priority"),
    ),
    "due tomorrow": (
        "select graphile_worker.add_job('task', job_key => 'k', run_at => now() + interval '1 day')",
        ("and job.run_at <= now()", ""),
    ),
}


def mutate(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """Replace a part of the statements that workers prepare from now on."""

    def mutated(schema: Schema, path: str) -> dict[str, str]:
        texts = statements_for(schema, path)
        assert texts["complete_and_claim"].count(before) == 1, "update the guards: the statement has changed"
        return {name: text.replace(before, after) for name, text in texts.items()}

    monkeypatch.setattr(small_exchange_module, "statements_for", mutated)


class TestGuards:
    """Each guard of the statements keeps a promise, which breaks without the guard."""

    @pytest.fixture(autouse=True)
    def _short_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database, "_LONGEST_WAIT", 0.3)

    @pytest.mark.parametrize("guard", GUARDS)
    async def test_promise_is_kept_and_breaks_without_its_guard(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
        monkeypatch: pytest.MonkeyPatch,
        guard: str,
    ) -> None:
        promise, before, after = GUARDS[guard]
        assert await promise(db, worker)
        await db.execute("""
            truncate graphile_worker._private_jobs, graphile_worker._private_job_queues,
              graphile_worker._private_python_dead_workers, graphile_worker._private_python_sessions
        """)
        await worker.connection.execute("reset lock_timeout; reset statement_timeout")
        mutate(monkeypatch, before, after)
        mutant = ExchangeWorker(worker.connection, "worker", small=True)
        assert not await promise(db, mutant)

    @pytest.mark.parametrize("mutated", [False, True], ids=["kept", "breaks without its guard"])
    @pytest.mark.parametrize("change", CHANGES)
    async def test_job_that_changed_after_the_snapshot_is_not_claimed(
        self,
        db: asyncpg.Connection,
        other: asyncpg.Connection,
        worker: ExchangeWorker,
        monkeypatch: pytest.MonkeyPatch,
        change: str,
        mutated: bool,
    ) -> None:
        statement, (before, after) = CHANGES[change]
        if mutated:
            locking = before if before not in _LOCKED else _LOCKED
            mutate(monkeypatch, locking, locking.replace(before, after))
        held = await add_and_claim(db, worker)
        job = await add(db, job_key="k")
        await db.execute("""
            create function pause() returns trigger language plpgsql as $$
            begin
              perform pg_advisory_xact_lock(1);
              return old;
            end $$;
            create trigger pause before delete on graphile_worker._private_jobs
              for each row execute procedure pause()
        """)
        await worker.connection.execute("set lock_timeout = 0")
        await other.execute("select pg_advisory_lock(1)")
        # It has its snapshot when it deletes, and then waits.
        pending = asyncio.create_task(exchange(worker, [held], 1))
        await until_blocked(db, worker.connection.get_server_pid())
        await db.execute(statement)
        await other.execute("select pg_advisory_unlock(1)")

        reply = await pending

        assert ids(reply.claimed) == ([job["id"]] if mutated else [])
        assert await get(db, held.job.id) is None
        if not mutated:
            assert reply.partial
            assert ("job", job["id"]) not in await locked(db) or change == "claimed by another worker"
