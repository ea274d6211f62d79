-- Removing failed jobs and unused names.

-- name: read_isolation
select pg_catalog.current_setting('transaction_isolation');

-- name: read_lock_timeout
select pg_catalog.current_setting('lock_timeout');

-- name: set_lock_timeout
select pg_catalog.set_config('lock_timeout', $1, true);

-- name: lock_tasks
-- Each add_job writes to this table before it adds the job. So while this lock is held, no add_job is running that has
-- read a task or queue and has not used it yet.
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

-- name: delete_permafailed_jobs_and_failures
with deleted as (
  delete from {schema}._private_jobs as job
  where job.locked_at is null and job.attempts {>=} job.max_attempts
  returning job.id
), deleted_failures as (
  delete from {schema}._private_python_failures as failure
  where failure.job_id {=} any (array(select deleted.id from deleted))
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
