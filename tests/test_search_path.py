"""No function, operator or type that another role creates in ``public`` runs with the rights of a worker."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import pytest

from graphile_worker import (
    App,
    DatabaseError,
    Fail,
    JobContext,
    JobSpec,
    Retry,
    SchemaError,
    Snooze,
    WorkerUtils,
    doctor,
    parse_crontab,
    run_migrations,
)
from graphile_worker._client.bulk import Change, JobFilter
from graphile_worker._db.queries import workers as database_workers
from graphile_worker._db.schema.databases import create_database, drop_database, dsn_of
from graphile_worker._db.sql_files import Schema, read_statements
from graphile_worker.testing import drain
from support import overloads
from support.jobs import AUTOCOMMITS
from support.waiting import until
from support.workers import EventRecorder, Gate, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from graphile_worker.testing import Databases

SAFE = {"search_path": "pg_catalog"}
CALLER_FILES = (
    "any_bytes.sql", "cancellations.sql", "cleanup.sql", "completion.sql", "databases.sql", "jobs.sql",
    "lent.sql", "migrate.sql", "session.sql",
)  # fmt: skip
CALLER_STATEMENTS = {
    "exchange.sql": ("register_tasks", "read_tasks", "exchange"),
    "workers.sql": ("keeps_heartbeats", "read_workers", "list_holders", "list_workers"),
    "cron.sql": ("list_schedules",),
    "progress.sql": ("reads_progress", "read_progress"),
    "statistics.sql": ("read_counts", "read_depths"),
}
"""Statements that may run on a caller's connection, or before a session has the worker's settings."""


class Trap(NamedTuple):
    """A database in which another role has planted overloads."""

    dsn: str
    planted: overloads.Planted

    async def called(self) -> str | None:
        """Return the overload that was called, or None."""
        db = await asyncpg.connect(self.dsn, server_settings=SAFE)
        try:
            return await overloads.called(db, self.planted)
        finally:
            await db.close()


async def learn_types(db: asyncpg.Connection) -> None:
    """Make asyncpg look up the types of the parameters, because its own lookup statements call overloads."""
    await db.execute("set search_path = pg_catalog")
    arrays = ("text", "timestamptz", "float4", "float8", "smallint", "integer", "bigint", "name")
    await db.prepare("select " + ", ".join(f"${place}::{one}[]" for place, one in enumerate(arrays, 1)))
    await db.execute("reset search_path")


async def connect(dsn: str) -> asyncpg.Connection:
    """Open a connection like a caller's."""
    db = await asyncpg.connect(dsn)
    await learn_types(db)
    return db


class Template(NamedTuple):
    name: str
    role: str
    planted: overloads.Planted


async def _plant(server: str, name: str, role: str) -> overloads.Planted:
    db = await asyncpg.connect(server)
    await create_database(db, name)
    await db.execute(f"create role {role}")
    await db.close()
    db = await asyncpg.connect(dsn_of(server, name), server_settings=SAFE)
    await db.execute(f"grant create, usage on schema public to {role}; set role {role}")
    planted = await overloads.plant(db, overloads.used())
    await db.close()
    return planted


async def _remove(server: str, name: str, role: str) -> None:
    db = await asyncpg.connect(server)
    await drop_database(db, name)
    await db.execute(f"drop role {role}")
    await db.close()


@pytest.fixture(scope="module")
def template(server: str, databases: Databases) -> Iterator[Template]:  # noqa: ARG001 - must be torn down after this fixture
    """A database with the overloads, which tests copy."""
    name, role = f"planted_{token_hex(4)}", f"mallory_{token_hex(4)}"
    planted = asyncio.run(_plant(server, name, role))
    yield Template(name, role, planted)
    asyncio.run(_remove(server, name, role))


@pytest.fixture(
    params=["public, pg_catalog", pytest.param('"$user", public', marks=pytest.mark.slow)],
    ids=["public-first", "default-path"],
)
async def trap(request: pytest.FixtureRequest, server: str, template: Template) -> AsyncIterator[Trap]:
    """A database with the overloads.

    If `public` comes first in the path, an exact copy of a system function is called too.
    """
    name = f"trap_{token_hex(4)}"
    db = await asyncpg.connect(server)
    await create_database(db, name, template=template.name)
    await db.execute(f"alter database {name} set search_path = {request.param}")
    yield Trap(dsn_of(server, name), template.planted)
    leaked = await drop_database(db, name)
    await db.close()
    assert not leaked


