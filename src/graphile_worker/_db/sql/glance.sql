-- What somebody who watches a queue wants to know again and again.

-- name: count_writes
-- By the server's statistics, which cost nothing; sessions report to them about once a second.
select
  pg_stat_get_tuples_inserted(class.oid) as added,
  pg_stat_get_tuples_deleted(class.oid) as removed,
  extract(epoch from clock_timestamp())::float8 as at
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
where namespace.nspname = $1 and class.relname = '_private_jobs';

-- name: pause
-- The usual one after a failure.
exp(least(10, job.attempts)) * interval '1 second'

-- name: failed_at
-- No worker writes down when a job fails, but it says when to try again. A time that is too far away for the usual
-- pause tells nothing; only if there are no attempts left, then it was not a worker, and who ends a job by hand says when.
case
    when greatest(job.run_at, job.updated_at) - {pause} <= now()
      then greatest(job.updated_at, greatest(job.run_at, job.updated_at) - {pause})
    when job.attempts >= job.max_attempts then job.updated_at
  end

-- name: written_before
-- How many transactions have begun since the row was last written, which its failure did. That is the order in which
-- jobs failed whatever their pauses are. Beyond half of the circle of transaction ids they seem to be in the future.
case when age(job.xmin) < 0 then 2147483647 else age(job.xmin) end

-- name: list_failures
-- Also of jobs that will be tried again; those that failed last come first. One that runs again was written since.
select
  job.id, coalesce(task.identifier, '') as task_identifier, job.attempts, job.max_attempts,
  {failed_at} as failed_at, {written_before} as written_before, left(job.last_error, 500) as last_error
from {schema}._private_jobs as job
left join {schema}._private_tasks as task on task.id = job.task_id
where job.last_error is not null and job.attempts > 0 and job.locked_at is null
order by written_before, job.id desc
limit $1;
