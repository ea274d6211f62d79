-- What the dashboard reads, on connections of its own with a short statement_timeout.

-- name: limits
-- A user's slow query must not hold up the others. Nothing here writes.
set local statement_timeout = {milliseconds};
set local lock_timeout = 1000;
set local jit = off;
set transaction read only;

-- name: take_one_core
-- Passes over the whole table are shared by all viewers, so they need not be fast, and leave cores to the workers.
set local max_parallel_workers_per_gather = 0;

-- name: read_size
-- How many jobs the table has, by the planner's estimate; -1 if it was never analyzed. And the time.
select class.reltuples::float8 as jobs, pg_relation_size(class.oid) as bytes, clock_timestamp() as now
from pg_catalog.pg_class as class
where class.oid = to_regclass($1::text || '._private_jobs');

-- name: states
    count(*) filter (where job.is_available and job.run_at <= now()) as ready,
    count(*) filter (where job.is_available and job.run_at > now() and job.attempts = 0) as scheduled,
    count(*) filter (where job.is_available and job.run_at > now() and job.attempts > 0) as retrying,
    count(job.locked_at) as running,
    count(*) filter (where not job.is_available and job.locked_at is null) as failed,
    min(greatest(job.run_at, '0001-01-01 00:00:00+00'))
      filter (where job.is_available and job.run_at <= now()) as oldest_due

-- name: count_all
-- Also finds the running jobs, which would take another pass.
select coalesce(task.identifier, '(unknown task ' || counted.task_id || ')') as task, counted.*
from (
  select job.task_id, {states},
    array_agg(job.id) filter (where job.locked_at is not null) as running_ids
  from {schema}._private_jobs as job
  where $1::float4 is null
  group by job.task_id
) as counted
left join {schema}._private_tasks as task on task.id = counted.task_id
order by 1;

-- name: count_some
-- Of $1 percent of the table's pages; the caller scales the numbers.
select coalesce(task.identifier, '(unknown task ' || counted.task_id || ')') as task, counted.*
from (
  select job.task_id, {states}
  from {schema}._private_jobs as job tablesample system ($1::float4)
  group by job.task_id
) as counted
left join {schema}._private_tasks as task on task.id = counted.task_id
order by 1;

-- name: find_running
select job.id from {schema}._private_jobs as job where job.locked_at is not null limit $1;

-- name: find_failed
-- The newest ones.
select job.id from {schema}._private_jobs as job
where not job.is_available and job.locked_at is null
order by job.id desc limit $1;

-- name: locked_queues
array(select queue.id from {schema}._private_job_queues as queue where queue.locked_at is not null)

-- name: count_blocked
select count(*) from (
  select from {schema}._private_jobs as job
  where job.is_available and job.run_at <= now() and job.job_queue_id = any ({locked_queues})
  limit $1
) as blocked;

-- name: count_claimable_queues
-- Free queues with a ready job.
select count(*) from (
  select from {schema}._private_job_queues as queue
  where queue.locked_at is null and exists (
    select from {schema}._private_jobs as job
    where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id and job.run_at <= now()
  )
  limit $1
) as claimable;

-- name: count_queued_ready
select count(*) from (
  select from {schema}._private_jobs as job
  where job.is_available and job.job_queue_id is not null and job.run_at <= now()
  limit $1
) as queued;

-- name: newest_id
-- The id of the job in this place, counted from the newest; null if there are fewer jobs.
select job.id from {schema}._private_jobs as job order by job.id desc offset $1 limit 1;

-- name: state
case
    when job.locked_at is not null then 'running'
    when job.attempts >= job.max_attempts then 'failed'
    when job.run_at > now() and job.attempts > 0 then 'retrying'
    when job.run_at > now() then 'scheduled'
    else 'ready'
  end

-- name: job_columns
  job.id, {state} as state,
  (select task.identifier from {schema}._private_tasks as task where task.id = job.task_id) as task,
  queue.queue_name as queue, job.key, job.priority, job.attempts, job.max_attempts,
  least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as run_at,
  least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as created_at,
  least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as updated_at,
  job.locked_at, job.locked_by as worker,
  case when jsonb_typeof(job.flags) = 'object' then array(select jsonb_object_keys(job.flags) order by 1) end as flags,
  case
    when job.is_available and job.run_at <= now() then queue.locked_by
  end as blocked_by

