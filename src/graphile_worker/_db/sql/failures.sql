-- When jobs failed the last time, as this library recorded it. own/012_exchange.sql explains the table.

-- name: reads_failures
-- False if only Node or an older release of this library installed the schema, or if the role lacks the privilege.
select (coalesce(pg_catalog.has_table_privilege(failures.oid, 'select'), false)
  and exists (
    select from pg_catalog.pg_attribute as attribute
    where attribute.attrelid {=} failures.oid and attribute.attname {=} 'traceback'
  ))::pg_catalog.text
from (
  select pg_catalog.to_regclass(
    cast({parameter} as pg_catalog.text) {||} '._private_python_failures'
  )::pg_catalog.oid as oid
) as failures;

-- name: writes_failures
select (coalesce(pg_catalog.has_table_privilege(failures.oid, 'select')
  and pg_catalog.has_table_privilege(failures.oid, 'insert')
  and pg_catalog.has_table_privilege(failures.oid, 'update')
  and pg_catalog.has_table_privilege(failures.oid, 'delete'), false)
  and exists (
    select from pg_catalog.pg_attribute as attribute
    where attribute.attrelid {=} failures.oid and attribute.attname {=} 'traceback'
  ))::pg_catalog.text
from (
  select pg_catalog.to_regclass(
    cast({parameter} as pg_catalog.text) {||} '._private_python_failures'
  )::pg_catalog.oid as oid
) as failures;

-- name: record_failures
-- The parameter is a JSON document: the ids of the jobs, and the type of their errors.
with given as (
  select input.ids, input.error_type
  from pg_catalog.json_to_record(cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)) as input (
    ids pg_catalog.json, error_type pg_catalog.text
  )
), failed as (
  select job_id::pg_catalog.int8 as id
  from given
  cross join lateral pg_catalog.json_array_elements_text(given.ids) as job_id
), recorded as (
  insert into {schema}._private_python_failures (
    job_id, attempts, run_at, last_error_hash, failed_at, error_type
  )
  select job.id, job.attempts, job.run_at, pg_catalog.hashtextextended(job.last_error, 0), pg_catalog.now(),
    (select given.error_type from given)
  from {schema}._private_jobs as job
  where job.id {=} any (array(select failed.id from failed))
  on conflict (job_id) do update set
    attempts = excluded.attempts, run_at = excluded.run_at,
    last_error_hash = excluded.last_error_hash, failed_at = excluded.failed_at,
    worker_died = excluded.worker_died, error_type = excluded.error_type, traceback = excluded.traceback
  returning job_id
)
select pg_catalog.count(*)::pg_catalog.text from recorded;

-- name: fingerprint
-- The first line of the error without its numbers, so that equal errors of different jobs are one group.
regexp_replace(
    left(split_part(ltrim(job.last_error, E' \n\t'), E'\n', 1), 200),
    '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|0x[0-9a-f]+|\m(?=[a-f]*[0-9])[0-9a-f]{8,}\M|[0-9]+',
    '#', 'gi'
  )

-- name: list_groups
-- Jobs whose last attempt failed, grouped by task and error. A recorded failure counts only while the job is as that
-- failure left it.
select
  coalesce(task.identifier, '') as task_identifier, failed.fingerprint, failed.error_type, failed.jobs,
  failed.permanent, failed.last_failed_at, failed.example_id
from (
  select
    job.task_id, {fingerprint} as fingerprint, max(failure.error_type) as error_type, count(*) as jobs,
    count(*) filter (where job.attempts >= job.max_attempts) as permanent,
    max(failure.failed_at) as last_failed_at, max(job.id) as example_id
  from {schema}._private_jobs as job
  left join {schema}._private_python_failures as failure
    on failure.job_id = job.id and failure.attempts = job.attempts and failure.run_at = job.run_at
      and failure.last_error_hash = hashtextextended(job.last_error, 0)
  where job.last_error is not null and job.attempts > 0 and job.locked_at is null
    and ($1::text is null or job.task_id = (
      select task.id from {schema}._private_tasks as task where task.identifier = $1
    ))
  group by job.task_id, 2
  order by count(*) desc, max(job.id) desc
  limit $2
) as failed
left join {schema}._private_tasks as task on task.id = failed.task_id
order by failed.jobs desc, failed.example_id desc;

-- name: read_died
-- The jobs that these workers have locked and whose previous run also ended with the death of its worker.
select job.id
from {schema}._private_jobs as job
inner join {schema}._private_python_failures as failure on failure.job_id {=} job.id
where job.locked_by {=} any ($1::pg_catalog.text[])
  and failure.worker_died
  and failure.attempts {=} (job.attempts {-} 1)
  and failure.last_error_hash {=} pg_catalog.hashtextextended(job.last_error, 0);
