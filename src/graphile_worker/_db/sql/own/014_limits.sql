-- How much may run at once: limits and pauses.

-- Named limits. Workers write what their code declares. What was set at run time has priority.
create table if not exists {schema}._private_python_limits (
  id integer generated always as identity primary key,
  name text not null unique,
  tasks text[] not null default '{}',  -- that have had the limit, for people
  concurrency integer check (concurrency > 0),
  concurrency_override integer check (concurrency_override >= 0),
  -- When a worker found due jobs and no room; and a worker that has no share at all, while it waits.
  wanted_at timestamptz,
  wanted_by text
) with (fillfactor = 50);

-- The share of each worker: how many jobs it may hold. The exchange keeps its rules: see 012_exchange.sql.
create table if not exists {schema}._private_python_shares (
  limit_id integer not null,
  worker_id text not null,
  held integer not null,
  primary key (limit_id, worker_id)
) with (fillfactor = 50);

-- What is paused: everything, a task or a serial queue. Workers of this library read the table at their start, after a
-- notification and regularly, and claim nothing that is paused.
--
-- A paused queue is also locked, by 'python:paused', so that workers in other languages do not claim its jobs either.
-- Its locked_at is far in the future, so that the lock never expires. The lock may replace the lock of a worker that
-- runs a job of the queue. That lock is kept here, and given back if the job still runs when the queue is resumed.
create table if not exists {schema}._private_python_pauses (
  kind text not null check (kind in ('all', 'task', 'queue')),
  name text not null check ((name = '') = (kind = 'all')),
  paused_at timestamptz not null,
  until timestamptz,
  reason text,
  paused_by text not null,
  locked_by text,
  locked_at timestamptz,
  primary key (kind, name)
);

create or replace function {schema}._private_python_pause(
  kind text,
  name text default '',
  until timestamptz default null,
  reason text default null,
  paused_by text default session_user::text
) returns {schema}._private_python_pauses
language plpgsql set search_path = pg_catalog, pg_temp as $body$
#variable_conflict use_column
declare
  pause {schema}._private_python_pauses;
  queue record;
begin
  insert into {schema}._private_python_pauses as known (kind, name, paused_at, until, reason, paused_by)
    values (
      _private_python_pause.kind, coalesce(_private_python_pause.name, ''), clock_timestamp(),
      _private_python_pause.until, _private_python_pause.reason,
      coalesce(_private_python_pause.paused_by, session_user::text)
    )
    on conflict (kind, name) do update
      set until = excluded.until, reason = excluded.reason, paused_by = excluded.paused_by
    returning known.* into pause;
  while pause.kind = 'queue' loop
    insert into {schema}._private_job_queues (queue_name)
      select pause.name
      where not exists (select from {schema}._private_job_queues as known where known.queue_name = pause.name)
      on conflict do nothing;
    select known.id, known.locked_by, known.locked_at into queue
      from {schema}._private_job_queues as known where known.queue_name = pause.name for update;
    continue when not found;  -- a cleanup has removed it
    if queue.locked_by is distinct from 'python:paused' then
      update {schema}._private_python_pauses as known
        set locked_by = queue.locked_by, locked_at = queue.locked_at
        where known.kind = pause.kind and known.name = pause.name;
      update {schema}._private_job_queues as known
        set locked_by = 'python:paused', locked_at = '9999-01-01 00:00:00+00'
        where known.id = queue.id;
    end if;
    exit;
  end loop;
  perform pg_notify('_private_python_pause', '');
  return pause;
end
$body$;

-- Returns null if it was not paused. Otherwise returns the worker whose lock on the queue was given back, or an empty
-- text.
create or replace function {schema}._private_python_resume(
  kind text,
  name text default '',
  expired boolean default false  -- only if the end of the pause is over; does not wait for a locked row
) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $body$
#variable_conflict use_column
declare
  pause {schema}._private_python_pauses;
  queue record;
  holder record;
  result text;
begin
  if expired then
    if _private_python_resume.kind = 'queue' then
      -- Before the pause is removed: if the queue is busy, both stay as they are until the next try.
      select known.id, known.locked_by into queue
        from {schema}._private_job_queues as known
        where known.queue_name = _private_python_resume.name
        for update skip locked;
      if not found and exists (
        select from {schema}._private_job_queues as known where known.queue_name = _private_python_resume.name
      ) then
        return null;
      end if;
    end if;
    select * into pause from {schema}._private_python_pauses as known
      where known.kind = _private_python_resume.kind and known.name = _private_python_resume.name
        and known.until <= clock_timestamp()
      for update skip locked;
    if not found then
      return null;
    end if;
  else
    select * into pause from {schema}._private_python_pauses as known
      where known.kind = _private_python_resume.kind
        and known.name = coalesce(_private_python_resume.name, '')
      for update;
  end if;
  if pause.kind is not null then
    delete from {schema}._private_python_pauses as known where known.kind = pause.kind and known.name = pause.name;
    result := '';
  end if;
  if _private_python_resume.kind = 'queue' then
    -- An exchange that records a job of the queue locks the queue's row too. So after this statement, either the job
    -- is gone, or its worker finds the queue's lock given back and releases it together with the job.
    select known.id, known.locked_by into queue
      from {schema}._private_job_queues as known
      where known.queue_name = _private_python_resume.name and known.locked_by = 'python:paused'
      for update;
    if found then
      result := '';
      -- No job of the queue was claimed since the pause began, so none runs if the queue was not locked then.
      select job.locked_by,
          case when job.locked_by = pause.locked_by then pause.locked_at else job.locked_at end as locked_at
        into holder
        from {schema}._private_jobs as job
        where (pause.kind is null or pause.locked_by is not null)
          and job.job_queue_id = queue.id and job.locked_at is not null
        order by job.locked_at limit 1;
      if found then
        result := holder.locked_by;
      end if;
      update {schema}._private_job_queues as known
        set locked_by = holder.locked_by, locked_at = holder.locked_at
        where known.id = queue.id;
    end if;
  end if;
  if result is not null then
    perform pg_notify('_private_python_pause', '');
    -- Also for workers in other languages.
    perform pg_notify('jobs:insert', json_build_object('r', random())::text);
  end if;
  return result;
end
$body$;
