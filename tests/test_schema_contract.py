"""Revision 20 equals the schema that npm's graphile-worker 0.18.0 installs, in every catalog row."""

from __future__ import annotations

import re

import asyncpg

from graphile_worker import run_migrations
from support import node

# Objects that this library adds to the schema of Graphile Worker.
PYTHON_OBJECTS = re.compile(
    r"(graphile_worker\.)?_{0,2}(private_python_|private_workers|worker_|list_stale_workers"
    r"|list_orphan_locked_workers|recover_dead_worker_jobs|delete_stale_workers)"
)
# The first or second column of each query names the object.
FACTS = {
    "schema": "select nspname, nspacl from pg_namespace where nspname = 'graphile_worker'",
    "relations": """
        select relname, relkind, relpersistence, relrowsecurity, relforcerowsecurity, relreplident,
          reloptions, relacl, relam, reltablespace, relowner::regrole::text, obj_description(oid, 'pg_class')
        from pg_class where relnamespace = 'graphile_worker'::regnamespace""",
    "columns": """
        select relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attidentity,
          attgenerated, attisdropped, attstorage, attcollation, attacl,
          pg_get_expr(adbin, adrelid)
        from pg_attribute join pg_class on pg_class.oid = attrelid
        left join pg_attrdef on adrelid = attrelid and adnum = attnum
        where relnamespace = 'graphile_worker'::regnamespace and attnum > 0""",
    "constraints": """
        select conrelid::regclass::text, conname, contype, condeferrable, condeferred, convalidated,
          coninhcount, connoinherit, conindid::regclass::text, pg_get_constraintdef(oid)
        from pg_constraint
        where connamespace = 'graphile_worker'::regnamespace""",
    "indexes": """
        select indrelid::regclass::text, indexrelid::regclass::text, indisunique, indisprimary, indisvalid,
          indisclustered, indisreplident, pg_get_indexdef(indexrelid)
        from pg_index join pg_class on pg_class.oid = indexrelid
        where relnamespace = 'graphile_worker'::regnamespace""",
    "sequences": """
        select relname, format_type(seqtypid, null), seqstart, seqincrement, seqmin, seqmax, seqcache,
          seqcycle, refobjid::regclass::text, refobjsubid, deptype
        from pg_sequence join pg_class on pg_class.oid = seqrelid
        left join pg_depend on objid = seqrelid and deptype in ('a', 'i')
        where relnamespace = 'graphile_worker'::regnamespace""",
    "types": """
        select typname, typtype, typcategory, typnotnull, typlen, format_type(typelem, null), typacl
        from pg_type where typnamespace = 'graphile_worker'::regnamespace""",
    "functions": """
        select proname, pg_get_function_identity_arguments(pg_proc.oid),
          pg_get_function_arguments(pg_proc.oid), pg_get_function_result(pg_proc.oid), lanname, prokind,
          provolatile, proisstrict, prosecdef, proleakproof, proparallel, procost, prorows, proretset,
          proacl, provariadic, obj_description(pg_proc.oid, 'pg_proc')
        from pg_proc join pg_language on pg_language.oid = prolang
        where pronamespace = 'graphile_worker'::regnamespace""",
    "view": """
        select distinct refobjid::regclass::text, attname
        from pg_rewrite join pg_depend on objid = pg_rewrite.oid
        join pg_attribute on attrelid = refobjid and attnum = refobjsubid
        where ev_class = 'graphile_worker.jobs'::regclass and refobjid <> ev_class""",
    "triggers, policies, rules and inheritance": """
        select tgname::text from pg_trigger join pg_class on pg_class.oid = tgrelid
        where relnamespace = 'graphile_worker'::regnamespace
        union all select polname::text from pg_policy join pg_class on pg_class.oid = polrelid
        where relnamespace = 'graphile_worker'::regnamespace
        union all select rulename::text from pg_rules
        where schemaname = 'graphile_worker' and rulename <> '_RETURN'
        union all select inhrelid::regclass::text from pg_inherits""",
    "migrations": "select id, breaking from graphile_worker.migrations",
}


async def read_facts(dsn: str) -> dict[str, list[str]]:
    connection = await asyncpg.connect(dsn)
    try:
        return {
            name: sorted(
                str(tuple(row))
                for row in await connection.fetch(query)
                if not any(PYTHON_OBJECTS.match(str(name)) for name in tuple(row)[:2])
            )
            for name, query in FACTS.items()
        }
    finally:
        await connection.close()


async def test_installed_schema_equals_the_schema_of_npm(empty_database: str, database: str) -> None:
    await node.install("0.18.0", empty_database)

    node_facts, python_facts = await read_facts(empty_database), await read_facts(database)

    assert python_facts == node_facts
    for name in (
        "relations",
        "columns",
        "constraints",
        "indexes",
        "sequences",
        "types",
        "functions",
    ):
        assert len(python_facts[name]) >= 3, f"the query for {name} returns too few rows to compare"
    assert len(python_facts["migrations"]) == 20


async def test_npm_has_nothing_to_migrate_in_a_python_schema(database: str) -> None:
    before = await read_facts(database)

    finished = await node.run("0.18.0", database, "--schema-only")

    assert finished == (0, "Schema updated\n")
    assert await read_facts(database) == before


async def test_python_migrations_leave_the_functions_of_npm_unchanged(empty_database: str) -> None:
    await node.install("0.18.0", empty_database)
    bodies = """select array_agg(proname || md5(prosrc) || coalesce(proconfig::text, '') order by proname)
        from pg_proc where pronamespace = 'graphile_worker'::regnamespace and proname = any (array[
          'add_job', 'add_jobs', 'remove_job', 'complete_jobs', 'permanently_fail_jobs', 'reschedule_jobs',
          'force_unlock_workers'])"""
    connection = await asyncpg.connect(empty_database)
    before = await connection.fetchval(bodies)

    await run_migrations(dsn=empty_database)

    assert await connection.fetchval(bodies) == before
    await connection.close()
