-- What `graphile-worker top` and other monitors read every few seconds.

-- name: count_writes
-- From the server's statistics, which cost nothing. Sessions report to them about once a second.
select
  pg_stat_get_tuples_inserted(class.oid) as added,
  pg_stat_get_tuples_deleted(class.oid) as removed,
  extract(epoch from clock_timestamp())::float8 as at
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
where namespace.nspname = $1 and class.relname = '_private_jobs';

-- name: failed_at
-- As in jobs.sql.
(
    select failure.failed_at from {schema}._private_python_failures as failure
    where failure.job_id = job.id and failure.attempts = job.attempts and failure.run_at = job.run_at
      and failure.last_error_hash = hashtextextended(job.last_error, 0)
  )

-- name: written_before
-- How many transactions have begun since the row was last written, which is when the job failed. This gives the order
-- in which jobs failed, whatever their delays are. The age turns negative after half of all transaction ids.
case when age(job.xmin) < 0 then 2147483647 else age(job.xmin) end

-- name: failed_jobs
-- Includes jobs that will be retried. Running jobs are left out: the claim has written their rows since.
from {schema}._private_jobs as job
left join {schema}._private_tasks as task on task.id = job.task_id
where job.last_error is not null and job.attempts > 0 and job.locked_at is null
order by written_before, job.id desc
limit $1

-- name: list_failures
-- The latest failures come first.
select
  job.id, coalesce(task.identifier, '') as task_identifier, job.attempts, job.max_attempts,
  {failed_at} as failed_at, {written_before} as written_before, left(job.last_error, 500) as last_error
{failed_jobs};

-- name: list_failures_without_times
-- The same where no times are recorded.
select
  job.id, coalesce(task.identifier, '') as task_identifier, job.attempts, job.max_attempts,
  null::timestamptz as failed_at, {written_before} as written_before, left(job.last_error, 500) as last_error
{failed_jobs};
