"""Errors in the trigger functions of users are reported as such, not as errors of the schema."""

from __future__ import annotations

import logging

import asyncpg
import pytest

from graphile_worker import DatabaseError, SchemaMissingError, WorkerUtils
from graphile_worker._db.connection.error_mapping import ErrorKind, classify_error, is_refusal
from graphile_worker._db.connection.user_functions import running_function
from graphile_worker.doctor import Level, examine
from support.workers import EventRecorder, nothing, running

AUDIT = """
    create table public.audit_log (job_id bigint);
    create function public.audit() returns trigger language plpgsql as $$
    begin
      insert into audit_log values (coalesce(new.id, old.id));
      return coalesce(new, old);
    end $$;
    create trigger audit before {event} on graphile_worker._private_jobs
      for each row execute procedure public.audit()
"""
FIX = "alter function public.audit() set search_path = public, pg_temp"
ADVICE = "alter function public.audit() set search_path = ..."


@pytest.mark.parametrize(
    ("context", "function"),
    [
        (None, None),
        ('SQL statement "select count(*)"', None),
        ("PL/pgSQL function graphile_worker._private_python_exchange_v4(text,bigint[]) line 3 at IF", None),
        ('SQL function "complete_jobs" statement 1', None),
        ("PL/pgSQL function inline_code_block line 5 at PERFORM", None),
        ('PL/pgSQL assignment "x := f(y)"\nPL/pgSQL function public.g() line 1 at assignment', "public.g()"),
        ("PL/pgSQL function audit() line 3 at SQL statement", "audit()"),
        ('PL/pgSQL function "My App"."Audit"() line 3 at RAISE', '"My App"."Audit"()'),
        ("PL/pgSQL-Funktion public.audit() Zeile 3 bei SQL-Anweisung", "public.audit()"),
        ("fonction PL/pgSQL public.audit(), ligne 3, à instruction SQL", "public.audit()"),
        ("PL/pgSQL関数public.audit()の3行目 - SQLステートメント", "public.audit()"),
        ('PL/Python function "audit"', "audit"),
        (
            (
                'SQL function "helper" during inlining\n'
                "PL/pgSQL function public.audit() line 3 at SQL statement\n"
                "PL/pgSQL function graphile_worker.add_jobs(graphile_worker.job_spec[],boolean) line 9"
            ),
            "helper",
        ),
    ],
)
def test_innermost_user_function_is_read_from_the_error_context(
    context: str | None, function: str | None
) -> None:
    assert running_function(context) == function


async def test_trigger_that_finds_no_table_is_not_reported_as_a_missing_schema(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute(AUDIT.format(event="insert"))
    async with WorkerUtils(database) as utils:
        with pytest.raises(DatabaseError) as raised:
            await utils.add_job("t")
        with pytest.raises(DatabaseError) as raised_on_own:
            async with db.transaction():
                await utils.add_job("t", connection=db)
        await db.execute(FIX)
        job = await utils.add_job("t")

    for error in (raised.value, raised_on_own.value):
        assert not isinstance(error, SchemaMissingError)
        assert 'Relation "audit_log" does not exist, in the function public.audit()' in str(error)
        assert ADVICE in str(error)
        assert "migrate" not in str(error)
    assert await db.fetchval("select job_id from audit_log") == job.id


@pytest.mark.parametrize("event", ["update", "delete"])
async def test_worker_names_the_trigger_function_that_finds_no_table(
    db: asyncpg.Connection, database: str, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = EventRecorder()
    async with WorkerUtils(database) as utils:
        await utils.add_job("t")
    await db.execute(AUDIT.format(event=event))
    async with running({"t": nothing}, database, recorder=recorder, poll_interval=0.05) as runner:
        await recorder.until("worker:getJob:error" if event == "update" else "job:success")
        while not caplog.records:
            await recorder.until("worker:getJob:start", recorder.counts["worker:getJob:start"] + 1)
        assert runner.health().state == "ready"
        await db.execute(FIX)
        await recorder.until("job:complete")

    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "in the function public.audit()" in warning
    assert ADVICE in warning


async def test_error_raised_by_a_user_function_is_a_refusal(db: asyncpg.Connection) -> None:
    await db.execute(
        "create function public.fail(code text) returns void language plpgsql as "
        "$$ begin raise exception 'failed' using errcode = code; end $$"
    )
    for code in ("42501", "3F000", "08001", "25006", "42P01", "23505", "P0001"):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await db.execute("select public.fail($1)", code)
        assert (classify_error(raised.value), is_refusal(raised.value)) == (ErrorKind.REFUSED, True), code
    for code in ("40001", "55P03", "53100", "57014"):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await db.execute("select public.fail($1)", code)
        assert not is_refusal(raised.value), code


async def test_session_terminated_inside_a_user_function_is_lost(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(
        "create function public.leave() returns void language plpgsql as "
        "$$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(9); end $$"
    )
    with pytest.raises(asyncpg.PostgresError) as raised:
        await connection.execute("select public.leave()")

    assert classify_error(raised.value) is ErrorKind.LOST
    assert not is_refusal(raised.value)


async def test_doctor_lists_triggers_that_depend_on_the_search_path(
    db: asyncpg.Connection, database: str
) -> None:
    async def level() -> Level:
        return {one.check: one async for one in examine(database)}["triggers"].level

    assert await level() is Level.OK
    await db.execute(AUDIT.format(event="insert"))
    await db.execute(
        "create trigger same before update on graphile_worker._private_jobs "
        "for each row execute procedure suppress_redundant_updates_trigger()"
    )

    found = {one.check: one async for one in examine(database)}["triggers"]

    assert found.level is Level.WARNING
    assert "audit on _private_jobs (public.audit())" in found.message
    assert "suppress" not in found.message
    assert ADVICE in str(found.advice)
    await db.execute("alter table graphile_worker._private_jobs disable trigger audit")
    assert await level() is Level.OK
    await db.execute("alter table graphile_worker._private_jobs enable trigger audit")
    assert await level() is Level.WARNING
    await db.execute(FIX)
    assert await level() is Level.OK
