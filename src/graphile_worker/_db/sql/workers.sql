-- Which workers live.
--
-- A row of _private_workers is the Rust port's. Ours say in their metadata what others may conclude from their silence:
-- lease {seconds, fast, epoch, tasks}. One that was declared dead stays for a while, with died_at: whatever is locked
-- under its name is to be freed, also what one of its statements locks even later.

-- name: epoch
-- In a form that no setting of the session changes.
to_char(pg_postmaster_start_time() at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')

-- name: meet
select
  pg_backend_pid() as pid,
  {epoch} as epoch,
  host(inet_server_addr()) as address,
  inet_server_port() as port;

-- name: hold_session
-- Shared, because each of the worker's sessions holds it. Gone when they are. Never waited for, because any role that
-- can connect can take the same lock.
select pg_try_advisory_lock_shared(hashtextextended('graphile_worker alive ' || $1::text, 0));

-- name: do_not_wait_long
-- A beat that waits for somebody's lock is to fail, and its session to stay.
select set_config('lock_timeout', $1::text, $2::boolean);

-- name: register
insert into {schema}._private_workers as worker (id, last_heartbeat_at, started_at, metadata)
values ($1, clock_timestamp(), clock_timestamp(), $2::text::jsonb)
on conflict (id) do update set last_heartbeat_at = excluded.last_heartbeat_at, metadata = excluded.metadata;

-- name: beat
-- Nothing comes back if others take it for dead, or somebody removed its row.
update {schema}._private_workers
set
  last_heartbeat_at = clock_timestamp(),
  -- As it stands, if it stays: then it is not written anew.
  metadata = case when $2::text = '{}' then metadata else metadata || $2::text::jsonb end
where id = $1 and metadata ? 'lease' and not metadata ? 'died_at'
returning true;

-- name: deregister
delete from {schema}._private_workers where id = $1;

-- name: dead_is_due
-- Those to be swept again: after a while, then after twice as long, at last every minute.
coalesce(
    -- Or somebody has set the clock back.
    (metadata ->> 'swept_at')::timestamptz - clock_timestamp() > interval '1 minute'
    or clock_timestamp() - (metadata ->> 'swept_at')::timestamptz >= least(interval '1 minute', greatest(
      interval '5 seconds', (metadata ->> 'swept_at')::timestamptz - (metadata ->> 'died_at')::timestamptz
    )), metadata ? 'died_at'
  )

-- name: beat_as_text
-- Because it is only compared; in a form that no setting of the session changes.
to_char(last_heartbeat_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')

-- name: read_beats
select
  id, {beat_as_text} as beat, metadata ? 'died_at' as dead,
  (metadata -> 'lease' ->> 'seconds')::float8 as seconds,
  (metadata -> 'lease' ->> 'fast')::float8 as fast,
  (metadata -> 'lease' ->> 'epoch') = {epoch} as same_epoch,
  {dead_is_due} as due
from {schema}._private_workers
where jsonb_typeof(metadata -> 'lease' -> 'seconds') = 'number';

-- name: find_lost_sessions
-- Of these workers, those none of whose sessions is there.
select given.id
from (select id, hashtextextended('graphile_worker alive ' || id, 0) as key from unnest($1::text[]) as given (id)) as given
where not exists (
  select from pg_catalog.pg_locks as held
  where held.locktype = 'advisory' and held.objsubid = 1
    and held.database = (select oid from pg_catalog.pg_database where datname = current_database())
    and held.classid::bigint = (given.key >> 32) & 4294967295
    and held.objid::bigint = given.key & 4294967295
);

-- name: do_not_dawdle
-- A sweeper that freezes in the middle must not keep the others from it.
select set_config('idle_in_transaction_session_timeout', '5000', true), set_config('lock_timeout', '5000', true);

-- name: become_sweeper
-- One at a time in a schema, until the end of the transaction. A row, and not an advisory lock: any role that can connect
-- could take that, and no worker would be recovered.
select true
from {schema}._private_python_migrations
where id = (select min(id) from {schema}._private_python_migrations)
for update skip locked;

-- name: declare_dead
update {schema}._private_workers as worker
set metadata = worker.metadata || jsonb_build_object(
  'died_at', clock_timestamp(), 'declared_by', $4::text, 'silence', given.silence,
  -- Whoever declares it dead sweeps it; others do if that does not happen.
  'swept_at', clock_timestamp() + $5::float8 * interval '1 second'
)
from unnest($1::text[], $2::text[], $3::float8[]) as given (id, beat, silence)
where worker.id = given.id and not worker.metadata ? 'died_at'
  and to_char(worker.last_heartbeat_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') = given.beat
returning worker.id;

-- name: take_dead
update {schema}._private_workers
set metadata = metadata || jsonb_build_object('swept_at', clock_timestamp() + $2::float8 * interval '1 second')
where metadata ? 'died_at' and ($1::boolean or {dead_is_due})
returning id;

-- name: lock_dead
-- Until we are done none of them can come back to life, and so claim something that we would free.
select id from {schema}._private_workers where id = any ($1::text[]) and metadata ? 'died_at'
order by id for update;

-- name: free_jobs
-- By the fence of their claims. An attempt is given back only if nobody has taken the job's key over meanwhile.
with ours as (
  select given.*
  from json_to_recordset($1::text::json) as given (
    id bigint, locked_by text, locked_at timestamptz, error text, delay float8, final boolean, refund boolean,
    attempts smallint, key text
  )
  cross join lateral (
    select from {schema}._private_jobs as job
    where job.id = given.id and job.locked_by = given.locked_by and job.locked_at = given.locked_at
    for update skip locked
  ) as job
)
update {schema}._private_jobs as job
set
  locked_at = null,
  locked_by = null,
  last_error = ours.error,
  attempts = case
    when ours.final then job.max_attempts
    when ours.refund and job.attempts = ours.attempts and job.key is not distinct from ours.key
      then greatest(0, job.attempts - 1)
    else job.attempts
  end,
  run_at = case
    when ours.delay is null then greatest(now(), job.run_at) + exp(least(10, job.attempts)) * interval '1 second'
    when ours.delay = 0 then job.run_at  -- and so it keeps its place among the others of its queue
    else greatest(job.run_at, now() + ours.delay * interval '1 second')
  end
from ours where job.id = ours.id
returning job.id, ours.locked_by, ours.locked_at;

-- name: note_taken
-- So that the worker, if it wakes up, knows what it has lost and what was recorded.
update {schema}._private_workers as worker
set metadata = worker.metadata || jsonb_build_object(
  'taken', coalesce(worker.metadata -> 'taken', '[]'::jsonb) || taken.jobs
)
from (
  select given.locked_by, jsonb_agg(jsonb_build_object('id', given.id, 'locked_at', given.locked_at)) as jobs
  from unnest($1::bigint[], $2::text[], $3::timestamptz[]) as given (id, locked_by, locked_at)
  group by given.locked_by
) as taken
where worker.id = taken.locked_by;

-- name: is_idle_queue
-- Locked by one of them, though none of its jobs is.
queue.locked_by = any ($1::text[]) and queue.id <> all (array(
    select job.job_queue_id from {schema}._private_jobs as job
    where job.locked_by = any ($1::text[]) and job.job_queue_id is not null
  ))

-- name: find_idle_queues
select queue.id from {schema}._private_job_queues as queue where {is_idle_queue};

-- name: free_queues
with free as (
  select queue.id from {schema}._private_job_queues as queue
  where queue.id = any ($2::integer[]) and {is_idle_queue}
  for update skip locked
)
update {schema}._private_job_queues as queue set locked_at = null, locked_by = null
from free where queue.id = free.id
returning queue.id;

-- name: read_held_queues
select id, queue_name, locked_by from {schema}._private_job_queues where locked_by = any ($1::text[]);

-- name: tell_of_jobs
select pg_notify('jobs:insert', json_build_object('r', random(), 'count', $1::integer)::text);

-- name: forget_dead
-- When nothing of theirs can come any more.
with forgotten as (
  delete from {schema}._private_workers as worker
  where worker.id = any ($1::text[]) and worker.metadata ? 'died_at'
    and clock_timestamp() - (worker.metadata ->> 'died_at')::timestamptz > interval '10 minutes'
    and not exists (select from {schema}._private_jobs as job where job.locked_by = worker.id)
    and not exists (select from {schema}._private_job_queues as queue where queue.locked_by = worker.id)
  returning worker.id
)
delete from {schema}._private_python_sessions as session
where session.worker_id = any (array(select forgotten.id from forgotten));

-- name: forget_old_sessions
-- Of workers that keep no heartbeat and did not end as they should. One that lives connects again, and loses nothing.
delete from {schema}._private_python_sessions as session
where session.worker_id = any (array(
  select old.worker_id from {schema}._private_python_sessions as old
  where old.connected_at < now() - interval '7 days'
    and not exists (select from {schema}._private_workers as worker where worker.id = old.worker_id)
  for update skip locked
));

-- name: silence
extract(epoch from pg_catalog.clock_timestamp() {-} last_heartbeat_at)::double precision

-- name: keeps_heartbeats
-- Not before we or the Rust port have been there. The jobs are named so that this fails where there is no queue at all.
select pg_catalog.to_regclass($1::pg_catalog.text {||} '._private_workers') is not null
from (select pg_catalog.count(*) from {schema}._private_jobs where false) as queue;

-- name: read_workers
select
  id, metadata::pg_catalog.text as metadata, started_at, last_heartbeat_at, {silence} as silence, 0 as jobs,
  0 as queues
from {schema}._private_workers where $1::pg_catalog.text[] is null or id {=} any ($1::pg_catalog.text[])
order by started_at, id;

-- name: held
select
    locked_by as id, pg_catalog.count(*) filter (where is_job) as jobs,
    pg_catalog.count(*) filter (where not is_job) as queues
  from (
    select locked_by, true as is_job from {schema}._private_jobs where locked_by is not null
    union all
    select locked_by, false from {schema}._private_job_queues where locked_by is not null
  ) as locked
  group by locked_by

-- name: list_holders
-- Where nobody keeps heartbeats, workers are known by what they hold.
select
  id, null as metadata, null::pg_catalog.timestamptz as started_at,
  null::pg_catalog.timestamptz as last_heartbeat_at, null::double precision as silence, jobs, queues
from ({held}) as held
order by id;

-- name: list_workers
-- Also those that hold something and have no row: Node's, and ours without recovery.
with held as ({held})
select
  coalesce(worker.id, held.id) as id, worker.metadata::pg_catalog.text as metadata, worker.started_at,
  worker.last_heartbeat_at, {silence} as silence, coalesce(held.jobs, 0) as jobs, coalesce(held.queues, 0) as queues
from {schema}._private_workers as worker
full join held on held.id {=} worker.id
order by worker.started_at nulls last, id;

-- name: is_stale
-- Graphile Worker's rule: no worker holds a lock for longer than four hours.
locked_at < now() - interval '4 hours'

-- name: find_stale_jobs
select id from {schema}._private_jobs where {is_stale};

-- name: unlock_stale_jobs
-- Jobs before queues, and without waiting.
with stale as (
  select id from {schema}._private_jobs where id = any ($1::bigint[]) and {is_stale}
  for update skip locked
)
update {schema}._private_jobs as job
set locked_at = null, locked_by = null, run_at = greatest(job.run_at, now())
from stale where job.id = stale.id
returning job.id;

-- name: find_stale_queues
select id from {schema}._private_job_queues where {is_stale};

-- name: unlock_stale_queues
with stale as (
  select id from {schema}._private_job_queues where id = any ($1::integer[]) and {is_stale}
  for update skip locked
)
update {schema}._private_job_queues as queue set locked_at = null, locked_by = null
from stale where queue.id = stale.id
returning queue.id;