async def test_overloads_cover_every_function_and_operator_of_the_sql(
    template: Template, database: str
) -> None:
    names, planted = overloads.used(), template.planted
    db = await asyncpg.connect(database)
    own_names = await db.fetchval("""
        select array_agg(name) from (
          select proname::text from pg_proc where pronamespace = 'graphile_worker'::regnamespace
          union select relname::text from pg_class where relnamespace = 'graphile_worker'::regnamespace
        ) as own (name)""")
    await db.close()

    assert names.operators == planted.operators
    assert (
        names.calls - planted.functions - overloads.SYNTAX - overloads.BY_THE_DRIVER - {*own_names} == set()
    )
    assert len(planted.functions) > 60


async def test_unqualified_statement_calls_an_overload(trap: Trap) -> None:
    db = await asyncpg.connect(trap.dsn)
    with pytest.raises(asyncpg.RaiseError, match="planted"):
        await db.fetchval("select cardinality(array[1])")
    await db.close()

    assert "cardinality(integer[])" in str(await trap.called())


async def test_migrations_call_no_overload(trap: Trap) -> None:
    await run_migrations(dsn=trap.dsn)
    db = await connect(trap.dsn)
    async with WorkerUtils(trap.dsn, schema="second") as utils, db.transaction():
        assert (await utils.pending_migrations(connection=db)).what
        await utils.migrate(connection=db)
        assert await db.fetchval("show search_path") in {"public, pg_catalog", '"$user", public'}
    async with WorkerUtils(trap.dsn, schema="third") as utils:
        script = (await utils.pending_migrations()).script
    await db.execute(script)
    async with WorkerUtils(trap.dsn, schema="third") as utils:
        assert not (await utils.pending_migrations()).what
    await db.close()

    assert await trap.called() is None


async def test_functions_of_an_earlier_release_get_a_search_path(database: str, empty_database: str) -> None:
    await _reset_paths(database)
    await run_migrations(dsn=database)
    await run_migrations(dsn=empty_database)

    without = """select array_agg(proname::text) from pg_proc where proconfig is null
        and pronamespace = 'graphile_worker'::regnamespace"""
    for dsn in (database, empty_database):
        db = await asyncpg.connect(dsn)
        assert await db.fetchval(without) is None
        await db.close()


async def _reset_paths(dsn: str) -> None:
    """Turn the schema into one that an earlier release installed."""
    db = await asyncpg.connect(dsn)
    for name in await db.fetch("""select oid::regprocedure::text as name from pg_proc
            where pronamespace = 'graphile_worker'::regnamespace and proname not like '%exchange%'"""):
        await db.execute(f"alter function {name['name']} reset all")
    await db.execute("delete from graphile_worker._private_python_migrations where id >= 6")
    await db.close()


@AUTOCOMMITS
async def test_adding_and_administering_call_no_overload(trap: Trap) -> None:
    await run_migrations(dsn=trap.dsn)
    caller = await connect(trap.dsn)
    async with asyncpg.create_pool(trap.dsn, min_size=1, max_size=2, init=learn_types) as pool:
        await _administer(WorkerUtils(trap.dsn), {})
        await _administer(WorkerUtils(trap.dsn, prepared_statements=False), {})
        await _administer(WorkerUtils(pool=pool), {})
        await _administer(WorkerUtils(trap.dsn), {"connection": caller})
        async with caller.transaction():
            await _administer(WorkerUtils(trap.dsn), {"connection": caller})
        assert await pool.fetchval("show search_path") == await caller.fetchval("show search_path")
    await caller.close()

    assert await trap.called() is None


