-- Heartbeats as the Rust port stores them (the objects of its migration 20), so that workers of both languages see each
-- other. Not run if the table exists: then the Rust port has created all of this.

create table {schema}._private_workers (
  id text primary key,
  last_heartbeat_at timestamptz not null,
  started_at timestamptz not null default now(),
  metadata jsonb
);
create index _private_workers_last_heartbeat_at_idx
  on {schema}._private_workers (last_heartbeat_at);

create function {schema}.worker_heartbeat(worker_id text, metadata json default null) returns void
language sql set search_path = pg_catalog, pg_temp as $body$
  insert into {schema}._private_workers as worker (id, last_heartbeat_at, metadata)
    values (worker_id, now(), worker_heartbeat.metadata::jsonb)
    on conflict (id) do update set
      last_heartbeat_at = excluded.last_heartbeat_at,
      metadata = coalesce(excluded.metadata, worker.metadata);
$body$;

create function {schema}.worker_deregister(worker_id text) returns void
language sql set search_path = pg_catalog, pg_temp as $body$
  delete from {schema}._private_workers as worker where worker.id = worker_id;
$body$;

create function {schema}.list_stale_workers(stale_threshold interval) returns table (worker_id text)
language sql stable set search_path = pg_catalog, pg_temp as $body$
  select worker.id
    from {schema}._private_workers as worker
    where worker.last_heartbeat_at < now() - stale_threshold;
$body$;

create function {schema}.list_orphan_locked_workers(stale_threshold interval)
returns table (worker_id text)
language sql stable set search_path = pg_catalog, pg_temp as $body$
  select held.locked_by
    from (
      select locked_by, locked_at from {schema}._private_jobs
      union all
      select locked_by, locked_at from {schema}._private_job_queues
    ) as held
    where held.locked_by is not null
      and held.locked_at < now() - stale_threshold
      and not exists (
        select from {schema}._private_workers as worker where worker.id = held.locked_by
      )
    group by held.locked_by;
$body$;

create function {schema}.recover_dead_worker_jobs(
  worker_ids text[],
  recovery_delay interval default interval '0'
) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $body$
declare
  recovered integer;
begin
  update {schema}._private_jobs as job
    set attempts = greatest(0, job.attempts - 1),
        run_at = greatest(job.run_at, now() + recovery_delay),
        last_error = 'Job recovered after worker interruption',
        locked_at = null,
        locked_by = null
    where job.locked_by = any (worker_ids);
  get diagnostics recovered = row_count;
  update {schema}._private_job_queues as queue
    set locked_at = null, locked_by = null
    where queue.locked_by = any (worker_ids);
  return recovered;
end
$body$;

create function {schema}.delete_stale_workers(worker_ids text[]) returns void
language sql set search_path = pg_catalog, pg_temp as $body$
  delete from {schema}._private_workers as worker where worker.id = any (worker_ids);
$body$;
