-- Removing what nobody needs any more.

-- name: read_isolation
select pg_catalog.current_setting('transaction_isolation');

-- name: read_lock_timeout
select pg_catalog.current_setting('lock_timeout');

-- name: set_lock_timeout
select pg_catalog.set_config('lock_timeout', $1, true);

-- name: lock_tasks
-- Each add_job writes to the table before it adds the job, so with this lock there is none under way that has
-- seen a task or queue and not yet used it.
lock table {schema}._private_tasks in share row exclusive mode;

-- name: lock_queues
lock table {schema}._private_job_queues in share row exclusive mode;

-- name: delete_permafailed_jobs
with deleted as (
  delete from {schema}._private_jobs as job
  where job.locked_at is null and job.attempts {>=} job.max_attempts
  returning 1
)
select pg_catalog.count(*) from deleted;

-- name: delete_task_identifiers
with deleted as (
  delete from {schema}._private_tasks as task
  where task.identifier {<>} all ($1::pg_catalog.text[])
    and not exists (select from {schema}._private_jobs as job where job.task_id {=} task.id)
  returning 1
)
select pg_catalog.count(*) from deleted;

-- name: delete_queues
with deleted as (
  delete from {schema}._private_job_queues as queue
  where queue.locked_at is null
    and not exists (select from {schema}._private_jobs as job where job.job_queue_id {=} queue.id)
  returning 1
)
select pg_catalog.count(*) from deleted;
