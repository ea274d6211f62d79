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

-- name: list_failures
-- Also of jobs that will be tried again; those that failed last come first.
select
  job.id, coalesce(task.identifier, '') as task_identifier, job.attempts, job.max_attempts, job.updated_at,
  left(job.last_error, 500) as last_error
from {schema}._private_jobs as job
left join {schema}._private_tasks as task on task.id = job.task_id
where job.last_error is not null and job.attempts > 0
order by job.updated_at desc, job.id desc
limit $1;
