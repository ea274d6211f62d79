-- Outcomes that people record, in the history: jobs that were completed, failed or cancelled by hand. On any connection,
-- so every name is qualified. A row is written only if workers keep history too, or if a caller waits for the job.

-- name: writes_history
-- False if the schema is of an older release, or if the role lacks a privilege.
select (coalesce(pg_catalog.has_table_privilege(runs.oid, 'select')
  and pg_catalog.has_table_privilege(runs.oid, 'insert'), false))::pg_catalog.text
from (
  select pg_catalog.to_regclass(
    cast({parameter} as pg_catalog.text) {||} '._private_python_runs'
  )::pg_catalog.oid as oid
) as runs;

-- name: columns
job_id, attempt, outcome, final, ended_at, run_at, created_at, task_id, queue_name, key, error

-- name: is_kept
(pg_catalog.jsonb_exists(coalesce(job.flags, '{}'), 'python:called')
    or exists (select from {schema}._private_python_runs))

-- name: record_changed
-- Jobs that are still there. The parameter is a JSON object: their ids, and the outcome.
with input as materialized (
  select given.outcome,
    array(select id::pg_catalog.int8 from pg_catalog.json_array_elements_text(given.ids) as id) as ids
  from pg_catalog.json_to_record(cast(cast({parameter} as pg_catalog.text) as pg_catalog.json))
    as given (ids pg_catalog.json, outcome pg_catalog.int2)
), job as materialized (
  select job.*, input.outcome
  from {schema}._private_jobs as job
  cross join input
  where job.id {=} any ((select input.ids from input)::pg_catalog.int8[]) and {is_kept}
), written as (
  insert into {schema}._private_python_runs ({columns})
  select
    job.id, 0, job.outcome, true, pg_catalog.now(), job.run_at, job.created_at, job.task_id,
    (select queue.queue_name from {schema}._private_job_queues as queue where queue.id {=} job.job_queue_id),
    job.key, job.last_error
  from job
  returning job_id
), notified as (
  select pg_catalog.pg_notify('python:ended', job.id::pg_catalog.text) as done
  from job where pg_catalog.jsonb_exists(coalesce(job.flags, '{}'), 'python:called')
)
select ((select pg_catalog.count(*) from written) {+} (select pg_catalog.count(done) from notified))::pg_catalog.text;

-- name: record_completed
-- Jobs that are deleted. The parameter is a JSON list of them.
with job as materialized (
  select job.*
  from pg_catalog.json_to_recordset(cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)) as job (
    id pg_catalog.int8, run_at pg_catalog.timestamptz, created_at pg_catalog.timestamptz,
    task_id pg_catalog.int4, queue_name pg_catalog.text, key pg_catalog.text, flags pg_catalog.jsonb
  )
  where {is_kept}
), written as (
  insert into {schema}._private_python_runs ({columns})
  select
    job.id, 0, 1, true, pg_catalog.now(), job.run_at, job.created_at, job.task_id, job.queue_name, job.key, null
  from job
  returning job_id
), notified as (
  select pg_catalog.pg_notify('python:ended', job.id::pg_catalog.text) as done
  from job where pg_catalog.jsonb_exists(coalesce(job.flags, '{}'), 'python:called')
)
select ((select pg_catalog.count(*) from written) {+} (select pg_catalog.count(done) from notified))::pg_catalog.text;
