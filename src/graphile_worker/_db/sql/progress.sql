-- The progress that running jobs report: see own/011_statistics.sql.

-- name: reads_progress
select coalesce(pg_catalog.has_table_privilege(
  pg_catalog.to_regclass($1::pg_catalog.text {||} '._private_python_progress'), 'select'
), false);

-- name: store_progress
-- Ignores a report of a run that has lost its job: another worker has claimed the job since, or has reported for it.
with given as (
  select given.*
  from rows from (
    pg_catalog.unnest($2::pg_catalog.int8[]), pg_catalog.unnest($3::pg_catalog.timestamptz[]),
    pg_catalog.unnest($4::pg_catalog.text[]), pg_catalog.unnest($5::pg_catalog.timestamptz[])
  ) as given (job_id, locked_at, value, at)
), stored as (
  insert into {schema}._private_python_progress as stored (job_id, locked_at, value, at)
  select given.job_id, given.locked_at, given.value::pg_catalog.json, given.at
  from given
  cross join lateral (
    select from {schema}._private_jobs as job
    where job.id {=} given.job_id and (
      job.locked_at is null or (job.locked_at {=} given.locked_at and job.locked_by {=} $1::pg_catalog.text)
    )
    offset 0  -- looks up job by job, whatever the planner assumes about the sizes of the tables
  ) as job
  on conflict (job_id) do update set
    locked_at = excluded.locked_at, value = excluded.value, at = excluded.at
  where stored.locked_at {<=} excluded.locked_at
  returning stored.job_id
)
select job_id from stored;

-- name: delete_progress
-- Deletes the progress of jobs that no longer exist: of these jobs, or with null of all jobs.
delete from {schema}._private_python_progress as progress
where ($1::pg_catalog.int8[] is null or progress.job_id {=} any ($1::pg_catalog.int8[]))
  and not exists (select from {schema}._private_jobs as job where job.id {=} progress.job_id);

-- name: read_progress
select progress.job_id, progress.value::pg_catalog.text as value, progress.at
from {schema}._private_python_progress as progress
where progress.job_id {=} any ($1::pg_catalog.int8[])
  and exists (select from {schema}._private_jobs as job where job.id {=} progress.job_id);