-- name: list_jobs
select {job_columns}, left(ltrim(job.last_error, E' \n\t'), 500) as error
from {schema}._private_jobs as job
left join {schema}._private_job_queues as queue on queue.id = job.job_queue_id
where true

-- name: read_job
select {job_columns}, job.last_error as error, job.revision, job.payload::text as payload, now() as now,
  case when job.last_error is not null then {fingerprint} end as fingerprint
from {schema}._private_jobs as job
left join {schema}._private_job_queues as queue on queue.id = job.job_queue_id
where job.id = $1;

-- name: read_failure
-- Only while the job is as that failure left it. A running job has one more attempt.
select failure.failed_at, failure.error_type, failure.traceback
from {schema}._private_python_failures as failure
join {schema}._private_jobs as job on job.id = failure.job_id
where failure.job_id = $1 and failure.run_at = job.run_at
  and failure.attempts = job.attempts - case when job.locked_at is null then 0 else 1 end
  and failure.last_error_hash = hashtextextended(job.last_error, 0);

-- name: count_jobs
select job.id from {schema}._private_jobs as job where true

-- name: up_to
select count(*) from ({statement} limit {limit}) as counted

-- name: fingerprint
-- As in failures.sql.
regexp_replace(
    left(split_part(ltrim(job.last_error, E' \n\t'), E'\n', 1), 200),
    '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|0x[0-9a-f]+|\m(?=[a-f]*[0-9])[0-9a-f]{8,}\M|[0-9]+',
    '#', 'gi'
  )

-- name: failed_jobs
-- The newest $1 jobs whose last attempt failed.
select job.id, job.task_id, job.attempts, job.max_attempts, job.run_at, job.last_error
    from {schema}._private_jobs as job
    where job.last_error is not null and job.attempts > 0 and job.locked_at is null
    order by job.id desc
    limit $1

-- name: group_failures
select
  coalesce(task.identifier, '') as task, failed.*
from (
  select
    job.task_id, {fingerprint} as fingerprint, failure.error_type, count(*) as jobs,
    count(*) filter (where job.attempts >= job.max_attempts) as permanent,
    count(*) filter (where failure.failed_at > now() - interval '1 hour') as "1h",
    count(*) filter (where failure.failed_at > now() - interval '3 hours') as "3h",
    count(*) filter (where failure.failed_at > now() - interval '1 day') as "24h",
    count(*) filter (where failure.failed_at > now() - interval '3 days') as "3d",
    count(*) filter (where failure.failed_at > now() - interval '7 days') as "7d",
    max(failure.failed_at) as last_failed_at, max(job.id) as example_id
  from ({failed_jobs}) as job
  left join {schema}._private_python_failures as failure
    on failure.job_id = job.id and failure.attempts = job.attempts and failure.run_at = job.run_at
      and failure.last_error_hash = hashtextextended(job.last_error, 0)
  group by job.task_id, 2, failure.error_type
  order by count(*) desc, max(job.id) desc
  limit $2
) as failed
left join {schema}._private_tasks as task on task.id = failed.task_id
order by failed.jobs desc, failed.example_id desc;

-- name: group_failures_without_times
select
  coalesce(task.identifier, '') as task, failed.*
from (
  select
    job.task_id, {fingerprint} as fingerprint, null::text as error_type, count(*) as jobs,
    count(*) filter (where job.attempts >= job.max_attempts) as permanent,
    null::timestamptz as last_failed_at, max(job.id) as example_id
  from ({failed_jobs}) as job
  group by job.task_id, 2
  order by count(*) desc, max(job.id) desc
  limit $2
) as failed
left join {schema}._private_tasks as task on task.id = failed.task_id
order by failed.jobs desc, failed.example_id desc;

-- name: counted_queues
select
    job.job_queue_id as id, count(*) as jobs,
    count(*) filter (where job.is_available and job.run_at <= now()) as ready,
    count(*) filter (where not job.is_available and job.locked_at is null) as failed,
    min(greatest(job.run_at, '0001-01-01 00:00:00+00'))
      filter (where job.is_available and job.run_at <= now()) as oldest_due
  from {schema}._private_jobs as job

