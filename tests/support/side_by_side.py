"""Run the same SQL on two installations of the schema and compare everything that it leaves.

A scenario is a list of steps. A step is SQL text in which ``gw.`` stands for the schema; a prefix names the
session that runs it: ``"b: select * from gw.add_job('t')"``. After every step a `Side` records the rows or
the error, the notifications, all tables and all sequences.

Records of two databases are comparable because nothing in them depends on when they were made:

- Every scenario begins with empty tables and sequences, so ids are compared as they are.
- Every step runs in a transaction whose ``now()`` is read first. A time is recorded as the step that it
  belongs to, or as the exact interval from it: ``step 2``, ``step 2 - 4:01:00``.
- The random number in a notification is masked.

A step that waits for a lock is recorded as waiting, and its result with the later step that ends the wait.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

WAITS = "waits for a lock"
ABSENT = "absent"
CHANNELS = ("jobs:insert", "worker:migrate")
_FENCE = "side_by_side"
_PREFIX = re.compile(r"([a-z]): ")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?[+-]\d\d(:\d\d)?")
_SETTINGS = {"timezone": "UTC", "statement_timeout": "20s", "deadlock_timeout": "20ms"}
_BLOCKERS = "select pid, pg_blocking_pids(pid) as blockers from unnest($1::integer[]) as pid"
_EMPTY = """
  delete from gw._private_jobs;
  delete from gw._private_job_queues;
  delete from gw._private_tasks;
  delete from gw._private_known_crontabs;
  select setval('gw.jobs_id_seq1', 1, false), setval('gw.job_queues_id_seq', 1, false),
    setval('gw.tasks_id_seq', 1, false);
"""
# The notification to itself comes last in the queue: once it is heard, all that was committed before is, too.
_CONTENTS = f"""
  select pg_notify('{_FENCE}', ''), jsonb_build_object(
    'jobs', (
      select jsonb_object_agg(job.id, job)
      from (
        select id, job_queue_id, task_id, payload::text, priority, run_at, attempts, max_attempts, last_error,
          created_at, updated_at, key, locked_at, locked_by, revision, flags, is_available
        from gw._private_jobs) as job),
    'queues', (select jsonb_object_agg(id, to_jsonb(queue)) from gw._private_job_queues as queue),
    'tasks', (select jsonb_object_agg(id, identifier) from gw._private_tasks),
    'crontabs', (select jsonb_object_agg(identifier, to_jsonb(cron)) from gw._private_known_crontabs as cron),
    'last ids', jsonb_build_object(
      'jobs', (select case when is_called then last_value end from gw.jobs_id_seq1),
      'queues', (select case when is_called then last_value end from gw.job_queues_id_seq),
      'tasks', (select case when is_called then last_value end from gw.tasks_id_seq)))::text