async def _administer(utils: WorkerUtils, on: dict[str, Any]) -> None:
    async with utils:
        await utils.add_job("t", {"n": 1}, run_at=timedelta(hours=1), flags=["f"], queue_name="q", **on)
        await utils.add_job("t", [1], job_key="k", priority=3, max_attempts=2, **on)
        await utils.add_job("t", [2], job_key="k", **on)
        await utils.add_job("t", job_key="k", job_key_mode="unsafe_dedupe", **on)
        await utils.add_job("t", job_key="k", job_key_mode="preserve_run_at", run_at=datetime.now(UTC), **on)
        specs = [JobSpec("t", n, job_key=f"k{n}", queue_name="q", run_at=timedelta(1)) for n in range(5)]
        jobs = await utils.add_jobs([*specs, JobSpec("u", flags=["f"])], **on)
        ids = [job.id for job in jobs]
        for filters in (
            {"task": "t"}, {"queue_name": "q"}, {"key": "k"}, {"locked_by": "w"}, {"search": "n"},
            {"after_id": 1}, {"state": "ready"}, {"state": "scheduled"}, {"state": "running"},
            {"state": "failed"},
        ):  # fmt: skip
            await utils.list_jobs(**filters, **on)
        assert await utils.get_job(id=ids[0], **on)
        assert await utils.get_job(key="k", **on)
        assert (await utils.stats(**on)).total
        await utils.reschedule_jobs(ids[:2], run_at=timedelta(hours=2), priority=1, **on)
        await utils.permanently_fail_jobs(ids[:1], "why", **on)
        await utils.complete_jobs(ids[1:2], **on)
        await utils.cancel_job(ids[2], "why", **on)
        await utils.remove_job("k3", **on)
        await utils.force_unlock_workers(["w"], **on)
        await utils.workers(**on)
        await utils.workers(include_locks=False, **on)
        await utils.known_crontabs(**on)
        everything = ["DELETE_PERMAFAILED_JOBS", "GC_TASK_IDENTIFIERS", "GC_JOB_QUEUES"]
        await utils.cleanup(everything, **on)


async def test_sql_functions_on_any_connection_call_no_overload(trap: Trap) -> None:
    await run_migrations(dsn=trap.dsn)
    db = await connect(trap.dsn)
    add = "select id from graphile_worker.add_job('t', '[1]', 'q', job_key => 'k', flags => array['f'])"
    first = await db.fetchval(add)
    await db.fetchval(add)
    await db.fetchval(
        "select id from graphile_worker.add_job('t', job_key => 'k', job_key_mode => 'unsafe_dedupe')"
    )
    await db.fetch("""select id from graphile_worker.add_jobs(array[
        ('a', '{}', 'q', null, null, 'k', null, array['f']), ('b', null, null, null, null, null, null, null)
    ]::graphile_worker.job_spec[], true)""")
    ids = [await db.fetchval("select id from graphile_worker.add_job('t')") for _ in range(3)]
    await db.fetch("select id from graphile_worker.reschedule_jobs($1, priority => 1)", ids)
    await db.fetch("select id from graphile_worker.permanently_fail_jobs($1)", ids[:1])
    await db.fetch("select id from graphile_worker.complete_jobs($1)", ids[1:])
    await db.fetch("select id from graphile_worker.remove_job('k')")
    await db.execute("select graphile_worker.force_unlock_workers(array['w'])")
    await db.execute("select graphile_worker.worker_heartbeat('w', '{}')")
    for function in ("list_stale_workers", "list_orphan_locked_workers"):
        await db.fetch(f"select worker_id from graphile_worker.{function}(interval '1 hour')")
    await db.execute("select graphile_worker.recover_dead_worker_jobs(array['w'])")
    await db.execute("select graphile_worker.delete_stale_workers(array['w'])")
    await db.execute("select graphile_worker.worker_deregister('w')")
    await db.close()

    assert first is not None
    assert await trap.called() is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("prepared_statements", [True, False], ids=["session", "transactions"])
