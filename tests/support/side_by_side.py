"""Run the same SQL on two installations of the schema and compare all of its effects.

A scenario is a list of steps. A step is SQL text in which ``gw.`` stands for the schema; a prefix names the
session that runs it: ``"b: select * from gw.add_job('t')"``. After every step a `Side` records the rows or
the error, the notifications, all tables and all sequences.

Records of two databases can be compared because nothing in them depends on the time of the run:

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
# The observer's own notification is last in the queue: when it arrives, all earlier ones have arrived.
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
        any_order: Whether a call adds several jobs. Node numbers and returns them in an undefined order, so
            the scenario is compared by the contents of the rows, and the order separately.
    """

    name: str
    steps: tuple[str, ...]
    any_order: bool = False


class Difference(NamedTuple):
    """One value that differs between the sides."""

    scenario: str
    step: str
    path: str
    npm: object
    python: object

    def __str__(self) -> str:
        values = f"npm {self.npm!r}, python {self.python!r}"
        return f"{self.path}: {values}\n    after {self.step}\n    in {self.scenario}"


Record = dict[str, Any]


@dataclass
class _Session:
    """One connection, and its current step."""

    connection: asyncpg.Connection
    step: int = 0
    running: asyncio.Task[Any] | None = None


@dataclass
class Side:
    """One database: runs scenarios and records their results."""

    dsn: str
    schema: str
    observer: asyncpg.Connection
    sessions: dict[str, _Session] = field(default_factory=dict)
    notifications: list[str] = field(default_factory=list)
    clock: list[tuple[int, datetime]] = field(default_factory=list)

    async def run(self, scenario: Scenario) -> list[Record]:
        """Run a scenario on an empty queue, and return one record per step."""
        await self.observer.execute(self._sql(_EMPTY))
        self.clock, self.notifications = [], []
        several = len({self._split(step)[0] for step in scenario.steps}) > 1
        try:
            records = [await self._run_step(n, step, several) for n, step in enumerate(scenario.steps, 1)]
            waiting = [name for name, session in self.sessions.items() if session.running]
            assert not waiting, f"sessions {waiting} still wait after the last step of {scenario.name}"
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
        """Wait until every session is idle, or waits for an idle session.

        A session that waits for a running session, or for the server's maintenance, continues by itself.
        """
        while True:
            # Read before the query: a session that ends meanwhile may appear as a blocker in its result.
            idle = {each.connection.get_server_pid() for each in self.sessions.values()} - self._running()
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
            session.connection.get_server_pid()
            for session in self.sessions.values()
            if session.running is not None and not session.running.done()
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
        notifications, self.notifications = self.notifications, []
        assert notifications.pop() == _FENCE
        return {"notifications": notifications, **json.loads(contents)}

    def on_notification(self, _connection: object, _pid: object, channel: str, payload: object) -> None:
        """Record a notification."""
        text = str(payload)
        if text.startswith("{"):
            parsed = json.loads(text)
            if isinstance(parsed.get("r"), float) and 0 <= parsed["r"] < 1:
                parsed["r"] = "random"
            text = json.dumps(parsed)
        self.notifications.append(f"{channel} {text}".strip())

    def _plain(self, value: Any) -> Any:
        """Return the value with every time as the step that it belongs to."""
        if isinstance(value, dict):
            return {str(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, asyncpg.Record):
            return {key: self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
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
    """Open a side on a database in which the schema is installed."""
    side = Side(dsn, schema, await asyncpg.connect(dsn, server_settings=_SETTINGS))
    try:
        for channel in (*CHANNELS, _FENCE):
            await side.observer.add_listener(channel, side.on_notification)
        yield side
    finally:
        for connection in (side.observer, *(session.connection for session in side.sessions.values())):
            await connection.close()


def _by_content(record: Record) -> Record:
    """Return the record without ids, sorted by the rows' contents, with the order recorded separately."""
    names = {
        "task_id": record["tasks"] or {},
        "job_queue_id": {key: row["queue_name"] for key, row in (record["queues"] or {}).items()},
    }

    def without_ids(row: Any) -> Any:
        if not isinstance(row, dict) or "id" not in row:
            return row
        named = {column: ids.get(str(row.get(column))) for column, ids in names.items() if column in row}
        return {key: value for key, value in {**row, **named}.items() if key != "id"}

    def sorted_rows(value: Any) -> Any:
        rows = list(value.values()) if isinstance(value, dict) else value
        return sorted(map(without_ids, rows or []), key=repr)

    result = {**record, **{table: sorted_rows(record[table]) for table in ("jobs", "queues", "tasks")}}
    if isinstance(record["result"], list):
        rows = [row for row in record["result"] if "payload" in row]
        result["result"] = sorted_rows(record["result"])
        result["order of rows"] = [row["payload"] for row in rows]
        result["order of new ids"] = [
            row["payload"] for row in sorted(rows, key=itemgetter("id")) if row["revision"] == 0
        ]
    return result


def compare(scenario: Scenario, npm: Sequence[Record], python: Sequence[Record]) -> list[Difference]:
    """Return every value that differs, step by step."""
    found = []
    for number, (step, *records) in enumerate(zip(scenario.steps, npm, python, strict=True), 1):
        npm_values, python_values = (dict(_leaves("", record)) for record in records)
        for path in sorted(npm_values.keys() | python_values.keys()):
            pair = npm_values.get(path, ABSENT), python_values.get(path, ABSENT)
            if pair[0] != pair[1]:
                found.append(Difference(scenario.name, f"step {number}: {step}", path, *pair))
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield every value in a record with its path; a list of plain values is one value."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), item)
    else:
        yield path, value
