-- Which workers are alive.
--
-- The Rust port defined the table _private_workers. Python workers add a lease to their metadata: {seconds, fast,
-- epoch, tasks}. It says after how much silence other workers may declare them dead. The row of a dead worker stays
-- for a while, with died_at. All locks under its name are released, including locks that a late statement of the
-- worker still takes.

-- name: epoch
-- In a format that does not depend on the settings of the session.
to_char(pg_postmaster_start_time() at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')

-- name: identify_server
select
  pg_backend_pid() as pid,
  {epoch} as epoch,
  host(inet_server_addr()) as address,
  inet_server_port() as port;

-- name: hold_session
-- The lock is shared, because each session of the worker holds it; it ends with the sessions. The statement does not
-- wait for it, because any role that can connect can take the same lock.
select pg_try_advisory_lock_shared(hashtextextended('graphile_worker alive ' || $1::text, 0));

-- name: set_lock_timeout
-- A heartbeat that waits for a lock must fail, without losing its session.
select set_config('lock_timeout', $1::text, $2::boolean);

-- name: register
insert into {schema}._private_workers as worker (id, last_heartbeat_at, started_at, metadata)
values ($1, clock_timestamp(), clock_timestamp(), $2::text::jsonb)
on conflict (id) do update set last_heartbeat_at = excluded.last_heartbeat_at, metadata = excluded.metadata;

-- name: revive
-- After `register`, in its transaction: it holds the worker's row, so the worker cannot be declared dead in between.
delete from {schema}._private_python_dead_workers where worker_id = $1;

-- name: heartbeat
-- Returns no row if the worker was declared dead, or its row was removed.
update {schema}._private_workers
set
  last_heartbeat_at = clock_timestamp(),
  -- Unchanged metadata is assigned as it is, so that PostgreSQL does not write it again.
  metadata = case when $2::text = '{}' then metadata else metadata || $2::text::jsonb end
where id = $1 and metadata ? 'lease' and not metadata ? 'died_at'
returning true;

-- name: deregister
delete from {schema}._private_workers where id = $1;

-- name: sweep_is_due
-- A dead worker is swept again after 5 seconds, then after twice as long each time, at most every minute.
coalesce(
    -- The server's clock may have been set back.
    (metadata ->> 'swept_at')::timestamptz - clock_timestamp() > interval '1 minute'
    or clock_timestamp() - (metadata ->> 'swept_at')::timestamptz >= least(interval '1 minute', greatest(
      interval '5 seconds', (metadata ->> 'swept_at')::timestamptz - (metadata ->> 'died_at')::timestamptz
    )), metadata ? 'died_at'
  )

-- name: heartbeat_as_text
-- As text because it is only compared, in a format that does not depend on the settings of the session.
to_char(last_heartbeat_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')

-- name: read_heartbeats
select
  id, {heartbeat_as_text} as beat, metadata ? 'died_at' as dead,
  (metadata -> 'lease' ->> 'seconds')::float8 as seconds,
  (metadata -> 'lease' ->> 'fast')::float8 as fast,
  (metadata -> 'lease' ->> 'epoch') = {epoch} as same_epoch,
  {sweep_is_due} as due
from {schema}._private_workers
where jsonb_typeof(metadata -> 'lease' -> 'seconds') = 'number';

-- name: find_lost_sessions
-- Returns the workers that have no session.
select given.id
from (
  select id, hashtextextended('graphile_worker alive ' || id, 0) as key from unnest($1::text[]) as given (id)
) as given
where not exists (
  select from pg_catalog.pg_locks as held
  where held.locktype = 'advisory' and held.objsubid = 1
    and held.database = (select oid from pg_catalog.pg_database where datname = current_database())
    and held.classid::bigint = (given.key >> 32) & 4294967295
    and held.objid::bigint = given.key & 4294967295
);

-- name: set_sweep_timeouts
-- A sweeper that freezes in the middle must not keep other sweepers waiting.
select set_config('idle_in_transaction_session_timeout', '5000', true), set_config('lock_timeout', '5000', true);

-- name: become_sweeper
-- One sweeper at a time in a schema, until the end of the transaction. It locks a row, not an advisory lock: any role
-- that can connect could take an advisory lock, and no worker would be recovered.
select true
from {schema}._private_python_migrations
where id = (select min(id) from {schema}._private_python_migrations)
for update skip locked;

-- name: declare_dead
with declared as (
  update {schema}._private_workers as worker
  set metadata = worker.metadata || jsonb_build_object(
    'died_at', clock_timestamp(), 'declared_by', $4::text, 'silence', given.silence,
    -- The sweeper that declares a worker dead also sweeps it. Other sweepers do so if that does not happen.
    'swept_at', clock_timestamp() + $5::float8 * interval '1 second'
  )
  from unnest($1::text[], $2::text[], $3::float8[]) as given (id, beat, silence)
  where worker.id = given.id and not worker.metadata ? 'died_at'
    and to_char(worker.last_heartbeat_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') = given.beat
  returning worker.id
), recorded as (
  insert into {schema}._private_python_dead_workers (worker_id) select declared.id from declared
  on conflict (worker_id) do nothing
)
select declared.id from declared;

-- name: claim_dead_workers
update {schema}._private_workers
set metadata = metadata || jsonb_build_object('swept_at', clock_timestamp() + $2::float8 * interval '1 second')
where metadata ? 'died_at' and ($1::boolean or {sweep_is_due})
returning id;

-- name: lock_dead_workers
-- Until the sweep ends, none of these workers can register again and claim jobs that the sweep would then release.
select id from {schema}._private_workers where id = any ($1::text[]) and metadata ? 'died_at'
order by id for update;

-- name: release_jobs
-- Fenced by the claims. An attempt is refunded only if the job's key was not taken over meanwhile.
with held as (
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
), released as (
  update {schema}._private_jobs as job
  set
    locked_at = null,
    locked_by = null,
    last_error = held.error,
    attempts = case
      when held.final then job.max_attempts
      when held.refund and job.attempts = held.attempts and job.key is not distinct from held.key
        then greatest(0, job.attempts - 1)
      else job.attempts
    end,
    run_at = case
      when held.delay is null then greatest(now(), job.run_at) + exp(least(10, job.attempts)) * interval '1 second'
      when held.delay = 0 then job.run_at  -- so that it keeps its place in its serial queue
      else greatest(job.run_at, now() + held.delay * interval '1 second')
    end
  from held where job.id = held.id
  returning job.id, held.locked_by, held.locked_at, job.attempts, job.run_at, job.last_error
), failure as (
  insert into {schema}._private_python_failures (job_id, attempts, run_at, last_error_hash, failed_at, worker_died)
  select released.id, released.attempts, released.run_at, hashtextextended(released.last_error, 0), now(), true
  from released
  on conflict (job_id) do update set
    attempts = excluded.attempts, run_at = excluded.run_at,
    last_error_hash = excluded.last_error_hash, failed_at = excluded.failed_at, worker_died = excluded.worker_died,
    error_type = excluded.error_type, traceback = excluded.traceback
)
select released.id, released.locked_by, released.locked_at from released;

-- name: record_died_attempts
-- In the history, for jobs that release_jobs has released. The values that it has changed are given. When the dead worker
-- called the task is not known, only when it claimed the job.
with given as (
  select given.*
  from json_to_recordset($1::text::json) as given (
    id bigint, locked_by text, locked_at timestamptz, error text, attempts smallint, key text, run_at timestamptz,
    details json
  )
), written as (
  insert into {schema}._private_python_runs (
    job_id, attempt, outcome, final, ended_at, started_at, run_at, created_at, task_id, queue_name, worker, key, error,
    payload
  )
  select
    given.id, given.attempts, 5, job.attempts >= job.max_attempts, now(), given.locked_at, given.run_at, job.created_at,
    job.task_id,
    (select queue.queue_name from {schema}._private_job_queues as queue where queue.id = job.job_queue_id),
    given.locked_by, given.key, given.error,
    case when given.details -> 'keep_payload' is not null then job.payload else given.details -> 'payload' end
  from given
  join {schema}._private_jobs as job on job.id = given.id
)
select pg_notify('python:ended', given.id::text) from given where given.details -> 'called' is not null;

-- name: record_released_jobs
-- So that the worker, if it resumes, can tell jobs that it lost from jobs whose outcome was recorded.
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
-- A queue that one of the workers has locked, although it has locked none of the queue's jobs.
queue.locked_by = any ($1::text[]) and queue.id <> all (array(
    select job.job_queue_id from {schema}._private_jobs as job
    where job.locked_by = any ($1::text[]) and job.job_queue_id is not null
  ))

-- name: find_idle_queues
select queue.id from {schema}._private_job_queues as queue where {is_idle_queue};

-- name: release_queues
with free as (
  select queue.id from {schema}._private_job_queues as queue
  where queue.id = any ($2::integer[]) and {is_idle_queue}
  for update skip locked
)
update {schema}._private_job_queues as queue set locked_at = null, locked_by = null
from free where queue.id = free.id
returning queue.id;

-- name: release_shares
-- Of named limits, once the dead worker has no locked job any more. Then other workers may run as many jobs more.
delete from {schema}._private_python_shares as share
where (share.limit_id, share.worker_id) in (
  select known.limit_id, known.worker_id from {schema}._private_python_shares as known
  where known.worker_id = any ($1::text[])
    and not exists (select from {schema}._private_jobs as job where job.locked_by = known.worker_id)
  for update skip locked
)
returning share.worker_id;

-- name: read_held_queues
select id, queue_name, locked_by from {schema}._private_job_queues where locked_by = any ($1::text[]);

-- name: notify
select pg_notify($1, $2);

-- name: notify_jobs
select pg_notify('jobs:insert', json_build_object('r', random(), 'count', $1::integer)::text);

-- name: delete_dead_workers
-- After ten minutes, when no statement of a dead worker can arrive any more.
with deleted as (
  delete from {schema}._private_workers as worker
  where worker.id = any ($1::text[]) and worker.metadata ? 'died_at'
    and clock_timestamp() - (worker.metadata ->> 'died_at')::timestamptz > interval '10 minutes'
    and not exists (select from {schema}._private_jobs as job where job.locked_by = worker.id)
    and not exists (select from {schema}._private_job_queues as queue where queue.locked_by = worker.id)
  returning worker.id
), forgotten as (
  delete from {schema}._private_python_dead_workers as dead
  where dead.worker_id = any (array(select deleted.id from deleted))
)
delete from {schema}._private_python_sessions as session
where session.worker_id = any (array(select deleted.id from deleted));

-- name: forget_dead_workers
-- Dead workers whose rows were removed: by the workers themselves when they stopped, or by the Rust port.
delete from {schema}._private_python_dead_workers as dead
where dead.worker_id = any (array(
  select old.worker_id from {schema}._private_python_dead_workers as old
  where old.died_at < now() - interval '10 minutes'
    and not exists (select from {schema}._private_workers as worker where worker.id = old.worker_id)
  for update skip locked
));

-- name: delete_old_sessions
-- Sessions of workers that send no heartbeats and did not shut down properly. A worker that is alive connects again,
-- and loses nothing.
delete from {schema}._private_python_sessions as session
where session.worker_id = any (array(
  select old.worker_id from {schema}._private_python_sessions as old
  where old.connected_at < now() - interval '7 days'
    and not exists (select from {schema}._private_workers as worker where worker.id = old.worker_id)
  for update skip locked
));

-- name: delete_old_failures
-- Rows of deleted jobs. SKIP LOCKED, so that two workers that do this at once do not deadlock.
delete from {schema}._private_python_failures as failure
where failure.job_id = any (array(
  select old.job_id from {schema}._private_python_failures as old
  where not exists (select from {schema}._private_jobs as job where job.id = old.job_id)
  for update skip locked
));

-- name: seconds_since_heartbeat
extract(epoch from pg_catalog.clock_timestamp() {-} last_heartbeat_at)::double precision

-- name: keeps_heartbeats
-- The table exists only after this library or the Rust port has migrated the schema. The statement refers to the jobs
-- table so that it fails if nothing is installed at all.
select (
  pg_catalog.to_regclass(cast({parameter} as pg_catalog.text) {||} '._private_workers') is not null
)::pg_catalog.text
from (select pg_catalog.count(*) from {schema}._private_jobs where false) as queue;

-- name: select_workers
select
  id, metadata::pg_catalog.text as metadata, started_at, last_heartbeat_at,
  {seconds_since_heartbeat} as silence, 0 as jobs, 0 as queues
from {schema}._private_workers

-- name: read_workers
{select_workers} where id {=} any ($1::pg_catalog.text[]) order by started_at, id;

-- name: read_all_workers
{select_workers} order by started_at, id;

-- name: held
select
    locked_by as id, pg_catalog.count(*) filter (where is_job) as jobs,
    pg_catalog.count(*) filter (where not is_job) as queues
  from (
    select locked_by, true as is_job from {schema}._private_jobs where locked_by is not null
    union all
    select locked_by, false from {schema}._private_job_queues
    where locked_by is not null and locked_by {<>} 'python:paused'
  ) as locked
  group by locked_by

-- name: list_holders
-- Without a table of heartbeats, workers are known by the locks that they hold.
select
  id, null as metadata, null::pg_catalog.timestamptz as started_at,
  null::pg_catalog.timestamptz as last_heartbeat_at, null::double precision as silence, jobs, queues
from ({held}) as held
order by id;

-- name: list_workers
-- Includes workers that hold locks and have no row: Node workers, and Python workers without recovery.
with held as ({held})
select
  coalesce(worker.id, held.id) as id, worker.metadata::pg_catalog.text as metadata, worker.started_at,
  worker.last_heartbeat_at, {seconds_since_heartbeat} as silence, coalesce(held.jobs, 0) as jobs,
  coalesce(held.queues, 0) as queues
from {schema}._private_workers as worker
full join held on held.id {=} worker.id
order by worker.started_at nulls last, id;

-- name: is_stale
-- Graphile Worker's rule: a lock expires after four hours.
locked_at < now() - interval '4 hours'

-- name: find_stale_jobs
select id from {schema}._private_jobs where {is_stale};

-- name: unlock_stale_jobs
-- Jobs are unlocked before queues, and without waiting for row locks.
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