-- name: queue_columns
queue.queue_name as queue, queue.locked_by, queue.locked_at, coalesce(counted.jobs, 0) as jobs,
  coalesce(counted.ready, 0) as ready, coalesce(counted.failed, 0) as failed, counted.oldest_due

-- name: top_queues
-- The $1 queues with the most jobs, and $1 locked ones.
with counted as materialized (
  {counted_queues}
  where job.job_queue_id is not null
  group by job.job_queue_id
), chosen as (
  (select counted.id from counted order by counted.jobs desc, counted.id limit $1)
  union
  (select queue.id from {schema}._private_job_queues as queue where queue.locked_at is not null limit $1)
)
select {queue_columns}
from chosen
join {schema}._private_job_queues as queue on queue.id = chosen.id
left join counted on counted.id = chosen.id
order by (queue.locked_at is not null) desc, jobs desc, queue.queue_name
limit $1;

-- name: find_queues
with chosen as materialized (
  select queue.* from {schema}._private_job_queues as queue
  where queue.queue_name ilike $2
  order by queue.queue_name
  limit $1
)
select {queue_columns}
from chosen as queue
left join (
  {counted_queues}
  where job.job_queue_id = any (array(select chosen.id from chosen))
  group by job.job_queue_id
) as counted on counted.id = queue.id
order by jobs desc, queue.queue_name;

-- name: count_queue_names
select count(*) from (select from {schema}._private_job_queues limit $1) as queue;

-- name: list_last_errors
-- The last error of each task, among the newest failures.
select distinct on (job.task_id)
  (select task.identifier from {schema}._private_tasks as task where task.id = job.task_id) as task,
  left(job.last_error, 500) as error
from ({failed_jobs}) as job
order by job.task_id, job.id desc;

-- name: list_running
select job.id,
  (select task.identifier from {schema}._private_tasks as task where task.id = job.task_id) as task,
  job.locked_by as worker, extract(epoch from clock_timestamp() - job.locked_at)::float8 as seconds
from {schema}._private_jobs as job
where job.id = any ($1::bigint[]) and job.locked_by is not null
order by job.locked_at;

-- name: list_queue_locks
select queue.locked_by as worker, count(*) as queues
from {schema}._private_job_queues as queue
where queue.locked_by is not null
group by queue.locked_by;

-- name: list_failed
-- As dashboard.sql has it, of the newest jobs.
select job.id,
  coalesce((select task.identifier from {schema}._private_tasks as task where task.id = job.task_id), '') as task,
  job.attempts, job.max_attempts, left(job.last_error, 500) as error, failure.failed_at
from ({failed_jobs}) as job
left join {schema}._private_python_failures as failure
  on failure.job_id = job.id and failure.attempts = job.attempts and failure.run_at = job.run_at
    and failure.last_error_hash = hashtextextended(job.last_error, 0)
order by failure.failed_at desc nulls last, job.id desc
limit $2;

-- name: list_failed_without_times
select job.id,
  coalesce((select task.identifier from {schema}._private_tasks as task where task.id = job.task_id), '') as task,
  job.attempts, job.max_attempts, left(job.last_error, 500) as error, null::timestamptz as failed_at
from ({failed_jobs}) as job
order by job.id desc
limit $2;

-- name: read_cron_runs
-- The last attempts of a recurring task's jobs that the history has. Their payloads name the schedule, but need not be
-- kept; their task has one schedule in almost all queues.
select run.job_id, run.outcome, coalesce(run.started_at, run.ended_at) as at, run.duration::float8 as duration,
  extract(epoch from run.started_at - run.run_at)::float8 as lateness
from {schema}._private_python_runs as run
where run.task_id = (select task.id from {schema}._private_tasks as task where task.identifier = $1)
order by run.ended_at desc
limit $2;

-- name: has_object
select coalesce(
  has_table_privilege(to_regclass($1::text || '.' || $2::text)::oid, 'select'), false
);

-- name: count_unused_queues
select count(*) from {schema}._private_job_queues as queue
where queue.locked_at is null and not exists (
  select from {schema}._private_jobs as job where job.job_queue_id = queue.id
);

-- name: count_locks
select
  (select count(*) from {schema}._private_jobs as job where job.locked_by = any ($1::text[])) as jobs,
  (select count(*) from {schema}._private_job_queues as queue where queue.locked_by = any ($1::text[])) as queues;