async def test_worker_calls_no_overload(trap: Trap, *, prepared_statements: bool) -> None:
    recorder, gate, caller = EventRecorder(), Gate(), await connect(trap.dsn)

    async def task(payload: Any, ctx: JobContext) -> None:
        if payload == "again" and ctx.job.attempts == 1:
            raise Retry(after=0)
        if payload == "later" and ctx.job.attempts == 1 and ctx.job.revision == 0:
            raise Snooze(timedelta(hours=1))
        if payload == "never":
            raise Fail("no")
        if payload == "broken":
            raise ValueError("broken")
        if payload == "transaction":
            async with ctx.transaction():
                pass
        if payload == "caller":
            async with caller.transaction():
                await ctx.complete(connection=caller)

    items = parse_crontab("* * * * * t ?fill=5m&jobKey=c")
    async with running(
        {"t": task, "gate": gate}, trap.dsn, recorder=recorder, concurrency=3, prefetch=2, cron_items=items,
        forbidden_flags=["no"], prepared_statements=prepared_statements, poll_interval=0.1,
    ) as runner:  # fmt: skip
        utils = runner.utils
        for payload in ("again", "later", "never", "broken", "fine", "transaction", "caller"):
            await utils.add_job("t", payload)
        await utils.add_jobs(JobSpec("t", n, queue_name=f"q{n % 3}", priority=n % 2) for n in range(40))
        await utils.add_job("t", "x", flags=["no"])
        blocked = await utils.add_job("gate", "x", job_key="g")
        await gate.until_started()
        await utils.cancel_job(blocked.id)
        await recorder.until("job:complete", 47)
        await until(lambda: _is_cancelled(gate), "the job is cancelled")
    await caller.close()
    async with WorkerUtils(trap.dsn) as utils:
        assert {job.payload for job in await utils.list_jobs()} == {"later", "never", "broken", "x"}

    assert await trap.called() is None


async def _is_cancelled(gate: Gate) -> bool:
    return bool(gate.cancelled)


async def test_recovery_cleanup_and_operations_call_no_overload(trap: Trap) -> None:
    await run_migrations(dsn=trap.dsn)
    schema = Schema()
    async with WorkerUtils(trap.dsn) as utils:
        pool = utils._session.pool
        async with pool.connection() as on:
            met = await database_workers.identify_server(on, schema)
            lease = {"seconds": 38, "fast": 8, "tasks": {}, "epoch": met.epoch}
            await database_workers.register(on, schema, "dead", {"lease": lease})
            await database_workers.record_heartbeat(on, schema, "dead", {"state": "x"})
            [beat] = await database_workers.read_heartbeats(on, schema)
            assert await database_workers.find_lost_sessions(on, schema, ["dead"]) == {"dead"}
        job = await utils.add_job("t", 1, queue_name="q")
        async with pool.connection() as on:
            await on.execute("update graphile_worker._private_jobs set locked_by = 'dead', locked_at = now()")
            await on.execute(
                "update graphile_worker._private_job_queues set locked_by = 'dead', locked_at = now()"
            )
            suspect = database_workers.Suspect("dead", beat.beat, 40.0)
            assert await database_workers.claim_dead_workers(on, schema, [suspect], "me", all_dead=True) == [
                "dead"
            ]
            await database_workers.unlock_stale(on, schema)
        [recovered] = await utils.sweep()
        assert recovered.worker.id == "dead"
        await _operate(utils)
        assert job.id
    found = [finding async for finding in doctor.examine(trap.dsn)]
    assert not [one for one in found if one.level is doctor.Level.ERROR]

    assert await trap.called() is None


async def _operate(utils: WorkerUtils) -> None:
    """Run the statements of the bulk commands and of `top`."""
    many = utils.many
    jobs = await utils.add_jobs(JobSpec("t", n, job_key=f"k{n}") for n in range(5))
    await many.check_rows_visible()
    for change in (Change.fail("x"), Change.retry(), Change.reschedule(priority=1), Change.cancel("x")):
        assert await many.count(JobFilter(task="t"), change) is not None
        async for _ in many.change(change, JobFilter(task="t")):
            pass
    await many.read_unchanged([jobs[0].id])
    lines = [line async for page in many.export(JobFilter()) for line in page]
    async for _ in many.change(Change.complete(), JobFilter()):
        pass
    async for _ in many.import_lines(lines, new_ids=False):
        pass
    async for _ in many.import_lines([_without_key(line) for line in lines], new_ids=True):
        pass
    await many.queues(["q"], only_locked=True, limit=3)
    await many.failures()
    await many.writes()
    await many.running()
    async for _ in many.change(Change.remove("k1"), [jobs[1].id]):
        pass


def _without_key(line: bytes) -> bytes:
    return json.dumps({**json.loads(line), "key": None}).encode()


@AUTOCOMMITS
async def test_testing_helpers_call_no_overload(trap: Trap) -> None:
    await run_migrations(dsn=trap.dsn)
    app, ran = App(trap.dsn), []

    @app.task
    async def hello(n: int) -> None:
        ran.append(n)
        if n == 2:
            raise Snooze(timedelta(hours=1))

    db = await connect(trap.dsn)
    async with db.transaction():
        await hello.using(connection=db).enqueue(n=1)
        await hello.using(connection=db, queue_name="q").enqueue(n=2)
        await drain(app, connection=db)
    await hello.using(connection=db).enqueue(n=3)
    await drain(app, connection=db)
    await db.close()
    await app.close()

    assert ran == [1, 2, 3]
    assert await trap.called() is None


