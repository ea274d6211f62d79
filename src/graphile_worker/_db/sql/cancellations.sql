-- Cancelling jobs. Nothing in here waits for a lock: what cannot be changed now is left for another look.

-- name: is_idle
-- As the functions that administer jobs have it: a lock counts for four hours.
(job.locked_at is null or job.locked_at {<} (pg_catalog.now() {-} interval '4 hours'))

-- name: last_error
-- In the words in which a worker records the outcome.
pg_catalog.concat_ws(': ', 'Cancelled', case when request.reason {<>} '' then request.reason end)

-- name: cancel
-- A job that runs is not locked, so that its worker can record what becomes of it, however long this transaction
-- takes. One that is being claimed, or that somebody's transaction has, is treated as one that runs.
with request as (
  select $2::pg_catalog.text as reason
), idle as materialized (
  select job.id from {schema}._private_jobs as job
  where job.id {=} any ($1::bigint[]) and {is_idle} and job.attempts {<} job.max_attempts
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
  where job.id {=} any ($1::bigint[]) and not ({is_idle} and job.attempts {>=} job.max_attempts)
    and job.id {<>} all (array(select idle.id from idle))
  returning job_id
), told as (
  select pg_catalog.pg_notify($3, $4) from requested limit 1
)
select id, 'cancelled' as answer, false as runs from cancelled
union all
select job_id, 'requested', (
    select job.locked_at is not null from {schema}._private_jobs as job where job.id {=} requested.job_id
  )
from requested, told;

-- name: read_requests
select id from {schema}._private_python_cancellations order by id;

-- name: settle
-- What was asked for is done to jobs that nobody runs any more, and forgotten where there is nothing left to do.
-- Returned is what has to wait. Given ids of requests, all others are left alone.
with pending as materialized (
  select request.*, job.locked_by, job.locked_at, job.id is null or job.is_over or (
    -- Somebody has rescheduled it, or added it anew, since it was cancelled: that holds. But not if that happened
    -- while it ran, for then there is another job.
    job.updated_at {>} request.requested_at and (job.locked_at is null or job.locked_at {>=} job.updated_at)
  ) as is_void
  from {schema}._private_python_cancellations as request
  left join lateral (
    select job.id, job.locked_by, job.locked_at, job.updated_at,
      {is_idle} and job.attempts {>=} job.max_attempts as is_over
    from {schema}._private_jobs as job
    where job.id {=} request.job_id
    offset 0  -- job by job, whatever the planner thinks of the sizes of tables
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
), forgotten as (
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
