"""The SQL functions have the same effects as Node's: rows, errors, notifications and ids, step by step.

Every scenario runs on a schema installed by npm's version 0.18.0 and on one installed by Python. Only the
differences in `ALLOWED` are allowed, and an allowed difference that no longer occurs is a failure. `FAULTS`
are mistakes inserted into the SQL scripts; the comparison must find each of them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from graphile_worker._db.schema.migrate import inspect_schema
from graphile_worker._db.schema.steps import steps
from graphile_worker._db.sql_files import Schema
from support import node
from support.side_by_side import Difference, Record, Scenario, Side, compare, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphile_worker.testing import Databases

    Spec = Mapping[str, object]


def add_job(arguments: str) -> str:
    return f"select * from gw.add_job({arguments})"


def add_jobs(*specs: Spec | None, more: str = "") -> str:
    """Return a call of add_jobs. A payload is passed as JSON text, so that its exact text arrives."""
    rows = []
    for spec in specs:
        fields = (
            "identifier",
            "payload",
            "queue_name",
            "run_at",
            "max_attempts",
            "job_key",
            "priority",
            "flags",
        )
        values = [_literal(spec.get(name)) for name in fields] if spec is not None else []
        rows.append(f"row({', '.join(values)})::gw.job_spec" if values else "null::gw.job_spec")
    return f"select * from gw.add_jobs(array[{', '.join(rows)}]::gw.job_spec[]{more})"


def _literal(value: object) -> str:
    if isinstance(value, list):
        return f"array[{', '.join(map(_literal, value))}]::text[]"
    return "null" if value is None else str(value) if isinstance(value, int) else f"'{value}'"


def alone(*calls: str) -> list[Scenario]:
    """Return a scenario for each call, on an empty queue."""
    return [Scenario(call, (call,)) for call in calls]


# A worker's changes to the job with the key k, as SQL.
CLAIM = """with job as (
    update gw._private_jobs set locked_by = 'w', attempts = attempts + 1, locked_at = now() - interval '{age}'
    where key = 'k' returning job_queue_id, locked_at)
  update gw._private_job_queues as queue set locked_by = 'w', locked_at = job.locked_at
  from job where queue.id = job.job_queue_id"""
STATES = {
    "new": (),
    "waiting for a retry": (
        """update gw._private_jobs set attempts = 2, last_error = 'oops', run_at = now() + interval '20 s'
        where key = 'k'""",
    ),
    "failed for good": ("update gw._private_jobs set attempts = 3, last_error = 'oops' where key = 'k'",),
    "beyond its attempts": ("update gw._private_jobs set attempts = 5 where key = 'k'",),
    "running": (CLAIM.format(age="0"),),
    "running for the last time": (
        "update gw._private_jobs set attempts = 2 where key = 'k'",
        CLAIM.format(age="1 minute"),
    ),
    "locked for almost 4 hours": (CLAIM.format(age="3 hours 59 minutes"),),
    "locked for more than 4 hours": (CLAIM.format(age="4 hours 1 minute"),),
}
OLD = add_job("""'t', '{"old": 1}', 'q', '2030-01-01 00:00Z', 3, 'k', 5, '{f}'""")
MODES = ("'replace'", "'preserve_run_at'", "'unsafe_dedupe'", "null", "'nonsense'")

ARGUMENTS = alone(
    *map(
        add_job,
        (
            "'t'",
            "identifier => 't'",
            "'t', '[1]', 'q', '2030-01-01 00:00Z', 3, 'k', 5, '{f,g}', 'preserve_run_at'",
            """flags => '{f}', priority => -1, job_key => 'k', max_attempts => 2,
            run_at => now() + interval '1 h', queue_name => 'q', payload => '"p"', identifier => 't'""",
            "",
            "null",
            "''",
            "repeat('i', 128)",
            "repeat('é', 128)",
            "repeat('i', 129)",
            "'t', null",
            "'t', 'null'",
            "'t', '3.10'",
            "'t', '\"text\"'",
            "'t', '[]'",
            """'t', ' { "b" : 1, "a": 2, "a": 3 } '""",
            r"""'t', '"\u0000"'""",
            "'t', '{'",
            "'t', queue_name => null",
            "'t', queue_name => ''",
            "'t', queue_name => repeat('q', 128)",
            "'t', queue_name => repeat('q', 129)",
            "'t', run_at => null",
            "'t', run_at => now()",
            "'t', run_at => now() - interval '1 hour'",
            "'t', run_at => 'infinity'",
            "'t', run_at => '-infinity'",
            "'t', run_at => '2020-01-01 00:00Z'",
            "'t', max_attempts => null",
            "'t', max_attempts => 1",
            "'t', max_attempts => 32767",
            "'t', max_attempts => 0",
            "'t', max_attempts => -1",
            "'t', max_attempts => 32768",
            "'t', max_attempts => -32769",
            "'t', job_key => null",
            "'t', job_key => ''",
            "'t', job_key => repeat('k', 512)",
            "'t', job_key => repeat('k', 513)",
            "'t', priority => null",
            "'t', priority => 32767",
            "'t', priority => -32768",
            "'t', priority => 32768",
            "'t', priority => -32769",
            "'t', priority => 2147483647",
            "'t', priority => 2147483648",
            "'t', flags => null",
            "'t', flags => '{}'",
            "'t', flags => '{f}'",
            "'t', flags => '{g,f,g}'",
            "'t', flags => '{\"\"}'",
            "'t', flags => '{{f,g},{h,i}}'",
            "'t', flags => '{f,null}'",
            "'t', flags => '{null}'",
            *(f"'t', job_key_mode => {mode}" for mode in MODES),
            *(f"'t', job_key => 'k', job_key_mode => {mode}" for mode in (*MODES, "''", "'REPLACE'")),
        ),
    )
)
# Only one of two errors is reported, and it depends on the error which sequences have advanced by then.
WRONG = {
    "identifier": ("null", "repeat('i', 129)"),
    "queue_name": ("repeat('q', 129)",),
    "job_key": ("''", "repeat('k', 513)"),
    "priority": ("32768",),
    "max_attempts": ("0", "32768"),
    "flags": ("'{null}'",),
    "job_key_mode": ("'nonsense'",),
}
TWO_ERRORS = alone(
    *(
        add_job(
            ", ".join(
                f"{name} => {value}"
                for name, value in {"identifier": "'t'", "job_key": "'k'", first: left, second: right}.items()
            )
        )
        for (first, lefts), (second, rights) in itertools.combinations(WRONG.items(), 2)
        for left, right in itertools.product(lefts, rights)
    ),
    *(
        add_job(
            ", ".join(
                f"{name} => {value}"
                for name, value in {
                    "identifier": "'t'",
                    "job_key": "'k'",
                    "job_key_mode": "'unsafe_dedupe'",
                    wrong: value,
                }.items()
            )
        )
        for wrong, values in WRONG.items()
        for value in values
    ),
)
TAKEN_KEYS = [
    Scenario(
        f"a job {state}, then {mode}: {call}",
        (OLD, *changes, call, call, "select * from gw.remove_job('k')"),
    )
    for state, changes in STATES.items()
    for mode in MODES[:4]
    for call in (
        add_job(f"'t', job_key => 'k', job_key_mode => {mode}"),
        add_job(f"'u', '[2]', 'r', '2031-01-01 00:00Z', 7, 'k', -5, '{{g,h}}', {mode}"),
    )
]
PAYLOADS = (
    "null",
    "'{}'",
    "'null'",
    "'[]'",
    "'[1, 3.10]'",
    """'[{"b": 1, "a": 2, "a": 3}]'""",
    r"""'["\u0000"]'""",
)
MERGING = [
    Scenario(
        f"payload {old}, then {new} ({mode})",
        (
            add_job(f"'t', {old}, job_key => 'k'"),
            add_job(f"'t', {new}, job_key => 'k', job_key_mode => '{mode}'"),
        ),
    )
    for old, new in itertools.product(PAYLOADS, PAYLOADS)
    for mode in ("replace", "preserve_run_at")
]
SPECS: list[Spec | None] = [
    {"identifier": "t"},
    None,
    {"identifier": None},
    {"identifier": ""},
    {"identifier": "i" * 128},
    {"identifier": "i" * 129},
    *(
        {"identifier": "t", "payload": value}
        for value in ("null", "[]", ' {"b": 1,  "a": 2, "a": 3} ', '"p"')
    ),
    *({"identifier": "t", "queue_name": value} for value in ("", "q", "q" * 128, "q" * 129)),
    *({"identifier": "t", "run_at": value} for value in ("infinity", "-infinity", "2030-01-01 00:00Z")),
    *({"identifier": "t", "max_attempts": value} for value in (1, 32767, 0, -1, 32768)),
    *({"identifier": "t", "job_key": value} for value in ("", "k", "k" * 512, "k" * 513)),
    *({"identifier": "t", "priority": value} for value in (-32768, 32767, 32768)),
    *({"identifier": "t", "flags": value} for value in ([], ["f"], ["g", "f", "g"], ["f", None], [""])),
]
EVERYTHING: Spec = {
    "identifier": "u",
    "payload": "[2]",
    "queue_name": "r",
    "run_at": "2031-01-01 00:00Z",
    "max_attempts": 7,
    "job_key": "k",
    "priority": -5,
    "flags": ["g", "h"],
}
ONE_SPEC = [
    *alone(
        "select * from gw.add_jobs('{}')",
        "select * from gw.add_jobs(null)",
        "select * from gw.add_jobs('{}', true)",
        "select * from gw.add_jobs()",
        *(add_jobs(spec) for spec in SPECS),
        *(
            add_jobs({"identifier": "t", "job_key": "k"}, more=f", {flag}")
            for flag in ("true", "false", "null")
        ),
        add_jobs(EVERYTHING, more=", job_key_preserve_run_at => true"),
    ),
    *(
        Scenario(f"a job {state}, then add_jobs {spec} {flag}", (OLD, *changes, call, call))
        for state, changes in STATES.items()
        for flag in ("false", "true", "null")
        for spec in ({"identifier": "t", "job_key": "k"}, EVERYTHING)
        for call in [add_jobs(spec, more=f", {flag}")]
    ),
]


def numbered(*specs: Spec) -> list[Spec]:
    """Return the specs, each with its position as its payload."""
    return [{"identifier": "t", "payload": str(n), **spec} for n, spec in enumerate(specs)]


SEVERAL_SPECS = [
    Scenario(name, tuple(steps), any_order=True)
    for name, *steps in (
        ("alike", add_jobs(*numbered({}, {}, {}))),
        ("two in one", add_jobs(*numbered({}, {})), add_jobs(*numbered({}, {}))),
        ("of several tasks", add_jobs(*numbered(*({"identifier": name} for name in "cabca")))),
        ("of several queues", add_jobs(*numbered(*({"queue_name": name} for name in ("q", None, "p", "q"))))),
        ("with keys and without", add_jobs(*numbered({"job_key": "b"}, {}, {"job_key": "a"}, {}))),
        (
            "all options",
            add_jobs(
                *numbered(
                    {"identifier": "c", "queue_name": "q", "priority": 3, "flags": ["f"]},
                    {"identifier": "a", "run_at": "2030-01-01 00:00Z", "max_attempts": 2},
                    {"identifier": "b", "queue_name": "p", "job_key": "k", "flags": []},
                    {"identifier": "a", "queue_name": "q"},
                )
            ),
        ),
        ("one key twice", add_jobs(*numbered({"job_key": "k"}, {}, {"job_key": "k"}))),
        ("one key twice that a job has", OLD, add_jobs(*numbered({"job_key": "k"}, {"job_key": "k"}))),
        *(
            (
                f"one key twice that a job {state} has",
                OLD,
                *changes,
                add_jobs(*numbered({"job_key": "k"}, {"job_key": "k"})),
            )
            for state, changes in STATES.items()
        ),
        *(
            (
                f"a job {state}, and others",
                OLD,
                *changes,
                add_jobs(
                    *numbered({"identifier": "u"}, {"job_key": "k"}, {"job_key": "j"}), more=f", {flag}"
                ),
            )
            for state, changes in STATES.items()
            for flag in ("false", "true")
        ),
        ("a null among others", add_jobs({"identifier": "t"}, None)),
        ("an error among others", add_jobs(*numbered({}, {"max_attempts": 0}, {}))),
        (
            "in two dimensions",
            add_jobs(*numbered({}, {}, {}, {})).replace("::gw.job_spec, row", "::gw.job_spec], [row", 1),
        ),
        (
            "from the fifth on",
            """select * from gw.add_jobs('[5:6]={"(t,0,,,,,,)","(t,1,,,,k,,)"}')""",
            """select * from gw.add_jobs('[-1:0]={"(t,0,,,,,,)","(t,1,,,,k,,)"}')""",
        ),
    )
]
REMOVING = [
    *alone(
        "select * from gw.remove_job(null)", "select * from gw.remove_job('k')", "select gw.remove_job('')"
    ),
    *(
        Scenario(
            f"remove a job {state}",
            (OLD, *changes, "select * from gw.remove_job('k')", "select * from gw.remove_job('k')"),
        )
        for state, changes in STATES.items()
    ),
]
# One job in each of the states, with the ids from 1 to 8.
ONE_OF_EACH = (
    """select gw.add_job('t', '{"old": 1}', 'q', '2030-01-01 00:00Z', 3, 'k' || n, 5, '{f}')
    from generate_series(1, 8) as n""",
    """update gw._private_jobs set attempts = (array[0, 2, 3, 5, 1, 3, 1, 1])[id],
      last_error = (array[null, 'oops', 'oops'])[id], locked_by = case when id > 4 then 'w' || id % 2 end,
      locked_at = now() - (array['0', '1 min', '3 hours 59 min', '4 hours 1 min'])[id - 4]::interval""",
    "update gw._private_job_queues set locked_by = 'w1', locked_at = now()",
)
ALL_IDS = "array[3, 1, 1, 2, 4, 5, 6, 7, 8, 99, null]"
ADMINISTERING = [
    Scenario(call, (*ONE_OF_EACH, call, call))
    for call in (
        *(
            f"select * from gw.{function}({ids}) order by id"
            for function in ("complete_jobs", "permanently_fail_jobs", "reschedule_jobs")
            for ids in (ALL_IDS, "null", "'{}'", "'{99}'", "'{{1,2},{3,4}}'")
        ),
        f"select * from gw.permanently_fail_jobs({ALL_IDS}, null) order by id",
        f"select * from gw.permanently_fail_jobs({ALL_IDS}, 'reason') order by id",
        f"select * from gw.permanently_fail_jobs({ALL_IDS}, error_message => '') order by id",
        f"select * from gw.reschedule_jobs({ALL_IDS}, '2032-01-01 00:00Z', -7, 0, 9) order by id",
        f"select * from gw.reschedule_jobs({ALL_IDS}, null, null, null, null) order by id",
        *(
            f"select * from gw.reschedule_jobs({ALL_IDS}, {name} => {value}) order by id"
            for name, values in {
                "run_at": ("now()", "'infinity'", "'-infinity'"),
                "priority": ("0", "32767", "-32768", "32768"),
                "attempts": ("0", "-1", "25", "32767", "32768"),
                "max_attempts": ("1", "32767", "0", "-1", "32768"),
            }.items()
            for value in values
        ),
        *(
            f"select gw.force_unlock_workers({ids})"
            for ids in ("null", "'{}'", "'{w0}'", "'{w1,w1,other}'", "'{other}'", "array[null]::text[]")
        ),
    )
]
TABLES = [
    Scenario("the view shows jobs of every state", (*ONE_OF_EACH, "select * from gw.jobs order by id")),
    Scenario(
        "the view leaves out jobs whose task is gone, and keeps those whose queue is",
        (
            OLD,
            add_job("'u'"),
            "delete from gw._private_tasks where identifier = 'u'",
            "select * from gw.jobs order by id",
            "delete from gw._private_job_queues",
            "select * from gw.jobs order by id",
        ),
    ),
    *(
        Scenario(statement, (OLD, statement))
        for statement in (
            "update gw.jobs set priority = 1",
            "insert into gw.jobs (priority) values (1)",
            "delete from gw.jobs",
            "insert into gw._private_jobs (task_id) values (1) returning *",
            "insert into gw._private_jobs default values",
            "insert into gw._private_jobs (id, task_id) values (7, 1)",
            "insert into gw._private_jobs (id, task_id) overriding system value values (7, 1) returning *",
            "insert into gw._private_jobs (task_id, is_available) values (1, true)",
            "insert into gw._private_jobs (task_id, key) values (1, 'k')",
            "insert into gw._private_jobs (task_id, key) values (1, '')",
            "insert into gw._private_jobs (task_id, max_attempts) values (1, 0)",
            "insert into gw._private_jobs (task_id, attempts) values (1, -1), (1, 24), (1, 25) returning *",
            "insert into gw._private_jobs (task_id, locked_at) values (1, now()) returning *",
            "update gw._private_jobs set is_available = true",
            "update gw._private_jobs set attempts = max_attempts returning *",
            "update gw._private_jobs set max_attempts = 1, attempts = 1 returning *",
            "update gw._private_jobs set locked_at = now() - interval '5 h' returning *",
            "update gw._private_jobs set key = repeat('k', 513)",
            *(
                f"update gw._private_jobs set {column} = null"
                for column in ("id", "task_id", "payload", "priority", "run_at", "attempts", "max_attempts",
                               "created_at", "updated_at", "revision", "job_queue_id", "key", "flags")
            ),
            "insert into gw._private_job_queues (queue_name) values ('q')",
            "insert into gw._private_job_queues (queue_name) values ('r') returning *",
            "insert into gw._private_job_queues (queue_name) values (null)",
            "insert into gw._private_job_queues (id, queue_name) values (7, 'r')",
            "update gw._private_job_queues set locked_at = now(), locked_by = 'w' returning *",
            "update gw._private_job_queues set is_available = false",
            "insert into gw._private_tasks (identifier) values ('t')",
            "insert into gw._private_tasks (identifier) values ('u') returning *",
            "insert into gw._private_tasks (identifier) values (null)",
            "insert into gw._private_known_crontabs values ('c', now(), '2030-01-01 00:00Z') returning *",
            "insert into gw._private_known_crontabs values ('c')",
            "insert into gw._private_known_crontabs values ('c', now()), ('c', now())",
        )
    ),
    Scenario(
        "a job and a queue added by statements, as older SQL does",
        (
            "insert into gw._private_tasks (identifier) values ('t')",
            "insert into gw._private_job_queues (queue_name) values ('q')",
            """insert into gw._private_jobs (task_id, job_queue_id, key, payload)
            select task.id, queue.id, 'k', '[1]'
            from gw._private_tasks as task, gw._private_job_queues as queue""",
            add_job("'t', '[2]', 'q', job_key => 'k'"),
            "delete from gw._private_jobs",
            add_job("'t', '[2]', 'q', job_key => 'k'"),
        ),
    ),
]  # fmt: skip
CALLS = (
    add_job("'t', queue_name => 'q', job_key => 'k'"),
    add_jobs({"identifier": "t"}),
    "select * from gw.remove_job('k')",
    "select * from gw.complete_jobs('{1}')",
    "select * from gw.permanently_fail_jobs('{1}')",
    "select * from gw.reschedule_jobs('{1}', now())",
    "select gw.force_unlock_workers('{w}')",
    "select * from gw.jobs order by id",
    "select * from gw._private_jobs",
)
# Roles belong to the server, and a server may serve several runs at once.
ROLES = tuple(f"side_by_side_{kind}_{os.getpid()}" for kind in ("stranger", "granted", "viewer"))
GRANTS = (
    "grant usage on schema graphile_worker to {1}, {2}",
    "grant all on all tables in schema graphile_worker to {1}",
    "grant all on all sequences in schema graphile_worker to {1}",
    "grant select on graphile_worker.jobs to {2}",
)
SESSIONS = [
    *(Scenario(f"{role}: {call}", (OLD, f"set role {role}", call)) for role in ROLES for call in CALLS),
    Scenario("without a search_path", ("set search_path = ''", *CALLS, "reset search_path")),
    Scenario("two calls in one transaction", ("begin", OLD, OLD, CALLS[2], "commit")),
    Scenario("two calls that are rolled back", ("begin", OLD, OLD, CALLS[2], "rollback", OLD)),
    Scenario(
        "part of a transaction", ("begin", OLD, "savepoint s", CALLS[1], "rollback to s", CALLS[1], "commit")
    ),
    Scenario(
        "after an error in a transaction",
        ("begin", OLD, "savepoint s", add_job("'t', priority => 32768"), "rollback to s", CALLS[1], "commit"),
    ),
    Scenario(
        "ids are used only for names that are new",
        (
            *[add_job("'t', queue_name => 'q'")] * 3,
            add_job("'u', queue_name => 'r'"),
            *[add_jobs(EVERYTHING)] * 2,
        ),
    ),
]

ADD_A, ADD_B = (add_job(f"'t', '[{n}]', 'q', job_key => 'k'") for n in (1, 2))
DEDUPE = add_job("'t', '[2]', job_key => 'k', job_key_mode => 'unsafe_dedupe'")
REMOVE = "select * from gw.remove_job('k')"
BULK = add_jobs({"identifier": "t", "payload": "[2]", "job_key": "k"})
SECONDS = {"add_job": ADD_B, "unsafe_dedupe": DEDUPE, "add_jobs": BULK, "remove_job": REMOVE}
FIRSTS = {
    "an add of a new key": ((), ADD_A),
    "an add of a key that a job has": ((OLD,), ADD_A),
    "an add of a key that a running job has": ((OLD, *STATES["running"]), ADD_A),
    "unsafe_dedupe of a new key": ((), DEDUPE),
    "unsafe_dedupe of a key that a job has": ((OLD,), DEDUPE),
    "a removal": ((OLD,), REMOVE),
    "a removal of a running job": ((OLD, *STATES["running"]), REMOVE),
    "a claim": ((OLD,), *STATES["running"]),
    "a completion": ((OLD, *STATES["running"]), "delete from gw._private_jobs where key = 'k'"),
    "a failure": (
        (OLD, *STATES["running"]),
        "update gw._private_jobs set locked_at = null, locked_by = null, last_error = 'oops' where key = 'k'",
    ),
    "a failure for good": (
        (OLD, *STATES["running for the last time"]),
        "update gw._private_jobs set locked_at = null, locked_by = null, last_error = 'oops' where key = 'k'",
    ),
}
CONCURRENT = [
    Scenario(
        f"{second} meets {first} ({end})",
        (
            *before,
            "a: begin",
            f"a: {statement}",
            f"b: {SECONDS[second]}",
            f"a: {end}",
            "b: select * from gw.jobs order by id",
        ),
    )
    for first, (before, statement) in FIRSTS.items()
    for second in SECONDS
    for end in ("commit", "rollback")
]
ISOLATED = [
    Scenario(
        f"{second} under repeatable read meets {first}",
        (
            *before,
            "b: begin isolation level repeatable read",
            "b: select * from gw.jobs order by id",
            f"a: {statement}",
            f"b: {SECONDS[second]}",
            "b: commit",
        ),
    )
    for first, (before, statement) in FIRSTS.items()
    for second in SECONDS
]
NEW_NAMES = [
    Scenario(
        f"two adds of a new task and a new queue at once ({end}): {second}",
        ("a: begin", f"a: {add_job(first)}", f"b: {second}", f"a: {end}", add_job(first)),
    )
    for end in ("commit", "rollback")
    for first in ("'t', queue_name => 'q'",)
    for second in (
        add_job(first),
        add_job("'u', queue_name => 'q'"),
        add_job("'t'"),
        add_jobs({"identifier": "t", "queue_name": "q"}),
        "insert into gw._private_tasks (identifier) values ('t') on conflict do nothing",
    )
]
USED = (add_job("'t', queue_name => 'q'"), "delete from gw._private_jobs")
CLEANING = [
    Scenario(
        f"{table} cleaned up ({end}) under {call}",
        (
            *USED,
            "a: begin",
            f"a: delete from gw.{table}",
            f"b: {call}",
            f"a: {end}",
            "b: select * from gw.jobs order by id",
        ),
    )
    for table in ("_private_job_queues", "_private_tasks")
    for call in (add_job("'t', queue_name => 'q'"), add_jobs({"identifier": "t", "queue_name": "q"}))
    for end in ("commit", "rollback")
]

GROUPS: dict[str, list[Scenario]] = {
    "arguments": ARGUMENTS,
    "two errors": TWO_ERRORS,
    "taken keys": TAKEN_KEYS,
    "merging": MERGING,
    "one spec": ONE_SPEC,
    "several specs": SEVERAL_SPECS,
    "removing": REMOVING,
    "administering": ADMINISTERING,
    "tables": TABLES,
    "sessions": SESSIONS,
    "concurrent": CONCURRENT,
    "isolated": ISOLATED,
    "new names": NEW_NAMES,
    "cleaning": CLEANING,
}


class Allowed(NamedTuple):
    """An intended difference, as regular expressions for its location and for both values."""

    reason: str
    scenario: str
    path: str
    npm: str
    python: str

    def covers(self, found: Difference) -> bool:
        return bool(
            (re.search(self.scenario, found.scenario) or re.search(self.scenario, found.step))
            and re.fullmatch(self.path, found.path)
            and re.fullmatch(self.npm, str(found.npm))
            and re.fullmatch(self.python, str(found.python))
        )


_MESSAGE = "The texts of errors may differ; the SQLSTATE is the contract."
_EMPTY = "An empty add_jobs adds nothing, so it wakes no worker."
_ORDER = "Rows are numbered and returned in the order of the specs. Node's order is undefined."
_NO_ID = (
    "A number out of range uses up no id. Node's unsafe_dedupe has used up the id of the task by then, "
    "and also the id of the job once its session has a generic plan."
)
_LOCKS_FIRST = (
    "add_jobs locks the jobs that have its keys, in the order of the keys, before it uses ids: "
    "two calls with the same keys do not deadlock."
)
_ALWAYS_ADDS = "A keyed add that meets a claim adds the job. Node's returns nothing and adds nothing."
_REREADS_KEY = (
    "remove_job that waited for a keyed add removes the job that now has the key. Node's removes nothing."
)
_REREADS_LOCK = (
    "remove_job that waited for a failure finds a job that does not run, and deletes it. "
    "Node's decided before it waited, and leaves a failed job without a key."
)
_ANY = "(?s:.*)"
_ROWS = r"(results of waiting steps|jobs|result)(\..*)?"
ALLOWED = (
    Allowed(_MESSAGE, "job_key_mode", r"result\.message", "Invalid job_key_mode .*", "The job_key_mode .*"),
    Allowed(_MESSAGE, "job_key_mode", r"result\.hint", "None", "Use replace, .*"),
    Allowed(
        _MESSAGE,
        "repeatable read meets a (removal|completion)",
        r"result\.message",
        "could not serialize access due to concurrent delete",
        "could not serialize access due to concurrent update",
    ),
    Allowed(_EMPTY, r"gw\.add_jobs\(('{}'|null)", "notifications", r"\['jobs:insert'\]", r"\[\]"),
    Allowed(_ORDER, "", "order of (rows|new ids)", r"\[.*\]", r"\['0'(, '1')?(, '2')?(, '3')?(, '4')?\]"),
    Allowed(_NO_ID, "'unsafe_dedupe', .* => 32768", r"last ids\.(tasks|jobs)", "1", "None"),
    Allowed(_LOCKS_FIRST, "^add_jobs (meets|under)", r"last ids\.jobs", r"\d", r"\d"),
    Allowed(
        _LOCKS_FIRST,
        "^add_jobs under repeatable read meets a removal$",
        r"result\.sqlstate",
        "absent",
        "40001",
    ),
    Allowed(
        _LOCKS_FIRST, "^add_jobs under repeatable read meets a removal$", f"{_ROWS}|notifications", _ANY, _ANY
    ),
    Allowed(
        _ALWAYS_ADDS,
        r"^add_job meets a claim \(commit\)",
        r"results of waiting steps\.4\.0\.id",
        "None",
        "3",
    ),
    Allowed(
        _ALWAYS_ADDS,
        r"^add_jobs meets a claim \(commit\)",
        r"results of waiting steps\.4\.0\.id",
        "absent",
        "2",
    ),
    Allowed(_ALWAYS_ADDS, r"^add_jobs? meets a claim \(commit\)", rf"{_ROWS}|last ids\.jobs", _ANY, _ANY),
    Allowed(
        _REREADS_KEY,
        r"^remove_job meets an add of a key that a running job has \(commit\)",
        r"results of waiting steps\.5\.0\.id",
        "None",
        "2",
    ),
    Allowed(
        _REREADS_KEY,
        r"^remove_job meets an add of a key that a running job has \(commit\)",
        f"{_ROWS}|notifications",
        _ANY,
        _ANY,
    ),
    Allowed(
        _REREADS_LOCK,
        r"^remove_job meets a failure( for good)? \(commit\)",
        r"jobs\.1\.key",
        "None",
        "absent",
    ),
    Allowed(
        _REREADS_LOCK,
        r"^remove_job meets a failure( for good)? \(commit\)",
        f"{_ROWS}|notifications",
        _ANY,
        _ANY,
    ),
)


def unexplained(found: Sequence[Difference]) -> list[Difference]:
    return [each for each in found if not any(allowed.covers(each) for allowed in ALLOWED)]


def applied(found: Sequence[Difference]) -> list[Allowed]:
    return [allowed for allowed in ALLOWED if any(allowed.covers(each) for each in found)]


def report(found: Sequence[Difference]) -> str:
    """Return the number of differences, and the first ones with their steps."""
    return f"{len(found)} differences, the first of them:\n" + "\n".join(map(str, found[:8]))


class Pair:
    """A database installed by Node and one installed by Python, on one server, with cached results."""

    def __init__(self, npm: str, python: str, scratch: str) -> None:
        self.npm, self.python, self.scratch = npm, python, scratch
        self._records: dict[str, list[list[Record]]] = {}
        self._differences: dict[str, list[Difference]] = {}

    async def records(self, group: str) -> list[list[Record]]:
        """Return the records of each scenario of a group, with the functions from Node."""
        if group not in self._records:
            async with opened(self.npm) as side:
                self._records[group] = [await side.run(scenario) for scenario in GROUPS[group]]
        return self._records[group]

    async def differences(self, group: str) -> list[Difference]:
        """Return the differences between the functions from Node and from Python."""
        if group not in self._differences:
            async with opened(self.python) as side, asyncio.TaskGroup() as both:
                npm = both.create_task(self.records(group))
                python = [await side.run(scenario) for scenario in GROUPS[group]]
            self._differences[group] = [
                difference
                for scenario, *records in zip(GROUPS[group], npm.result(), python, strict=True)
                for difference in compare(scenario, *records)
            ]
        return self._differences[group]

    async def catches(self, group: str) -> bool:
        """Return whether the scratch database has an unexpected difference, or lacks an intended one."""
        npm = await self.records(group)
        found: list[Difference] = []
        async with opened(self.scratch) as side:
            for scenario, records in zip(GROUPS[group], npm, strict=True):
                found += compare(scenario, records, await side.run(scenario))
                if unexplained(found):
                    return True
        return applied(found) != applied(await self.differences(group))


async def grant(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    for statement in GRANTS:
        await connection.execute(statement.format(*ROLES))
    await connection.close()


async def execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def prepare(npm: str, python: str) -> None:
    await node.install("0.18.0", npm)
    await execute(python, *(f"create role {role}" for role in ROLES))
    for dsn in (npm, python):
        await grant(dsn)


@pytest.fixture(scope="module")
def pair(databases: Databases) -> Iterator[Pair]:
    node.command("0.18.0")
    with (
        databases.fresh_sync(empty=True) as npm,
        databases.fresh_sync() as python,
        databases.fresh_sync(empty=True) as scratch,
    ):
        asyncio.run(prepare(npm, python))
        yield Pair(npm, python, scratch)
        for dsn in (scratch, npm, python):
            asyncio.run(execute(dsn, *(f"drop owned by {role}" for role in ROLES)))
        asyncio.run(execute(python, *(f"drop role {role}" for role in ROLES)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("group", GROUPS)
async def test_python_and_node_functions_have_the_same_effects(pair: Pair, group: str) -> None:
    found = unexplained(await pair.differences(group))

    assert not found, report(found)


@pytest.mark.slow
async def test_every_allowed_difference_still_occurs(pair: Pair) -> None:
    found = [difference for group in GROUPS for difference in await pair.differences(group)]

    assert applied(found) == list(ALLOWED)


class Fault(NamedTuple):
    """A mistake in the SQL scripts, and the group of scenarios that finds it."""

    name: str
    right: str
    wrong: str
    group: str


_ADD_JOB_NOTIFIES = "perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', 1)::text);"
_ADD_JOBS_NOTIFIES = (
    "perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', total)::text);"
)
_NOT_RUNNING = "and (job.locked_at is null or job.locked_at < now() - interval '4 hours')"
FAULTS = (
    Fault("add_job does not notify", _ADD_JOB_NOTIFIES, "", "arguments"),
    Fault("add_jobs does not notify", _ADD_JOBS_NOTIFIES, "", "one spec"),
    Fault("add_jobs counts wrongly", "'count', total)", "'count', 1)", "several specs"),
    Fault(
        "equal notifications are folded", "'r', random(), 'count', 1)", "'r', 0.5, 'count', 1)", "sessions"
    ),
    Fault("remove_job does not notify", "'count', -1)", "'count', 0)", "removing"),
    Fault("add_job ignores the priority", "      small_priority,\n", "      0,\n", "arguments"),
    Fault(
        "a replaced job keeps its priority",
        "priority = excluded.priority",
        "priority = job.priority",
        "taken keys",
    ),
    Fault("add_jobs ignores the priority", "coalesce(spec.priority, 0::smallint)", "0", "one spec"),
    Fault(
        "a number out of range uses up an id",
        "      small_priority,\n",
        "      priority::smallint,\n",
        "two errors",
    ),
    Fault(
        "add_job loses the flags",
        "(select jsonb_object_agg(flag, true) from unnest(add_job.flags) as flag)",
        "null",
        "arguments",
    ),
    Fault("a replaced job keeps its flags", "flags = excluded.flags", "flags = job.flags", "taken keys"),
    Fault(
        "flags are false",
        "jsonb_object_agg(flag, true) from unnest(spec.flags)",
        "jsonb_object_agg(flag, false) from unnest(spec.flags)",
        "one spec",
    ),
    Fault("is_available forgets the attempts", " and attempts < max_attempts) stored", ") stored", "tables"),
    Fault("a queue is available while it is locked", "(locked_at is null) stored", "(true) stored", "tables"),
    Fault(
        "preserve_run_at is ignored",
        "when job_key_preserve_run_at and job.attempts = 0",
        "when false",
        "taken keys",
    ),
    Fault("preserve_run_at keeps the time of a retry", " and job.attempts = 0 then", " then", "taken keys"),
    Fault(
        "unsafe_dedupe replaces",
        " := job_key is not null and coalesce(job_key_mode = 'unsafe_dedupe', false)",
        " := false",
        "taken keys",
    ),
    Fault(
        "an unknown job_key_mode is accepted",
        "if job_key is not null and job_key_mode not in",
        "if false and job_key_mode not in",
        "arguments",
    ),
    Fault("a replaced job keeps its run_at", "else excluded.run_at", "else job.run_at", "taken keys"),
    Fault("a replaced job keeps its attempts", "attempts = 0,\n", "attempts = job.attempts,\n", "taken keys"),
    Fault(
        "a replaced job keeps its error", "last_error = null,", "last_error = job.last_error,", "taken keys"
    ),
    Fault(
        "a replaced job keeps its task", "task_id = excluded.task_id", "task_id = job.task_id", "taken keys"
    ),
    Fault(
        "a replaced job keeps its queue",
        "job_queue_id = excluded.job_queue_id",
        "job_queue_id = job.job_queue_id",
        "taken keys",
    ),
    Fault(
        "arrays of payloads are not merged", "json_typeof(job.payload) = 'array' and", "false and", "merging"
    ),
    Fault("the revision stays", "revision = job.revision + 1", "revision = job.revision", "taken keys"),
    Fault(
        "updated_at stays",
        "updated_at = now()\n    where job.locked_at is null",
        "updated_at = job.updated_at\n    where job.locked_at is null",
        "taken keys",
    ),
    Fault(
        "the default of max_attempts is wrong",
        "coalesce(max_attempts, 25)",
        "coalesce(max_attempts, 24)",
        "arguments",
    ),
    Fault(
        "a superseded job has another key",
        "set key = null, attempts = job",
        "set key = '-', attempts = job",
        "taken keys",
    ),
    Fault(
        "a superseded job may run again",
        "set key = null, attempts = job.max_attempts",
        "set key = null, attempts = job.attempts",
        "taken keys",
    ),
    Fault(
        "ids are used up for names that exist",
        "where queue.queue_name = add_job.queue_name\n        )",
        "where false)",
        "sessions",
    ),
    Fault(
        "rows come back in the opposite order",
        "from unnest(specs) as spec\n    on conflict",
        "from unnest(specs) as spec order by spec.payload::text desc\n    on conflict",
        "several specs",
    ),
    Fault("remove_job deletes a running job", "if job.locked_at is null or", "if true or", "removing"),
    Fault(
        "remove_job does not mark a running job",
        "set key = null, attempts = found.max_attempts",
        "set key = null",
        "removing",
    ),
    Fault(
        "remove_job forgets stale locks",
        "if job.locked_at is null or job.locked_at < now() - interval '4 hours' then",
        "if job.locked_at is null then",
        "removing",
    ),
    Fault(
        "remove_job does not read the key again",
        "if not exists (select from",
        "if true or not exists (select from",
        "concurrent",
    ),
    Fault("a lock counts for three hours", _NOT_RUNNING, _NOT_RUNNING.replace("4", "3"), "administering"),
    Fault("running jobs are administered", _NOT_RUNNING, "", "administering"),
    Fault("another message of failure", "'Manually marked as failed'", "'Marked as failed'", "administering"),
    Fault(
        "reschedule_jobs ignores attempts",
        "coalesce(reschedule_jobs.attempts::smallint, job.attempts)",
        "job.attempts",
        "administering",
    ),
    Fault(
        "force_unlock_workers forgets queues",
        "update {schema}._private_job_queues as queue\n    set locked_at = null",
        "update {schema}._private_job_queues as queue\n    set locked_at = queue.locked_at",
        "administering",
    ),
    Fault(
        "the view leaves out jobs whose queue is gone",
        "left join {schema}._private_job_queues",
        "join {schema}._private_job_queues",
        "tables",
    ),
    Fault(
        "rows are open to other roles",
        "alter table {schema}._private_jobs enable row level security;",
        "",
        "sessions",
    ),
    Fault(
        "a keyed add that meets a claim adds nothing",
        "exit when found;",
        "exit when found or not dedupe;",
        "concurrent",
    ),
    Fault(
        "names found by the search_path",
        "insert into {schema}._private_tasks (identifier)\n      select add_job",
        "insert into _private_tasks (identifier)\n      select add_job",
        "sessions",
    ),
)


async def install_with(fault: Fault, dsn: str) -> None:
    """Install the Python schema again, with the fault in it."""
    schema = Schema()
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("drop schema if exists graphile_worker cascade")
        whole = "\n;\n".join(step.sql for step in steps(schema, await inspect_schema(connection, schema)))
        right, wrong = schema.render(fault.right), schema.render(fault.wrong)
        assert right in whole, f"the SQL scripts no longer contain: {right}"
        await connection.execute(whole.replace(right, wrong))
    finally:
        await connection.close()
    await grant(dsn)


@pytest.mark.sample(8)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_comparison_finds_a_fault_in_the_functions(pair: Pair, fault: Fault) -> None:
    await install_with(fault, pair.scratch)

    assert await pair.catches(fault.group)


# Random sequences of steps.
A_KEY = st.sampled_from(["a", "b", "c"])
A_TIME = st.sampled_from([None, "2030-01-01 00:00Z", "2020-01-01 00:00Z"])
AN_IDENTIFIER = st.sampled_from(["t", "u"])
VALID = {
    "payload": st.sampled_from([None, "{}", "[1]", '[2, "x"]', '{"n": 1}', "null", "[]"]),
    "queue_name": st.sampled_from([None, "q", "r"]),
    "run_at": A_TIME,
    "max_attempts": st.sampled_from([None, 1, 2, 25]),
    "job_key": st.none() | A_KEY,
    "priority": st.sampled_from([None, -3, 0, 7]),
    "flags": st.sampled_from([None, [], ["f"], ["f", "g", "f"]]),
}
ANY = VALID | {
    "max_attempts": st.sampled_from([None, 1, 2, 25, 0, 70_000]),
    "priority": st.sampled_from([None, -3, 0, 7, 99_999]),
    "flags": st.sampled_from([None, [], ["f"], ["f", None]]),
    "job_key_mode": st.sampled_from([None, "replace", "preserve_run_at", "unsafe_dedupe", "nonsense"]),
}
# Not with unsafe_dedupe: there Node's query plan decides whether an id is used up, see _NO_ID.
TOO_LARGE = {"70000", "99999"}
A_SPEC = st.fixed_dictionaries({"identifier": AN_IDENTIFIER}, optional=VALID)
BY_KEY = "array(select id from gw._private_jobs where key = '{key}')"
A_STEP = st.one_of(
    st.fixed_dictionaries({"identifier": AN_IDENTIFIER}, optional=ANY)
    .filter(
        lambda options: (
            options.get("job_key_mode") != "unsafe_dedupe" or TOO_LARGE.isdisjoint(map(str, options.values()))
        )
    )
    .map(
        lambda options: add_job(", ".join(f"{name} => {_literal(value)}" for name, value in options.items()))
    ),
    # The order of the rows decides which of two invalid specs is reported, and Node's order is undefined.
    st.builds(
        lambda specs, preserve: add_jobs(*specs, more=f", {preserve}"),
        st.lists(A_SPEC, min_size=1, max_size=4, unique_by=lambda spec: str(spec.get("job_key") or id(spec))),
        st.booleans(),
    ),
    st.builds(
        lambda key, text: text.replace("{key}", key),
        A_KEY,
        st.sampled_from(
            [
                "select * from gw.remove_job('{key}')",
                f"select * from gw.complete_jobs({BY_KEY})",
                f"select * from gw.permanently_fail_jobs({BY_KEY})",
                f"select * from gw.reschedule_jobs({BY_KEY}, run_at => '2030-01-01 00:00Z')",
                f"select * from gw.reschedule_jobs({BY_KEY}, attempts => 0, priority => 2)",
                "select gw.force_unlock_workers('{w}')",
                *(
                    change.replace("key = 'k'", "key = '{key}' and locked_at is null")
                    for changes in STATES.values()
                    for change in changes
                ),
            ]
        ),
    ),
)


@pytest.mark.parametrize("examples", [20, pytest.param(1_000, marks=pytest.mark.slow)])
def test_random_call_sequences_have_the_same_effects(pair: Pair, examples: int) -> None:
    async def differ(sides: tuple[Side, Side], scenario: Scenario) -> list[Difference]:
        npm, python = await asyncio.gather(*(side.run(scenario) for side in sides))
        found = unexplained(compare(scenario, npm, python))
        return [difference for difference in found if not difference.path.startswith("order of")]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(A_STEP, min_size=1, max_size=12))
    def check(steps: list[str]) -> None:
        several = any("gw.job_spec, row(" in step for step in steps)
        found = runner.run(differ(sides, Scenario("a sequence", tuple(steps), any_order=several)))
        assert not found, report(found)

    with asyncio.Runner() as runner, _opened_on(runner, pair) as sides:
        check()


@contextmanager
def _opened_on(runner: asyncio.Runner, pair: Pair) -> Iterator[tuple[Side, Side]]:
    contexts = opened(pair.npm), opened(pair.python)
    npm, python = (runner.run(context.__aenter__()) for context in contexts)
    try:
        yield npm, python
    finally:
        for context in contexts:
            runner.run(context.__aexit__(None, None, None))