"""


class Scenario(NamedTuple):
    """Steps that begin on an empty queue.

    Attributes:
        any_order: Whether a call adds several jobs. npm numbers and returns those in an order that is not
            defined, so the scenario is compared by what the rows contain, and the order apart from it.
    """

    name: str
    steps: tuple[str, ...]
    any_order: bool = False


class Difference(NamedTuple):
    """One value that is not the same on both sides."""

    scenario: str
    step: str
    path: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        values = f"npm {self.theirs!r}, ours {self.ours!r}"
        return f"{self.path}: {values}\n    after {self.step}\n    in {self.scenario}"


Record = dict[str, Any]


@dataclass
class _Session:
    """One connection, and the step that it is busy with."""

    connection: asyncpg.Connection
    step: int = 0
    running: asyncio.Task[Any] | None = None


@dataclass
class Side:
    """One database: runs scenarios and records what they leave."""

    dsn: str
    schema: str
    observer: asyncpg.Connection
    sessions: dict[str, _Session] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    clock: list[tuple[int, datetime]] = field(default_factory=list)

    async def run(self, scenario: Scenario) -> list[Record]:
        """Run a scenario on an empty queue; one record per step."""
        await self.observer.execute(self._sql(_EMPTY))
        self.clock, self.heard = [], []
        several = len({self._split(step)[0] for step in scenario.steps}) > 1
        try:
            records = [await self._run_step(n, step, several) for n, step in enumerate(scenario.steps, 1)]
            still = [name for name, session in self.sessions.items() if session.running]
            assert not still, f"sessions {still} still wait after the last step of {scenario.name}"
        finally:
            await self._end_transactions()
        return [_by_content(record) for record in records] if scenario.any_order else records

    async def _run_step(self, number: int, step: str, several: bool) -> Record:
        name, sql = self._split(step)
        session = await self._session(name)
        assert session.running is None, f"session {name} still waits: {step}"
        session.step = number
        session.running = asyncio.create_task(self._execute(session, number, self._sql(sql)))
        if several:
            await self._settle()
        else:
            await session.running
        results = {}
        for busy in self.sessions.values():
            if busy.running is not None and busy.running.done():
                results[busy.step] = busy.running.result()
                busy.running = None
        record = {"result": results.pop(number, WAITS), "results of waiting steps": results}
        plain: Record = self._plain({**record, **await self._observe()})
        return plain

    async def _settle(self) -> None:
        """Wait until every session is idle, or waits for one that is.

        A session that waits for one that still runs, or for the server's own upkeep, will go on by itself.
        """
        while True:
            # Read before the server is asked: what ends meanwhile may look like a blocker in its answer.
            idle = {one.connection.get_server_pid() for one in self.sessions.values()} - self._running()
            waits_for = {
                row["pid"]: row["blockers"]
                for row in await self.observer.fetch(_BLOCKERS, list(self._running()))
            }
            running, stuck = self._running(), set[int]()
            while more := {
                pid for pid in running - stuck if not (idle | stuck).isdisjoint(waits_for.get(pid, []))
            }:
                stuck |= more
            if running == stuck:
                return
            await asyncio.sleep(0.001)

    def _running(self) -> set[int]:
        return {
            one.connection.get_server_pid()
            for one in self.sessions.values()
            if one.running is not None and not one.running.done()
        }

    async def _execute(self, session: _Session, number: int, sql: str) -> object:
        connection = session.connection
        try:
            if sql.startswith("begin"):
                await connection.execute(sql)
                await self._read_clock(connection, number)
                return []
            if connection.is_in_transaction():
                return await connection.fetch(sql)
            async with connection.transaction():
                await self._read_clock(connection, number)
                return await connection.fetch(sql)
        except asyncpg.PostgresError as error:
            fields = ("sqlstate", "message", "hint", "table_name", "column_name", "constraint_name")
            return {name: getattr(error, name, None) for name in fields}

    async def _read_clock(self, connection: asyncpg.Connection, number: int) -> None:
        self.clock.insert(0, (number, await connection.fetchval("select now()")))

    async def _observe(self) -> Record:
        [(_, contents)] = await self.observer.fetch(self._sql(_CONTENTS))
        heard, self.heard = self.heard, []
        assert heard.pop() == _FENCE
        return {"notifications": heard, **json.loads(contents)}

    def hear(self, _connection: object, _pid: object, channel: str, payload: object) -> None:
        """Remember a notification."""
        text = str(payload)
        if text.startswith("{"):
            parsed = json.loads(text)
            if isinstance(parsed.get("r"), float) and 0 <= parsed["r"] < 1:
                parsed["r"] = "random"
            text = json.dumps(parsed)
        self.heard.append(f"{channel} {text}".strip())

    def _plain(self, value: Any) -> Any:
        """The value with every time as the step that it belongs to."""
        if isinstance(value, dict):
            return {str(key): self._plain(one) for key, one in value.items()}
        if isinstance(value, asyncpg.Record):
            return {key: self._plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(one) for one in value]
        if isinstance(value, str) and _TIME.fullmatch(value):
            return self._plain(datetime.fromisoformat(value))
        if isinstance(value, datetime):
            return self._relative(value)
        return value

    def _relative(self, time: datetime) -> str:
        if time.year in {1, 9999}:  # as asyncpg reads them
            return "infinity" if time.year == 9999 else "-infinity"
        if time.microsecond == 0:
            return time.isoformat()
        for step, now in self.clock:
            if (time - now).microseconds == 0:
                away = time - now
                sign = "-" if away < timedelta() else "+"
                return f"step {step}" + (f" {sign} {abs(away)}" if away else "")
        return "none of the steps"

    async def _session(self, name: str) -> _Session:
        if name not in self.sessions:
            self.sessions[name] = _Session(await asyncpg.connect(self.dsn, server_settings=_SETTINGS))
        return self.sessions[name]

    async def _end_transactions(self) -> None:
        for session in self.sessions.values():
            if session.running is not None:
                session.running.cancel()
                await asyncio.wait([session.running])
                session.running = None
            await session.connection.execute("rollback; reset role")

    def _sql(self, text: str) -> str:
        return text.replace("gw.", f'"{self.schema}".')

    @staticmethod
    def _split(step: str) -> tuple[str, str]:
        named = _PREFIX.match(step)
        return (named[1], step[named.end() :]) if named else ("a", step)


@asynccontextmanager
async def opened(dsn: str, schema: str = "graphile_worker") -> AsyncIterator[Side]:
    """A side on a database in which the schema is installed."""
    side = Side(dsn, schema, await asyncpg.connect(dsn, server_settings=_SETTINGS))
    try:
        for channel in (*CHANNELS, _FENCE):
            await side.observer.add_listener(channel, side.hear)
        yield side
    finally:
        for connection in (side.observer, *(session.connection for session in side.sessions.values())):
            await connection.close()


def _by_content(record: Record) -> Record:
    """The record without ids, sorted by what the rows contain; the order of the rows is kept apart."""
    names = {
        "task_id": record["tasks"] or {},
        "job_queue_id": {key: row["queue_name"] for key, row in (record["queues"] or {}).items()},
    }

    def without_ids(row: Any) -> Any:
        if not isinstance(row, dict) or "id" not in row:
            return row
        named = {column: ids.get(str(row.get(column))) for column, ids in names.items() if column in row}
        return {key: value for key, value in {**row, **named}.items() if key != "id"}

    def tidy(value: Any) -> Any:
        rows = list(value.values()) if isinstance(value, dict) else value
        return sorted(map(without_ids, rows or []), key=repr)

    made = {**record, **{table: tidy(record[table]) for table in ("jobs", "queues", "tasks")}}
    if isinstance(record["result"], list):
        rows = [row for row in record["result"] if "payload" in row]
        made["result"] = tidy(record["result"])
        made["order of rows"] = [row["payload"] for row in rows]
        made["order of new ids"] = [
            row["payload"] for row in sorted(rows, key=itemgetter("id")) if row["revision"] == 0
        ]
    return made


def compare(scenario: Scenario, theirs: Sequence[Record], ours: Sequence[Record]) -> list[Difference]:
    """Every value that is not the same, step by step."""
    found = []
    for number, (step, *records) in enumerate(zip(scenario.steps, theirs, ours, strict=True), 1):
        their, our = (dict(_leaves("", record)) for record in records)
        for path in sorted(their.keys() | our.keys()):
            pair = their.get(path, ABSENT), our.get(path, ABSENT)
            if pair[0] != pair[1]:
                found.append(Difference(scenario.name, f"step {number}: {step}", path, *pair))
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Every value in a record by its path; a list of plain values is one value."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), one)
    else:
        yield path, value
