-- Completing a job in a transaction of its task.

-- name: fence
-- The worker's claim of the job. The parameter is a JSON object: the job's id, its locked_by and locked_at, the
-- transaction that has deleted the job before and, in the library's own transactions, how long the transaction may be
-- idle from now on. Until the end of the transaction no sweeper can release the job, so a worker that freezes now must not
-- keep the row locked. If the history keeps the attempt, the object also has its start, its duration and details.
fence as materialized (
  select
    given.id, given.locked_by, given.locked_at, given.idle, given.started_at, given.duration, given.details,
    case
      when given.before {=} pg_catalog.txid_current_if_assigned() then 'this transaction'
      else pg_catalog.txid_status(given.before)
    end as before
  from pg_catalog.json_to_record({parameter}::pg_catalog.text::pg_catalog.json)
    as given (
      id pg_catalog.int8, locked_by pg_catalog.text, locked_at pg_catalog.timestamptz, idle pg_catalog.text,
      before pg_catalog.int8, started_at pg_catalog.timestamptz, duration pg_catalog.float4, details pg_catalog.json
    )
)

-- name: is_held
-- If another transaction of the task has deleted the job and is still open, the statement would wait for it forever.
job.id {=} (select fence.id from fence)
  and job.locked_by {=} (select fence.locked_by from fence)
  and job.locked_at {=} (select fence.locked_at from fence)
  and (select fence.before is null or fence.before {<>} 'in progress' from fence)

-- name: answer
'completed', (select pg_catalog.count(*) from completed),
  'transaction', pg_catalog.txid_current(),
  'before', fence.before,
  'is_gone', not exists (select from {schema}._private_jobs as job where job.id {=} fence.id),
  'idle', case
    when fence.idle is not null
      then pg_catalog.set_config('idle_in_transaction_session_timeout', fence.idle, true)
  end

-- name: complete
-- Deletes the job if the worker still holds it.
with {fence}, completed as (
  delete from {schema}._private_jobs as job where {is_held} returning job.id
)
select pg_catalog.json_build_object({answer})::pg_catalog.text from fence;

-- name: complete_and_record
-- Like complete, and writes a row for the history.
with {fence}, completed as (
  delete from {schema}._private_jobs as job where {is_held}
  returning
    job.id, job.attempts, job.run_at, job.created_at, job.task_id, job.job_queue_id, job.locked_by, job.key,
    job.payload
), written as (
  insert into {schema}._private_python_runs (
    job_id, attempt, outcome, final, ended_at, started_at, duration, run_at, created_at, task_id, queue_name, worker,
    key, no_result, payload
  )
  select
    job.id, coalesce((fence.details {->>} 'attempt')::pg_catalog.int2, job.attempts), 1, true, pg_catalog.clock_timestamp(),
    fence.started_at, fence.duration, job.run_at, job.created_at, job.task_id,
    (select queue.queue_name from {schema}._private_job_queues as queue where queue.id {=} job.job_queue_id),
    job.locked_by, coalesce(fence.details {->>} 'key', job.key), fence.details {->>} 'no_result',
    case
      when (fence.details {->} 'keep_payload') is not null then job.payload
      else fence.details {->} 'payload'
    end
  from completed as job
  cross join fence
)
select pg_catalog.json_build_object(
  {answer},
  'notified', case
    when (fence.details {->} 'called') is not null and exists (select from completed)
      then pg_catalog.pg_notify('python:ended', fence.id::pg_catalog.text)::pg_catalog.text
  end
)::pg_catalog.text
from fence;

-- name: find_out
-- Whether a transaction that deleted the job is committed, and whether the job's row is still there. The row is locked
-- while a transaction that has deleted it is open. After a commit it is still there if the transaction was rolled back to
-- a savepoint before. A test runs everything in one transaction, which counts as committed.
select
  case
    when $2::pg_catalog.int8 {=} pg_catalog.txid_current_if_assigned() then 'committed'
    else pg_catalog.txid_status($2::pg_catalog.int8)
  end as status,
  case
    when not exists (select from {schema}._private_jobs as job where job.id {=} $1) then 'gone'
    when exists (
      select from {schema}._private_jobs as job where job.id {=} $1 for key share skip locked
    ) then 'left'
    else 'locked'
  end as job;
