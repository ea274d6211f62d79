"""Operations on jobs that run on a caller's connection, from any driver: see `any_connection`.

Nothing here does I/O. An operation turns its arguments into the JSON document that its statement takes, and
the JSON document that the statement returns into jobs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._base.payload import encode_payload
from graphile_worker._db.connection.any_connection import Call, Operation, fetching_rows
from graphile_worker._db.queries.bulk_insert import Chunk, added_job, make_chunks
from graphile_worker._db.queries.by_hand import recording_completed
from graphile_worker._db.queries.failures import reads_failures, recording_failures
from graphile_worker._db.queries.jobs import read_job, split_instant
from graphile_worker._db.sql_files import OneTextStatement, Schema, one_text_statement, read_statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from graphile_worker.job import Job, JobSpec

_FILE = "caller_jobs.sql"
_TIMES = ("run_at", "created_at", "updated_at", "locked_at")
_CHUNK = 1000
"""Jobs per statement. Nothing else runs on the event loop while they are encoded."""


def adding_job(schema: Schema, spec: JobSpec, max_payload_size: int | None) -> Operation[Job]:
    """Add one job."""
    payload = None if spec.payload is None else encode_payload(spec.payload, max_size=max_payload_size)
    call = _call(schema, "add_each_job", [_spec_document(spec, payload)])
    call = call._replace(guarded=one_text_statement(schema, _FILE, "try_to_add"))
    # If npm installed the functions, a keyed job may have to be added again: see queries/jobs.py.
    while True:
        [row] = _rows((yield call))
        if row["id"] is not None:
            return read_job(row, spec.identifier, spec.queue_name)


def adding_jobs(
    schema: Schema, specs: Iterable[JobSpec], max_payload_size: int | None
) -> Operation[list[Job]]:
    """Add all jobs, in the order of the specs."""
    text = yield Call(one_text_statement(schema, _FILE, "prepare_bulk"), schema.quoted)
    now, keeps_order = msgspec.json.decode(text)
    now = _time(now)
    jobs: list[Job] = []
    for chunk in make_chunks(specs, max_payload_size, _CHUNK):
        if chunk is not None and keeps_order:
            jobs += yield from _adding_in_order(schema, chunk, now)
        elif chunk is not None:
            jobs += yield from _adding_each(schema, chunk)
    return jobs


def _adding_in_order(schema: Schema, chunk: Chunk, now: datetime) -> Operation[list[Job]]:
    specs = [_spec_document(*pair) for pair in zip(chunk.specs, chunk.payloads, strict=True)]
    call = _call(schema, "add_jobs", {"specs": specs, "preserve_run_at": chunk.preserve_run_at})
    rows = msgspec.json.decode((yield call))
    jobs = []
    for spec, payload, row in zip(chunk.specs, chunk.payloads, rows, strict=True):
        job_id, task_id, queue_id, run_at, revision, created_at, merged = row
        times = _time(run_at), revision, _time(created_at)
        jobs.append(added_job(spec, payload, (job_id, task_id, queue_id, *times, merged), now))
    return jobs


def _adding_each(schema: Schema, chunk: Chunk) -> Operation[list[Job]]:
    jobs: dict[int, Job] = {}
    missing = list(range(len(chunk.specs)))
    while missing:
        documents = [_spec_document(chunk.specs[place], chunk.payloads[place]) for place in missing]
        rows = _rows((yield _call(schema, "add_each_job", documents)))
        for place, row in zip(missing, rows, strict=True):
            if row["id"] is not None:
                spec = chunk.specs[place]
                jobs[place] = read_job(row, spec.identifier, spec.queue_name)
        missing = [place for place in missing if place not in jobs]
    return [jobs[place] for place in range(len(chunk.specs))]


def removing_job(schema: Schema, job_key: str) -> Operation[Job | None]:
    """Remove the job with this key."""
    text = yield Call(one_text_statement(schema, _FILE, "remove_job"), job_key)
    return next(iter(_jobs(text)), None)


def completing_jobs(schema: Schema, ids: Sequence[int]) -> Operation[list[Job]]:
    """Delete jobs as if they had succeeded."""
    completed = _jobs((yield _call(schema, "complete_jobs", {"ids": ids})))
    yield from recording_completed(schema, completed)
    return completed


def failing_jobs(schema: Schema, ids: Sequence[int], reason: str | None) -> Operation[list[Job]]:
    """Fail jobs permanently, and record when."""
    failed = _jobs((yield _call(schema, "permanently_fail_jobs", {"ids": ids, "reason": reason})))
    yield from recording_failures(schema, (job.id for job in failed))
    return failed


def rescheduling_jobs(
    schema: Schema, ids: Sequence[int], run_at: datetime | timedelta | None, changes: dict[str, int | None]
) -> Operation[list[Job]]:
    """Change when jobs run, their priority and their attempts."""
    moment, delay = split_instant(run_at)
    document = {"ids": ids, "run_at": moment, "delay": delay, **changes}
    return _jobs((yield _call(schema, "reschedule_jobs", document)))


def getting_job(schema: Schema, job_id: int | None, key: str | None) -> Operation[Job | None]:
    """Return the job with this id or key; None if it does not exist."""
    found = yield from listing_jobs(schema, having_id=job_id, having_key=key, first_jobs=1)
    return next(iter(found), None)


def listing_jobs(schema: Schema, **filters: Any) -> Operation[list[Job]]:
    """Return the jobs that match all filters that are not None. The filters are parts of jobs.sql."""
    given = {name: value for name, value in filters.items() if value is not None}
    parts = tuple((name, value if name == "having_state" else None) for name, value in given.items())
    found = _jobs((yield Call(_list_statement(schema, parts), _encoded(given))))
    failed = [job.id for job in found if job.last_error is not None]
    if not failed or not (yield from reads_failures(schema)):
        return found
    failures = msgspec.json.decode((yield _call(schema, "read_failures", {"ids": failed})))
    return [_with_failure(job, failures.get(str(job.id))) for job in found]


def _with_failure(job: Job, failure: dict[str, Any] | None) -> Job:
    if failure is None:
        return job
    return msgspec.structs.replace(job, **{**failure, "failed_at": _time(failure["failed_at"])})


@cache
def _list_statement(schema: Schema, parts: tuple[tuple[str, str | None], ...]) -> OneTextStatement:
    """Return the statement that lists jobs with these filters, each with its state if it has one."""
    own, of_jobs = read_statements(_FILE), read_statements("jobs.sql")
    filters = "\n".join(
        of_jobs[name if state is None else f"{name}_{state}"].replace(
            "{value}", own["filter_value"].replace("{column}", name)
        )
        for name, state in parts
    )
    before, after = own["list_jobs"].replace("{filters}", filters).split("{parameter}")
    return OneTextStatement(schema.render(before), schema.render(after))


def counting_jobs(schema: Schema) -> Operation[list[dict[str, Any]]]:
    """Count the jobs by task and state."""
    return (yield from fetching_rows(schema, "jobs.sql", "count_jobs", times=("oldest_due",)))


def unlocking_workers(schema: Schema, worker_ids: Sequence[str]) -> Operation[None]:
    """Release all jobs and queues that the workers hold."""
    yield _call(schema, "force_unlock_workers", worker_ids)


def _spec_document(spec: JobSpec, payload: str | None) -> dict[str, Any]:
    moment, delay = split_instant(spec.run_at)
    document: dict[str, Any] = {"identifier": spec.identifier, "payload": payload}
    others = {
        "queue_name": spec.queue_name,
        "run_at": moment,
        "delay": delay,
        "max_attempts": spec.max_attempts,
        "job_key": spec.job_key,
        "job_key_mode": spec.job_key_mode,
        "priority": spec.priority,
        "flags": None if spec.flags is None else list(spec.flags),
    }
    return document | {name: value for name, value in others.items() if value is not None}


def _call(schema: Schema, name: str, document: object) -> Call:
    return Call(one_text_statement(schema, _FILE, name), _encoded(document))


def _encoded(document: object) -> str:
    return msgspec.json.encode(document).decode()


def _jobs(text: str) -> list[Job]:
    return [read_job(row) for row in _rows(text)]


def _rows(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = msgspec.json.decode(text)
    for row in rows:
        for name in _TIMES:
            row[name] = _time(row[name])
    return rows


def _time(text: str | None) -> Any:
    return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)
