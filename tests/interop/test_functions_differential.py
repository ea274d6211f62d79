"""Whatever is done in whatever order, our functions leave what npm's leave."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphile_worker.testing import Databases, running_server
from support import node

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = st.sampled_from(["a", "b", "c"])
PAYLOADS = st.sampled_from([None, "{}", "[1]", '[2, "x"]', '{"n": 1}', "null", "[]"])
TIMES = st.sampled_from([None, "2030-01-01 00:00Z", "2020-01-01 00:00Z"])
SPEC = st.fixed_dictionaries(
    {"identifier": st.sampled_from(["t", "u"])},
    optional={
        "payload": PAYLOADS,
        "queue_name": st.sampled_from([None, "q", "r"]),
        "run_at": TIMES,
        "max_attempts": st.sampled_from([None, 1, 2, 25, 1, 2, 0, 70_000]),
        "job_key": KEYS,
        "priority": st.sampled_from([None, -3, 0, 7, 8, 99_999]),
        "flags": st.sampled_from([None, [], ["f"], ["f", "g", "f"], ["f", None]]),
    },
)
MODES = st.sampled_from([None, "replace", "preserve_run_at", "unsafe_dedupe", "nonsense"])
OPERATION = st.one_of(
    st.tuples(st.just("add_job"), SPEC, MODES),
    st.tuples(
        st.just("add_jobs"),
        st.lists(SPEC, max_size=4, unique_by=lambda spec: str(spec.get("job_key", id(spec)))),
        st.booleans(),
    ),
    st.tuples(st.just("remove_job"), KEYS),
    st.tuples(st.sampled_from(["complete_jobs", "permanently_fail_jobs", "force_unlock_workers"]), KEYS),
    st.tuples(st.just("reschedule_jobs"), KEYS, TIMES, st.sampled_from([None, 0, 2])),
    st.tuples(st.sampled_from(["lock", "lock long ago", "fail", "retry"]), KEYS),
)

BY_KEY = "array(select id from graphile_worker._private_jobs where key = $1)"
STATEMENTS = {
    "remove_job": "select key, attempts from graphile_worker.remove_job($1)",
    "complete_jobs": f"select key from graphile_worker.complete_jobs({BY_KEY})",
    "permanently_fail_jobs": f"select key, last_error from graphile_worker.permanently_fail_jobs({BY_KEY})",
    "force_unlock_workers": "select graphile_worker.force_unlock_workers(array[$1])",
    "reschedule_jobs": f"""select key, attempts, priority from graphile_worker.reschedule_jobs(
        {BY_KEY}, run_at => $2::text::timestamptz, attempts => $3, priority => $3)""",
}
# A worker's doings, by hand. The locker is the key, so that it can be unlocked by it.
TAKE = """with job as (
    update graphile_worker._private_jobs set locked_by = $1, attempts = attempts + 1,
      locked_at = date_trunc('day', now()) - {age}::interval
    where key = $1 and locked_at is null returning job_queue_id, locked_at)
  update graphile_worker._private_job_queues as queue set locked_by = $1, locked_at = job.locked_at
  from job where queue.id = job.job_queue_id"""
DOINGS = {
    "lock": TAKE.replace("date_trunc('day', now())", "now()").format(age="'1 minute'"),
    "lock long ago": TAKE.format(age="'5 hours'"),
    "fail": """update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'failed'
      where key = $1 and locked_at is null""",
    "retry": """update graphile_worker._private_jobs
      set attempts = least(attempts + 1, max_attempts), last_error = 'again'
      where key = $1 and locked_at is null""",
}
JOBS = """
  select task.identifier, queue.queue_name, payload::text, priority, attempts, max_attempts, last_error, key,
    job.locked_by, job.locked_at is null as unlocked, revision, flags::text, job.is_available,
    updated_at > created_at as was_updated, case when run_at = created_at then null when
    run_at in ('2030-01-01 00:00Z', '2020-01-01 00:00Z') then run_at::text else 'later' end as run_at
  from graphile_worker._private_jobs as job
  join graphile_worker._private_tasks as task on task.id = job.task_id
  left join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id"""
QUEUES = "select queue_name, locked_by, is_available from graphile_worker._private_job_queues"
CLEAR = "truncate graphile_worker._private_jobs, graphile_worker._private_job_queues"


class Side:
    """One database, and what it says."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._heard: list[int] = []

    @classmethod
    async def open(cls, dsn: str) -> Side:
        side = cls(await asyncpg.connect(dsn))
        await side._connection.add_listener("jobs:insert", side._hear)
        return side

    def _hear(self, _connection: object, _pid: object, _channel: object, payload: object) -> None:
        self._heard.append(json.loads(str(payload))["count"] if payload else 0)

    async def do(self, operation: tuple[Any, ...]) -> tuple[object, ...]:
        """The result, or the code of the error; all that is stored; what was notified."""
        name, *arguments = operation
        try:
            if name == "add_job":
                result: object = await self._add_job(*arguments)
            elif name == "add_jobs":
                result = await self._add_jobs(*arguments)
            else:
                rows = await self._connection.fetch((STATEMENTS | DOINGS)[name], *arguments)
                result = sorted(map(tuple, rows), key=str)
        except asyncpg.PostgresError as error:
            result = error.sqlstate
        jobs = await self._connection.fetch(JOBS)
        queues = await self._connection.fetch(QUEUES)
        heard, self._heard = self._heard, []
        return result, sorted(map(tuple, jobs), key=str), sorted(map(tuple, queues), key=str), heard

    async def _add_job(self, spec: dict[str, Any], mode: str | None) -> object:
        names = [*spec, "job_key_mode"]
        casts = {"payload": "::text::json", "run_at": "::text::timestamptz"}
        named = ", ".join(f"{name} => ${n}{casts.get(name, '')}" for n, name in enumerate(names, 1))
        row = await self._connection.fetch(
            f"select key, revision, attempts, payload::text from graphile_worker.add_job({named})",
            *spec.values(),
            mode,
        )
        return tuple(row[0])

    async def _add_jobs(self, specs: list[dict[str, Any]], preserve: bool) -> object:
        given = [
            spec | ({"payload": json.loads(spec["payload"])} if spec.get("payload") else {}) for spec in specs
        ]
        rows = await self._connection.fetch(
            """select key, revision from graphile_worker.add_jobs(array(
              select row(s.*)::graphile_worker.job_spec
              from json_populate_recordset(null::graphile_worker.job_spec, $1) as s), $2)""",
            json.dumps(given),
            preserve,
        )
        return sorted(map(tuple, rows), key=str)

    async def clear(self) -> None:
        await self._connection.execute(CLEAR)

    async def close(self) -> None:
        await self._connection.close()


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[asyncio.Runner, Side, Side]]:
    """A database installed by us and one by npm, for all examples of a test."""
    node.command("0.18.0")
    with running_server() as server, asyncio.Runner() as runner:
        databases = Databases(server)
        fresh = databases.fresh(), databases.fresh(empty=True)
        ours, theirs = (runner.run(database.__aenter__()) for database in fresh)
        runner.run(node.install("0.18.0", theirs))
        opened = [runner.run(Side.open(dsn)) for dsn in (ours, theirs)]
        yield runner, *opened  # type: ignore[misc]
        for side in opened:
            runner.run(side.close())
        for database in fresh:
            runner.run(database.__aexit__(None, None, None))
        runner.run(databases.close())


async def compare(ours: Side, theirs: Side, operations: list[tuple[Any, ...]]) -> None:
    await ours.clear()
    await theirs.clear()
    for operation in operations:
        our_answer, their_answer = await ours.do(operation), await theirs.do(operation)
        if operation[0] == "add_jobs" and (
            not operation[1] or (is_error(our_answer) and is_error(their_answer))
        ):
            # Nothing to add: npm wakes the workers, we do not. Of two errors npm's order of rows decides
            # which one is reported, and it is not defined.
            assert our_answer[1:3] == their_answer[1:3]
        else:
            assert our_answer == their_answer, operation


def is_error(answer: tuple[object, ...]) -> bool:
    return isinstance(answer[0], str)


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_any_sequence_of_calls_leaves_the_same_jobs_queues_errors_and_notifications(
    sides: tuple[asyncio.Runner, Side, Side], examples: int
) -> None:
    runner, ours, theirs = sides

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(st.lists(OPERATION, max_size=12))
    def check(operations: list[tuple[Any, ...]]) -> None:
        runner.run(compare(ours, theirs, operations))

    check()
