-- Cancelling jobs. No statement here waits for a lock: a row that cannot be changed now is left for the next call.

-- name: is_idle
-- The same rule as in the functions that administer jobs: a lock expires after four hours.
(job.locked_at is null or job.locked_at {<} (pg_catalog.now() {-} interval '4 hours'))

-- name: last_error
-- The same text that a worker records for a cancelled job.
pg_catalog.concat_ws(': ', 'Cancelled', case when request.reason {<>} '' then request.reason end)

-- name: cancel
-- The row of a running job is not locked, so that its worker can record the outcome however long this transaction
-- takes. A job that is being claimed, or that another transaction has locked, is treated as running.
-- The parameter is a JSON document, and so is the result: a list of [id, answer, whether the job is running].
with request as (
  select
    array(
      select job_id::pg_catalog.int8 from pg_catalog.json_array_elements_text(input.ids) as job_id
    ) as ids,
    input.reason, input.channel, input.schema
  from pg_catalog.json_to_record(cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)) as input (
    ids pg_catalog.json, reason pg_catalog.text, channel pg_catalog.text, schema pg_catalog.text
  )
), idle as materialized (
  select job.id from {schema}._private_jobs as job
  where job.id {=} any ((select request.ids from request)::pg_catalog.int8[]) and {is_idle} and job.attempts {<} job.max_attempts
  for update skip locked
), cancelled as (
  update {schema}._private_jobs as job
  set attempts = job.max_attempts, last_error = {last_error}, updated_at = pg_catalog.now()
  from request
  where job.id {=} any (array(select idle.id from idle))
  returning job.id
), requested as (
  insert into {schema}._private_python_cancellations (job_id, reason)
  select job.id, request.reason
  from {schema}._private_jobs as job
  cross join request
  where job.id {=} any ((select request.ids from request)::pg_catalog.int8[])
    and not ({is_idle} and job.attempts {>=} job.max_attempts)
    and job.id {<>} all (array(select idle.id from idle))
  returning job_id
), notified as (
  select pg_catalog.pg_notify(request.channel, request.schema) from requested, request limit 1
)
select coalesce(
  pg_catalog.json_agg(pg_catalog.json_build_array(result.id, result.answer, result.runs)), '[]'
)::pg_catalog.text
from (
  select id, 'cancelled' as answer, false as runs from cancelled
  union all
  select job_id, 'requested', (
      select job.locked_at is not null from {schema}._private_jobs as job where job.id {=} requested.job_id
    )
  from requested, notified
) as result;

-- name: read_requests
select id from {schema}._private_python_cancellations order by id;

-- name: settle
-- Cancels requested jobs that no worker runs any more, and deletes the requests that have nothing left to cancel.
-- Returns the requests that have to wait. If ids of requests are given, all other requests are left alone.
with pending as materialized (
  select request.*, job.locked_by, job.locked_at, job.id is null or job.is_over or (
    -- The job was rescheduled, or added again by its key, after the request: the later call wins. Not if that
    -- happened while the job was running, because then the key belongs to another job.
    job.updated_at {>} request.requested_at and (job.locked_at is null or job.locked_at {>=} job.updated_at)
  ) as is_void
  from {schema}._private_python_cancellations as request
  left join lateral (
    select job.id, job.locked_by, job.locked_at, job.updated_at,
      {is_idle} and job.attempts {>=} job.max_attempts as is_over
    from {schema}._private_jobs as job
    where job.id {=} request.job_id
    offset 0  -- looks up job by job, whatever the planner assumes about the sizes of the tables
  ) as job on true
  where $1::pg_catalog.int8[] is null or request.id {=} any ($1::pg_catalog.int8[])
), request as materialized (
  select pending.id, pending.job_id, pending.reason
  from pending
  cross join lateral (
    select from {schema}._private_jobs as job
    where job.id {=} pending.job_id and {is_idle} and job.attempts {<} job.max_attempts
      and job.updated_at {<=} pending.requested_at
    for update skip locked
  ) as job
  where not pending.is_void
), cancelled as (
  update {schema}._private_jobs as job
  set
    attempts = job.max_attempts,
    updated_at = pg_catalog.now(),
    last_error = (
      select {last_error} from request where request.job_id {=} job.id order by request.id limit 1
    )
  where job.id {=} any (array(select request.job_id from request))
  returning job.id, job.attempts, job.run_at, job.last_error
), failure as (
  insert into {schema}._private_python_failures (job_id, attempts, run_at, last_error_hash, failed_at, error_type)
  select
    cancelled.id, cancelled.attempts, cancelled.run_at, pg_catalog.hashtextextended(cancelled.last_error, 0),
    pg_catalog.now(), 'Cancel'
  from cancelled
  on conflict (job_id) do update set
    attempts = excluded.attempts, run_at = excluded.run_at,
    last_error_hash = excluded.last_error_hash, failed_at = excluded.failed_at,
    worker_died = excluded.worker_died, error_type = excluded.error_type, traceback = excluded.traceback
), deleted as (
  delete from {schema}._private_python_cancellations as done
  where done.id {=} any (array(
    select found.id from {schema}._private_python_cancellations as found
    where found.id {=} any (array(
      select pending.id from pending where pending.is_void
      union all
      select request.id from request
    ))
    for update skip locked
  ))
)
select pending.job_id, pending.reason, pending.locked_by, pending.locked_at
from pending
where not pending.is_void and pending.id {<>} all (array(select request.id from request))
order by pending.id;