async def test_user_code_keeps_its_own_search_path(database: str) -> None:
    db = await asyncpg.connect(database)
    await db.execute("create schema mine")
    name = await db.fetchval("select current_database()")
    await db.execute(f'alter database "{name}" set search_path = mine, public')
    await db.close()
    seen: list[object] = []

    async def task(_payload: object, ctx: JobContext) -> None:
        async with ctx.connection() as connection:
            seen.append(await connection.fetchval("show search_path"))

    async with asyncpg.create_pool(database, min_size=1, max_size=6) as pool:
        for options in ({"dsn": database}, {"dsn": None, "pool": pool}):
            recorder = EventRecorder()
            async with running({"t": task}, recorder=recorder, **options) as runner:
                for _ in range(3):
                    await runner.add_job("t")
                await recorder.until("job:complete", 3)
                async with runner.utils.connection() as lent:
                    seen.append(await lent.fetchval("show search_path"))
                async with runner.utils._session.pool.connection() as own:
                    assert await own.fetchval("show search_path") == "pg_catalog, pg_temp"

    assert set(seen) == {"mine, public"}


async def test_error_of_a_trigger_that_relies_on_the_search_path_explains_the_fix(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute("""
        create table audit (id bigint);
        create function audit() returns trigger language plpgsql as
          'begin insert into audit values (new.id); return null; end';
        create trigger audit after insert on graphile_worker._private_jobs
          for each row execute function audit()""")
    async with WorkerUtils(database) as utils:
        with pytest.raises(DatabaseError, match=r'"audit" does not exist.*qualify') as raised:
            await utils.add_job("t")
        assert not isinstance(raised.value, SchemaError)
        await db.execute("alter function audit set search_path = public")
        job = await utils.add_job("t")
    assert await db.fetchval("select id from audit") == job.id


# PostgreSQL looks up a type whose name is not a keyword. Another role could create a domain of that name.
_BARE_TYPE = re.compile(r"::(?!pg_catalog\.|bigint|integer|smallint|boolean|double precision|\{schema\})\w+")
_CALL = re.compile(r"(?<![.\w])(\w+)\s*\(")
_LOOKED_UP = re.compile(r"\b(nullif|distinct from|like|ilike|between|in \()")


def _caller_texts() -> Iterator[tuple[str, str]]:
    for file in CALLER_FILES:
        yield from ((f"{file}: {name}", text) for name, text in read_statements(file).items())
    for file, names in CALLER_STATEMENTS.items():
        yield from ((f"{file}: {name}", read_statements(file)[name]) for name in names)


async def test_statements_on_callers_connections_qualify_every_name(database: str) -> None:
    db = await asyncpg.connect(database)
    functions = set(await db.fetchval("select array_agg(distinct proname::text) from pg_proc"))
    await db.close()
    unqualified = []
    for where, text in _caller_texts():
        bare = re.sub(r"--[^\n]*|'(?:[^']|'')*'|\boperator\(pg_catalog\.\S+?\)", ";", text)
        if "create table" in bare or bare.strip("; \n").startswith(("set ", "alter", "lock", "drop")):
            continue  # No names, or run after the path is set.
        bare = re.sub(
            r"\bset\b.*?(?=\b(where|from|returning)\b|\Z)", "", bare, flags=re.DOTALL
        )  # assignments
        bare = re.sub(r"\bunnest\(\s*[^()]*,[^()]*\)", "", bare)  # Syntax, if it has several arrays.
        bare = re.sub(r"\bposition\([^()]*\)", "", bare)  # Syntax too.
        bare = re.sub(r"\*(?=\)|,|\s+from)", "", bare)
        unqualified += [f"{where}: {call}" for call in _CALL.findall(bare) if call in functions - {"extract"}]
        unqualified += [f"{where}: {found}" for found in _BARE_TYPE.findall(bare) + _LOOKED_UP.findall(bare)]
        unqualified += [f"{where}: {operator}" for operator in overloads.used_in(bare).operators]
    assert not unqualified, unqualified
