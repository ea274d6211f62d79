-- Pauses: see own/014_limits.sql.

-- name: input
cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)

-- name: reads_pauses
select coalesce(pg_catalog.has_table_privilege(
  pg_catalog.to_regclass(cast({parameter} as pg_catalog.text) {||} '._private_python_pauses'), 'select'
), false)::pg_catalog.text;

-- name: pause_json
pg_catalog.json_build_object(
    'kind', pause.kind, 'name', pause.name, 'paused_at', pg_catalog.timezone('UTC', pause.paused_at),
    'until', pg_catalog.timezone('UTC', pause.until), 'reason', pause.reason, 'paused_by', pause.paused_by
  )

-- name: list_pauses
-- A pause whose end is over counts as ended, even if no worker has removed it yet; but a queue is locked until then.
select coalesce(pg_catalog.json_agg({pause_json} order by pause.kind, pause.name), '[]')::pg_catalog.text
from {schema}._private_python_pauses as pause
where cast({parameter} as pg_catalog.text) is not null
  and (pause.kind {=} 'queue' or pause.until is null or pause.until {>} pg_catalog.clock_timestamp());

-- name: pause
select {pause_json}::pg_catalog.text
from pg_catalog.json_to_record({input}) as input (
  kind pg_catalog.text, name pg_catalog.text, until pg_catalog.timestamptz, delay pg_catalog.float8,
  reason pg_catalog.text, paused_by pg_catalog.text
)
cross join lateral {schema}._private_python_pause(
  input.kind, input.name,
  coalesce(input.until, pg_catalog.clock_timestamp() {+} (input.delay {*} interval '1 second')),
  input.reason, input.paused_by
) as pause;

-- name: resume
-- A list of null, or of the worker that has got the lock of the queue back, or of an empty text.
select pg_catalog.json_build_array(resumed)::pg_catalog.text
from pg_catalog.json_to_record({input}) as input (kind pg_catalog.text, name pg_catalog.text)
cross join lateral {schema}._private_python_resume(input.kind, input.name) as resumed;

-- name: read_lock
select locked_at from {schema}._private_job_queues where queue_name = $1 and locked_by = $2;

-- name: release_idle_queue
-- Another library's worker may have ended its job in a statement that began before the queue's lock was given back. Such
-- a statement does not see the lock. Workers of other libraries end a job and release its queue in one statement, so a
-- queue that they have locked has a running job.
with idle as (
  select queue.id from {schema}._private_job_queues as queue
  where queue.queue_name = $1 and queue.locked_by = $2 and queue.locked_at = $3
    and not exists (
      select from {schema}._private_jobs as job where job.job_queue_id = queue.id and job.locked_at is not null
    )
  for update skip locked
)
update {schema}._private_job_queues as queue set locked_by = null, locked_at = null
from idle where queue.id = idle.id
returning pg_notify('jobs:insert', json_build_object('r', random())::text);

-- name: read_pauses
-- For workers. `seconds` until the end of the pause; null if it has none.
select kind, name, reason, paused_by, extract(epoch from until - clock_timestamp())::float8 as seconds
from {schema}._private_python_pauses;

-- name: end_expired
-- The queues whose locks were given back to workers that still run a job of them.
select ended.name, ended.holder
from (
  select expired.name, {schema}._private_python_resume(expired.kind, expired.name, true) as holder
  from {schema}._private_python_pauses as expired
  where expired.until <= clock_timestamp()
  offset 0
) as ended
where ended.holder <> '';
