-- The installed schema. Written by `make db-dump`; do not edit.

CREATE SCHEMA graphile_worker;

CREATE TYPE graphile_worker.job_spec AS (
	identifier text,
	payload json,
	queue_name text,
	run_at timestamp with time zone,
	max_attempts smallint,
	job_key text,
	priority smallint,
	flags text[]
);

CREATE FUNCTION graphile_worker._private_python_add_v1(specs text) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  return (
select coalesce(pg_catalog.json_agg(-- PostgreSQL has infinity, and years that Python's datetime does not have.
pg_catalog.json_build_object(
    'id', job.id,
    'task_id', job.task_id,
    'job_queue_id', job.job_queue_id,
    'payload', job.payload::pg_catalog.text,
    'priority', job.priority,
    'run_at', pg_catalog.timezone('UTC', least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00')),
    'attempts', job.attempts,
    'max_attempts', job.max_attempts,
    'last_error', job.last_error,
    'created_at', pg_catalog.timezone('UTC', least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00')),
    'updated_at', pg_catalog.timezone('UTC', least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00')),
    'key', job.key,
    'locked_at', pg_catalog.timezone('UTC', job.locked_at),
    'locked_by', job.locked_by,
    'revision', job.revision,
    'flags', job.flags::pg_catalog.text,
    'is_available', job.is_available,
    'state', case
      when job.locked_at is not null then 'running'
      when job.attempts operator(pg_catalog.>=) job.max_attempts then 'failed'
      when job.run_at operator(pg_catalog.>) pg_catalog.now() then 'scheduled'
      else 'ready'
    end,
    'task_identifier',
    (select task.identifier from "graphile_worker"._private_tasks as task where task.id operator(pg_catalog.=) job.task_id),
    'queue_name',
    (select queue.queue_name from "graphile_worker"._private_job_queues as queue where queue.id operator(pg_catalog.=) job.job_queue_id)
  ) order by spec.place), '[]')::pg_catalog.text
from rows from (
  pg_catalog.json_to_recordset(cast(cast(specs as pg_catalog.text) as pg_catalog.json)) as (identifier pg_catalog.text, payload pg_catalog.text, queue_name pg_catalog.text, run_at pg_catalog.timestamptz,
  delay pg_catalog.float8, max_attempts pg_catalog.int2, job_key pg_catalog.text, job_key_mode pg_catalog.text,
  priority pg_catalog.int2, flags pg_catalog.text[])
) with ordinality as spec (
  identifier, payload, queue_name, run_at, delay, max_attempts, job_key, job_key_mode, priority, flags, place
)
cross join lateral -- A job without an id was not added: npm's function returns it while a worker claims the job with the same key.
"graphile_worker".add_job(
    identifier => spec.identifier,
    payload => spec.payload::pg_catalog.json,
    queue_name => spec.queue_name,
    run_at => coalesce(spec.run_at, pg_catalog.now() operator(pg_catalog.+) (spec.delay operator(pg_catalog.*) interval '1 second')),
    max_attempts => spec.max_attempts,
    job_key => spec.job_key,
    priority => spec.priority,
    flags => spec.flags,
    job_key_mode => coalesce(spec.job_key_mode, 'replace')
  ) as job
  );
exception
  -- A cancelled statement would abort the caller's transaction; and repeated, it would ignore the cancellation or the time
  -- limit. So the library raises the error of this text.
  when query_canceled or lock_not_available then
    return '!' operator(pg_catalog.||) sqlstate operator(pg_catalog.||) ' ' operator(pg_catalog.||) sqlerrm;
  -- `others` does not include the second one.
  when others or assert_failure then
    if pg_catalog.left(sqlstate, 2) operator(pg_catalog.=) '40' then
      raise;  -- a serialization failure or a deadlock: only repeating the whole transaction helps
    end if;
    return '';
end
$$;

CREATE FUNCTION graphile_worker._private_python_exchange_v4(worker text, job_ids bigint[], job_locks timestamp with time zone[], queue_ids integer[], queue_locks timestamp with time zone[], completed integer, changes json, task_ids integer[], wanted integer, startable integer, run_length integer, queues_first boolean, forbidden_flags text[], as_of timestamp with time zone, mark_priority smallint, mark_run_at timestamp with time zone, mark_id bigint, after_queue integer, session bigint, careful boolean, left_out bigint[], flags_priority smallint DEFAULT NULL::smallint, flags_run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, flags_id bigint DEFAULT NULL::bigint, run_starts timestamp with time zone[] DEFAULT NULL::timestamp with time zone[], run_durations real[] DEFAULT NULL::real[], run_details text[] DEFAULT NULL::text[], rooms integer[] DEFAULT NULL::integer[], task_limits integer[] DEFAULT NULL::integer[], limit_ids integer[] DEFAULT NULL::integer[], job_counts integer[] DEFAULT NULL::integer[]) RETURNS TABLE(kind text, id bigint, task_id integer, job_queue_id integer, queue_name text, payload text, priority smallint, run_at timestamp with time zone, attempts smallint, max_attempts smallint, last_error text, created_at timestamp with time zone, updated_at timestamp with time zone, key text, revision integer, flags text, locked_at timestamp with time zone, contended boolean, next_due timestamp with time zone, next_queue integer, cost double precision, withheld boolean)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    AS $$
#variable_conflict use_column
declare
  recorded bigint[] := '{}';
  recorded_locks timestamptz[] := '{}';
  kept integer[] := '{}';            -- queues that the worker holds, and may claim a job from now
  paused integer[];                  -- queues of recorded jobs that are paused
  released integer[];
  spent integer[] := '{}';           -- queues from which this call claims nothing more
  claimed_queues integer[] := '{}';
  missing integer := greatest(wanted, 0);
  marked constant boolean := mark_priority is not null;
  level smallint;
  first_level smallint;
  level_without_queue smallint;
  level_with_queue smallint;
  -- Tasks that have jobs without a queue in this level. The jobs that have flags are in another index: their tasks are
  -- here with a minus sign.
  tasks_without_queue integer[];
  tasks_with_queue integer[];
  -- If flags are forbidden: jobs that have flags, but none of those.
  flagged_ids bigint[] := '{}';
  flagged_priorities smallint[] := '{}';
  flagged_times timestamptz[] := '{}';
  chosen_flagged bigint[] := '{}';
  flagged_level smallint;
  walk_priority smallint;
  walk_run_at timestamptz;
  walk_id bigint;
  walk_size integer;
  from_priority smallint := coalesce(mark_priority, -32768);
  from_run_at timestamptz := coalesce(mark_run_at, '-infinity');
  from_id bigint := coalesce(mark_id, 0);
  continued_length integer;
  page_size integer;
  page_full boolean;
  candidate_ids bigint[];
  candidate_queues integer[];
  candidate_times timestamptz[];
  chosen_ids bigint[];
  chosen_queues integer[];
  quota_tasks integer[];
  quotas bigint[];
  expected integer;
  obtained integer[];
  locked bigint[];
  locked_queues integer[];
  last_chances bigint[];             -- those of them that have no attempt left after this one
  passed_over bigint[] := '{}';      -- jobs of this level that cannot be claimed
  busy bigint[] := '{}';             -- jobs of the worker's queues that another transaction has locked
  passed_tasks integer[] := '{}';    -- tasks that have no more claimable jobs in this level
  tries integer := 0;
  count integer;
  runs "graphile_worker"._private_python_runs[];          -- rows for the history that are not written yet
  changed_runs "graphile_worker"._private_python_runs[];
  is_contended boolean := false;
  is_withheld boolean := false;
  due timestamptz;
  queue_cursor integer := 0;
  previous_timeout text;
  ignored text;
  started timestamptz;
  claimed bigint[];                  -- this and the following variables are used only with `careful`
  candidate bigint;
  why text;
  code text;
  origin text;
  refused bigint[];
  refusals text[];
  refusal_states text[];
  refusal_origins text[];
  -- The following variables are used only with limits: each expression costs about a microsecond in each call.
  all_tasks integer[];            -- as given; task_ids loses those that have no room
  task_rooms integer[];           -- of all_tasks
  limit_sizes integer[];          -- this and the following variables are parallel to limit_ids
  limit_totals integer[];         -- sums of the shares of all workers
  limit_shares integer[];         -- of this worker
  limit_rooms integer[];
  earlier_task_rooms integer[];
  earlier_limit_rooms integer[];
  limit_wishes integer[];         -- how many jobs the worker could claim beyond its share
  limit_starves boolean[];        -- whether another worker has no share, and waits
  limit_waits boolean[];          -- whether a worker waited recently
  limit_turns integer[];          -- ids of the limits whose rows this call has locked
  used integer[];
  claimed_task integer;
  place integer;
  share integer;
  former_shares integer[];        -- limit_shares before this call
  is_wanted boolean;              -- whether a job is due that the worker could run
  is_short boolean;               -- whether another call had locked a limit's row
  is_trimmed boolean;
begin
  -- The row is locked until the commit. A worker that connects again waits for the commit when it raises the
  -- generation, so it knows that none of its calls is still running. A call that arrives even later finds no row, and
  -- does nothing.
  if session is not null then
    perform from "graphile_worker"._private_python_sessions as latest
      where latest.worker_id = worker and latest.generation = session
      for share nowait;
    if not found then
      raise exception 'The worker has opened a newer session' using errcode = 'GWGUP';
    end if;
  end if;

  -- Record ------------------------------------------------------------------------------------------------------

  if careful then
    set constraints all immediate;
    run_length := 1;
    for place in 1 .. cardinality(job_ids) loop
      begin
        return query
          select one.*
          from "graphile_worker"._private_python_exchange_v4(
            worker, job_ids[place:place], job_locks[place:place],
            case when queue_ids[place] is not null then queue_ids[place:place] end,
            case when queue_ids[place] is not null then queue_locks[place:place] end,
            case when place <= completed then 1 else 0 end,
            case when place > completed then json_build_array(changes -> (place - completed - 1)) end,
            '{}', 0, null, 1, false, null, as_of, null, null, null, null, null, false, null,
            run_starts => run_starts[place:place], run_durations => run_durations[place:place],
            run_details => run_details[place:place]
          ) as one
          where one.kind in ('busy', 'lost');
      exception when others then
        get stacked diagnostics why = message_text, code = returned_sqlstate, origin = pg_exception_context;
        if left(code, 2) in ('53', '57', '58') then
          raise;  -- the server lacks a resource or shuts down: the job is not the cause
        end if;
        kind := 'refused';
        id := job_ids[place];
        locked_at := job_locks[place];
        last_error := why;
        key := code;
        payload := origin;
        return next;
      end;
    end loop;
    job_ids := '{}';
    id := null;
    locked_at := null;
    last_error := null;
    key := null;
    payload := null;
  end if;

  if cardinality(job_ids) > 0 then
    if queue_ids is not null then
      select coalesce(array_agg(queue.id) filter (where queue.is_kept), '{}'),
          coalesce(array_agg(queue.id) filter (where not queue.is_kept), '{}')
        into kept, paused
        from unnest(queue_ids, queue_locks) as given (id, locked_at)
        cross join lateral (
          select queue.id, queue.locked_by = worker as is_kept from "graphile_worker"._private_job_queues as queue
          where queue.id = given.id
            and (queue.locked_by = worker and queue.locked_at = given.locked_at or queue.locked_by = 'python:paused')
          for update skip locked
        ) as queue;
    end if;

    recorded := null;
    if completed = 0 then
      recorded := '{}';
    elsif queue_ids is null
        or cardinality(kept) + cardinality(paused) = cardinality(array_remove(queue_ids, null)) then
      -- The usual case: the worker holds the jobs and their queues. The jobs are deleted without being locked first, which
      -- would cost as much again. If another transaction has locked a job, or the worker no longer holds it, this is
      -- undone.
      previous_timeout := current_setting('lock_timeout');
      begin
        ignored := set_config('lock_timeout', '1', true);
        if run_starts is null then
          -- Looked up by id and deleted by ctid, because that leaves the planner only one plan. A job that was released
          -- or claimed in between has another locked_by, and this worker claims nothing meanwhile.
          delete from "graphile_worker"._private_jobs as job
            where job.locked_by = worker and job.ctid = any (array(
              select found.place
              from unnest(job_ids[1:completed], job_locks[1:completed]) as given (id, locked_at)
              cross join lateral (
                select job.ctid as place from "graphile_worker"._private_jobs as job
                where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
                offset 0
              ) as found
            ));
        else
          -- The same with rows for the history. The joins are by place and by id, because without hash joins any other
          -- join would compare each job with each job.
          with found as materialized (
            select
              job.*, given.started_at, given.duration, given.details::json as details
            from unnest(
              job_ids[1:completed], job_locks[1:completed], run_starts[1:completed], run_durations[1:completed],
              run_details[1:completed]
            ) as given (id, locked_at, started_at, duration, details)
            cross join lateral (
              select job.ctid as place, job.id, job.attempts, job.run_at, job.created_at, job.task_id,
                job.job_queue_id, job.key, job.payload
              from "graphile_worker"._private_jobs as job
              where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
              offset 0
            ) as job
          ), written as (
            insert into "graphile_worker"._private_python_runs (
              job_id, attempt, outcome, final, ended_at, started_at, duration, run_at, created_at, task_id, queue_name,
              worker, key, result, no_result, payload
            )
            select
              found.id, coalesce((found.details ->> 'attempt')::smallint, found.attempts), 1, true, now(),
              found.started_at, found.duration, found.run_at, found.created_at, found.task_id,
              case when found.job_queue_id is not null then (
                select queue.queue_name from "graphile_worker"._private_job_queues as queue where queue.id = found.job_queue_id
              ) end,
              worker, coalesce(found.details ->> 'key', found.key), found.details -> 'result',
              found.details ->> 'no_result',
              case when found.details -> 'keep_payload' is not null then found.payload else found.details -> 'payload' end
            from found
            where found.started_at is not null or found.details is not null
          )
          delete from "graphile_worker"._private_jobs as job
            where job.locked_by = worker and job.ctid = any (array(select found.place from found));
        end if;
        get diagnostics count = row_count;
        if count < completed then
          raise lock_not_available;
        end if;
        recorded := job_ids[1:completed];
        recorded_locks := job_locks[1:completed];
        ignored := set_config('lock_timeout', previous_timeout, true);
      exception when lock_not_available then
        recorded := null;
      end;
    end if;

    if recorded is null then
      select coalesce(array_agg(job.id), '{}'), coalesce(array_agg(given.locked_at), '{}'),
          array_agg(row(
            job.id, coalesce((given.details ->> 'attempt')::smallint, job.attempts), 1, true, now(), given.started_at,
            given.duration, job.run_at, job.created_at, job.task_id,
            (select queue.queue_name from "graphile_worker"._private_job_queues as queue where queue.id = job.job_queue_id),
            worker, coalesce(given.details ->> 'key', job.key), null, null, null, given.details -> 'result',
            given.details ->> 'no_result',
            case when given.details -> 'keep_payload' is not null then job.payload else given.details -> 'payload' end
          )::"graphile_worker"._private_python_runs) filter (where given.started_at is not null or given.details is not null)
        into recorded, recorded_locks, runs
        from (
          select id, locked_at, queue_ids[place] as queue_id, queue_locks[place] as queue_locked_at,
            run_starts[place] as started_at, run_durations[place] as duration, run_details[place]::json as details
          from unnest(job_ids[1:completed], job_locks[1:completed]) with ordinality as given (id, locked_at, place)
        ) as given
        cross join lateral (
          select job.id, job.attempts, job.run_at, job.created_at, job.task_id, job.job_queue_id, job.key,
            job.payload
          from "graphile_worker"._private_jobs as job
          where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
            -- Together with its queue, unless the worker no longer holds the queue.
            and (given.queue_id is null or given.queue_id = any (kept || paused) or not exists (
              select from "graphile_worker"._private_job_queues as queue
              where queue.id = given.queue_id and (
                queue.locked_by = worker and queue.locked_at = given.queue_locked_at
                or queue.locked_by = 'python:paused'
              )
            ))
          for update skip locked
        ) as job;
      delete from "graphile_worker"._private_jobs as job where job.id = any (recorded);
    end if;

    if changes is not null then
      -- No condition compares each change with each job: thousands of jobs may be returned at once.
      with change as (
        select *, queue_ids[completed + place] as queue_id, queue_locks[completed + place] as queue_locked_at,
          run_starts[completed + place] as started_at, run_durations[completed + place] as duration,
          run_details[completed + place]::json as details
        from rows from (
          json_to_recordset(changes) as (
            id bigint, locked_at timestamptz, action text, error text, delay float8, at timestamptz,
            final boolean, "left" integer[], attempts smallint, key text, type text, traceback text, cancelled boolean
          )
        ) with ordinality as given (
          id, locked_at, action, error, delay, at, final, "left", attempts, key, type, traceback, cancelled, place
        )
      ), ours as materialized (
        select change.*, job.attempts as attempt, job.run_at as due,
          case when change.details -> 'keep_payload' is not null then job.payload else change.details -> 'payload' end
            as kept_payload
        from change
        cross join lateral (
          select job.id, job.attempts, job.run_at, job.payload from "graphile_worker"._private_jobs as job
          where job.id = change.id and job.locked_by = worker and job.locked_at = change.locked_at
            and (change.queue_id is null or change.queue_id = any (kept || paused) or not exists (
              select from "graphile_worker"._private_job_queues as queue
              where queue.id = change.queue_id and (
                queue.locked_by = worker and queue.locked_at = change.queue_locked_at
                or queue.locked_by = 'python:paused'
              )
            ))
          for update skip locked
        ) as job
      ), changed as (
        update "graphile_worker"._private_jobs as job
          set
            locked_at = null,
            locked_by = null,
            last_error = coalesce(change.error, job.last_error),
            run_at = case
              when change.action <> 'fail' then greatest(job.run_at, now() + change.delay * interval '1 second')
              when change.final then job.run_at
              when change.at is not null then greatest(now(), change.at)
              else greatest(now(), job.run_at)
                + coalesce(change.delay, exp(least(10, job.attempts))) * interval '1 second'
            end,
            -- The items of a batch that are left, as they are stored. There may be many thousands of them. A filter,
            -- unlike a condition, cannot become a join, which without hash joins would be a loop. So the positions are
            -- hashed.
            payload = case
              when change."left" is null or json_typeof(job.payload) <> 'array' then job.payload
              else coalesce((
                select json_agg(item.value order by item.place)
                  filter (where item.place in (select unnest(change."left")))
                from json_array_elements(job.payload) with ordinality as item (value, place)
              ), job.payload)
            end,
            -- The attempt is refunded, except to a job whose key was taken over or removed while it was running: that
            -- call set the attempts to the maximum, so that the job does not run again.
            attempts = case
              when change.final then job.max_attempts
              when change.action <> 'fail' and job.attempts = change.attempts
                  and job.key is not distinct from change.key
                then greatest(0, job.attempts - 1)
              else job.attempts
            end
          from ours as change
          where job.id = any (array[change.id])
          returning job.id, change.locked_at as claimed_at, job.attempts, job.max_attempts, job.run_at, job.last_error,
            job.created_at, job.task_id, job.job_queue_id, job.key, change.action, change.type, change.traceback,
            change.cancelled, change.error, change.attempt, change.due, change.started_at, change.duration,
            change.details, change.kept_payload
      ), failure as (
        insert into "graphile_worker"._private_python_failures (
          job_id, attempts, run_at, last_error_hash, failed_at, error_type, traceback
        )
          select changed.id, changed.attempts, changed.run_at, hashtextextended(changed.last_error, 0), now(),
            changed.type, changed.traceback
          from changed where changed.action = 'fail'
          on conflict (job_id) do update set
            attempts = excluded.attempts, run_at = excluded.run_at,
            last_error_hash = excluded.last_error_hash, failed_at = excluded.failed_at,
            worker_died = excluded.worker_died, error_type = excluded.error_type, traceback = excluded.traceback
      )
      select recorded || coalesce(array_agg(changed.id), '{}'),
          recorded_locks || coalesce(array_agg(changed.claimed_at), '{}'),
          count(*) filter (where changed.action = 'return'),
          array_agg(row(
            changed.id, coalesce((changed.details ->> 'attempt')::smallint, changed.attempt),
            case when changed.action = 'snooze' then 4 when changed.cancelled then 3 else 2 end,
            changed.attempts >= changed.max_attempts, now(), changed.started_at, changed.duration, changed.due,
            changed.created_at, changed.task_id,
            (select queue.queue_name from "graphile_worker"._private_job_queues as queue where queue.id = changed.job_queue_id),
            worker, coalesce(changed.details ->> 'key', changed.key), changed.error, changed.type, changed.traceback,
            null, null, changed.kept_payload
          )::"graphile_worker"._private_python_runs)
            -- A job that was returned or interrupted did not run to its end.
            filter (where changed.action <> 'return' and (changed.started_at is not null or changed.details is not null))
        into recorded, recorded_locks, count, changed_runs
        from changed;
      if count > 0 then
        -- Any worker with a free slot can claim the returned jobs.
        perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', count)::text);
      end if;
    end if;

    if runs is not null or changed_runs is not null then
      insert into "graphile_worker"._private_python_runs select run.* from unnest(runs || changed_runs) as run;
    end if;
    if run_details is not null then
      -- Only for jobs whose callers wait, because each commit with a notification takes a lock on the whole database.
      -- A short result is part of the notification on the caller's own channel, which saves the caller a query. A
      -- payload has at most 7,999 bytes.
      perform pg_notify(
          'python:ended' || coalesce(':' || (given.details::json ->> 'caller'), ''),
          case
            when given.details::json -> 'caller' is not null and given.details::json -> 'result' is not null
              and octet_length(given.details) < 7000
              then json_build_object('id', given.id, 'result', given.details::json -> 'result')::text
            else given.id::text
          end
        )
        from unnest(job_ids, job_locks, run_details) as given (id, locked_at, details)
        where given.details::json -> 'called' is not null
          and (given.id, given.locked_at) in (select * from unnest(recorded, recorded_locks));
    end if;

    if cardinality(recorded) < cardinality(job_ids) then
      return query select
          case when held.id is null then 'lost' else 'busy' end, given.id, null::integer, null::integer, null,
          null, null::smallint, null::timestamptz, null::smallint, null::smallint, null, null::timestamptz,
          null::timestamptz, null, null::integer, null, given.locked_at, null::boolean, null::timestamptz,
          null::integer, null::double precision, null::boolean
        from unnest(job_ids, job_locks) as given (id, locked_at)
        left join "graphile_worker"._private_jobs as held
          on held.id = any (array[given.id]) and held.locked_by = worker and held.locked_at = given.locked_at
        -- A job that was released and claimed again by this worker may be there twice.
        where (given.id, given.locked_at) not in (select * from unnest(recorded, recorded_locks));
      if limit_ids is not null then
        for claimed_task, count in
          select held.task_id, count(*)
          from unnest(job_ids, job_locks) as given (id, locked_at)
          join "graphile_worker"._private_jobs as held
            on held.id = any (array[given.id]) and held.locked_by = worker and held.locked_at = given.locked_at
          group by held.task_id
        loop
          place := task_limits[array_position(task_ids, claimed_task)];
          if place is not null then
            job_counts[place] := job_counts[place] + count;
          end if;
        end loop;
      end if;
      -- The queue of a job that the worker still holds stays locked.
      select coalesce(array_agg(queue.id), '{}') into kept
        from unnest(kept) as queue (id)
        where queue.id not in (
          select given.queue_id
          from unnest(job_ids, job_locks, queue_ids) as given (id, locked_at, queue_id)
          join "graphile_worker"._private_jobs as held
            on held.id = any (array[given.id]) and held.locked_by = worker and held.locked_at = given.locked_at
          where given.queue_id is not null
        );
    end if;
  end if;
  released := kept;

  -- Limits ------------------------------------------------------------------------------------------------------

  if rooms is not null or limit_ids is not null then
    all_tasks := task_ids;
    task_rooms := rooms;
    if limit_ids is not null then
      select
          array_agg(coalesce(known.size, 1000000) order by given.place), array_agg(shared.total order by given.place),
          array_agg(shared.own order by given.place), array_agg(known.waits order by given.place),
          array_agg(known.starves order by given.place)
        into limit_sizes, limit_totals, limit_shares, limit_waits, limit_starves
        from unnest(limit_ids) with ordinality as given (id, place)
        left join lateral (
          select coalesce(known.concurrency_override, known.concurrency) as size,
            known.wanted_at > clock_timestamp() - interval '10 seconds' as waits,
            known.wanted_at > clock_timestamp() - interval '10 seconds' and known.wanted_by <> worker as starves
          from "graphile_worker"._private_python_limits as known where known.id = any (array[given.id])
        ) as known on true
        cross join lateral (
          select coalesce(sum(known.held), 0)::integer as total,
            coalesce(sum(known.held) filter (where known.worker_id = worker), 0)::integer as own
          from "graphile_worker"._private_python_shares as known where known.limit_id = any (array[given.id])
        ) as shared;
      former_shares := limit_shares;
      for place in 1 .. cardinality(limit_ids) loop
        -- If the limit was lowered, shares of ended jobs are given up until the sum fits.
        limit_rooms[place] := least(startable, greatest(
          0, limit_shares[place] - job_counts[place] - greatest(0, limit_totals[place] - limit_sizes[place])
        ));
        limit_wishes[place] := least(missing, startable) - limit_rooms[place];
        if limit_starves[place] and limit_totals[place] >= limit_sizes[place] then
          limit_rooms[place] := 0;
          limit_wishes[place] := least(missing, 1);
        end if;
        continue when limit_wishes[place] <= 0;
        -- Only if the worker could run a job that is due, because an idle worker must not write, and other workers must
        -- not give shares up in vain. A share that is 0 also hides jobs that are due later. So this visits the levels of
        -- each task until one has such a job, as the search for jobs does. It reads at most 1,000 jobs of a level that
        -- are forbidden or in locked queues: there may be another one behind them.
        with recursive visited (task_id, jobs, priority, is_due, next_due) as (
          select given.id, item.jobs, -32769, false, null::timestamptz
          from unnest(all_tasks, task_rooms, task_limits) as given (id, room, limit_place)
          cross join (values ('plain'), ('with flags'), ('with queue')) as item (jobs)
          where given.limit_place = place and coalesce(given.room, 1) > 0
          union all
          select visited.task_id, visited.jobs, next_level.priority::integer, next_level.is_due, next_level.next_due
          from visited
          cross join lateral (
            select first.priority,
              exists (
                select
                from (
                  select from "graphile_worker"._private_jobs as job
                  where job.is_available and job.job_queue_id is null and job.flags is null
                    and job.task_id = visited.task_id and job.priority = first.priority and job.run_at <= as_of
                    and (left_out is null or job.id <> all (left_out))
                  order by job.run_at, job.id limit 1
                ) as job
              ) as is_due,
              (
                select job.run_at from "graphile_worker"._private_jobs as job
                where job.is_available and job.job_queue_id is null and job.flags is null
                  and job.task_id = visited.task_id and job.priority = first.priority and job.run_at > as_of
                order by job.run_at, job.id limit 1
              ) as next_due
            from (
              select job.priority from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is null
                and job.task_id = visited.task_id and job.priority > visited.priority
              order by job.priority, job.run_at, job.id limit 1
            ) as first
            where visited.jobs = 'plain'
            union all
            select first.priority,
              exists (
                select
                from (
                  select job.id, job.flags, row_number() over () as place
                  from (
                    select job.id, job.flags from "graphile_worker"._private_jobs as job
                    where job.is_available and job.job_queue_id is null and job.flags is not null
                      and job.task_id = visited.task_id and job.priority = first.priority and job.run_at <= as_of
                    order by job.run_at, job.id limit 1000
                  ) as job
                ) as job
                where job.place = 1000 or (
                  (forbidden_flags is null or not job.flags ?| forbidden_flags)
                  and (left_out is null or job.id <> all (left_out))
                )
              ),
              (
                select job.run_at from "graphile_worker"._private_jobs as job
                where job.is_available and job.job_queue_id is null and job.flags is not null
                  and job.task_id = visited.task_id and job.priority = first.priority and job.run_at > as_of
                order by job.run_at, job.id limit 1
              )
            from (
              select job.priority from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null
                and job.task_id = visited.task_id and job.priority > visited.priority
              order by job.priority, job.run_at, job.id limit 1
            ) as first
            where visited.jobs = 'with flags'
            union all
            select first.priority,
              exists (
                select
                from (
                  select job.id, job.job_queue_id, job.flags, row_number() over () as place
                  from (
                    select job.id, job.job_queue_id, job.flags from "graphile_worker"._private_jobs as job
                    where job.is_available and job.job_queue_id is not null
                      and job.task_id = visited.task_id and job.priority = first.priority and job.run_at <= as_of
                    order by job.run_at, job.id limit 1000
                  ) as job
                ) as job
                where job.place = 1000 or (
                  (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
                  and (left_out is null or job.id <> all (left_out))
                  and exists (
                    select from "graphile_worker"._private_job_queues as queue
                    where queue.id = any (array[job.job_queue_id])
                      and (queue.is_available or queue.id = any (released))
                  )
                )
              ),
              (
                select job.run_at
                from (
                  select job.run_at, job.job_queue_id from "graphile_worker"._private_jobs as job
                  where job.is_available and job.job_queue_id is not null
                    and job.task_id = visited.task_id and job.priority = first.priority and job.run_at > as_of
                  order by job.run_at, job.id limit 100
                ) as job
                join "graphile_worker"._private_job_queues as queue on queue.id = any (array[job.job_queue_id])
                where queue.is_available or queue.id = any (released)
                limit 1
              )
            from (
              select job.priority from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is not null
                and job.task_id = visited.task_id and job.priority > visited.priority
              order by job.priority, job.run_at, job.id limit 1
            ) as first
            where visited.jobs = 'with queue'
          ) as next_level
          where not visited.is_due
        )
        select coalesce(bool_or(visited.is_due), false), least(due, min(visited.next_due))
          into is_wanted, due
          from visited;
        if not is_wanted or limit_starves[place] and limit_totals[place] >= limit_sizes[place] then
          limit_wishes[place] := 0;
        end if;
      end loop;
      if exists (
        select from unnest(limit_wishes, limit_totals, limit_sizes) as known (wish, total, size)
        where known.wish > 0 and known.total < known.size
      ) then
        limit_turns := array(
          select known.id from "graphile_worker"._private_python_limits as known
          where known.id = any (array(
            select given.id
            from unnest(limit_ids, limit_wishes, limit_totals, limit_sizes) as given (id, wish, total, size)
            where given.wish > 0 and given.total < given.size
          ))
          for update skip locked
        );
        for place in 1 .. cardinality(limit_ids) loop
          continue when limit_wishes[place] <= 0 or limit_totals[place] >= limit_sizes[place];
          if limit_ids[place] <> all (limit_turns) then
            is_short := true;
            continue;
          end if;
          -- In a statement after the one that locked the row, to see what other workers have committed until then.
          select coalesce(sum(known.held), 0) into share
            from "graphile_worker"._private_python_shares as known where known.limit_id = limit_ids[place];
          share := least(limit_wishes[place], limit_sizes[place] - share);
          if share > 0 then
            limit_shares[place] := limit_shares[place] + share;
            limit_rooms[place] := limit_rooms[place] + share;
            insert into "graphile_worker"._private_python_shares (limit_id, worker_id, held)
              values (limit_ids[place], worker, limit_shares[place])
              on conflict (limit_id, worker_id) do update set held = excluded.held;
          end if;
        end loop;
      end if;
      used := limit_rooms;
    end if;
    task_ids := array(
      select given.id
      from unnest(all_tasks, task_rooms, task_limits) as given (id, room, limit_place)
      where coalesce(given.room, 1) > 0 and coalesce(limit_rooms[given.limit_place], 1) > 0
    );
    if cardinality(task_ids) = 0 then
      missing := 0;
    end if;
    queues_first := false;
  end if;

  -- Claim -------------------------------------------------------------------------------------------------------
  --
  -- Priority by priority, because a claim would otherwise scan past jobs of a better priority that are due later.

  started := clock_timestamp();
  if queues_first and not careful and cardinality(kept) between 1 and least(startable, missing) then
    -- Go on with the first job of each queue that we hold, if it is due. A full search follows unless each queue has one.
    continued_length := case
      when cardinality(task_ids) > 1 then 1
      else least(run_length, missing / cardinality(kept))
    end;
    select coalesce(array_agg(job.id), '{}'), coalesce(array_agg(distinct job.job_queue_id), '{}')
      into locked, locked_queues
      from unnest(kept) as queue (id)
      cross join lateral (
        select next.id, row_number() over (order by next.priority, next.run_at, next.id) as place,
          bool_or(next.is_last) over (order by next.priority, next.run_at, next.id) as has_last_chance
        from (
          select job.*
          from unnest(task_ids) as task (id)
          cross join lateral (
            select job.id, job.priority, job.run_at, job.attempts + 1 >= job.max_attempts as is_last
            from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
              and job.task_id = task.id
            order by job.priority, job.run_at, job.id limit continued_length
          ) as job
          order by job.priority, job.run_at, job.id limit continued_length
        ) as next
      ) as next
      cross join lateral (
        select job.id, job.job_queue_id from "graphile_worker"._private_jobs as job
        where job.id = next.id and case when job.is_available and job.job_queue_id = queue.id
          and job.task_id = any (task_ids) and job.run_at <= as_of
          and (next.place = 1 or not next.has_last_chance and job.attempts + 1 < job.max_attempts)
          and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
          and (left_out is null or job.id <> all (left_out)) then true end
        for update skip locked
      ) as job
      where not exists (
        select from "graphile_worker"._private_python_dead_workers as dead where dead.worker_id = worker
      );
    if cardinality(locked) > 0 then
      return query
        update "graphile_worker"._private_jobs as job
          set attempts = job.attempts + 1, locked_by = worker, locked_at = now()
          where job.id = any (locked)
          returning
            null, job.id, job.task_id, job.job_queue_id, null, job.payload::text, job.priority,
            least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'),
            job.attempts, job.max_attempts, job.last_error,
            nullif(least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.run_at),
            nullif(least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.created_at),
            job.key, job.revision, job.flags::text, null::timestamptz,
            null::boolean, null::timestamptz, null::integer, null::double precision, null::boolean;
      missing := missing - cardinality(locked);
      claimed_queues := locked_queues;
      spent := locked_queues;
      kept := array(select queue.id from unnest(kept) as queue (id) where queue.id <> all (locked_queues));
      if cardinality(kept) = 0 then
        missing := 0;
        queue_cursor := null;
      end if;
    end if;
  end if;

  if missing = 0 or forbidden_flags is null then
    flags_priority := null;
  else
    -- A few jobs from the start, which is enough if most of them are allowed. Then more from where the last call ended,
    -- because very many of them may be forbidden. Jobs that are due later are skipped, except the first of each level.
    walk_priority := from_priority;
    walk_run_at := from_run_at;
    walk_id := from_id;
    walk_size := 2 * missing + 10;
    for walk in 1 .. 2 loop
      with walked as (
        select job.*
        from unnest(task_ids) as task (id)
        cross join lateral (
          with recursive level (priority) as (
            (
              select job.priority from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
                and (job.priority, job.run_at, job.id) > (walk_priority, walk_run_at, walk_id)
              order by job.priority, job.run_at, job.id limit 1
            )
            union all
            select next_level.priority
            from level
            cross join lateral (
              select job.priority from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
                and job.priority > level.priority
              order by job.priority, job.run_at, job.id limit 1
            ) as next_level
          )
          select job.*, row_number() over () as place
          from level
          cross join lateral (
            (
              select job.id, job.priority, job.run_at,
                job.flags ?| forbidden_flags or coalesce(job.id = any (left_out), false) as is_forbidden
              from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
                and job.priority = level.priority and job.run_at <= as_of
                and (job.priority, job.run_at, job.id) > (walk_priority, walk_run_at, walk_id)
              order by job.run_at, job.id limit walk_size
            )
            union all
            (
              select job.id, job.priority, job.run_at, true
              from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
                and job.priority = level.priority and job.run_at > as_of
                and (job.priority, job.run_at, job.id) > (walk_priority, walk_run_at, walk_id)
              order by job.run_at, job.id limit 1
            )
          ) as job
          limit walk_size
        ) as job
        where not exists (
          select from "graphile_worker"._private_python_dead_workers as dead where dead.worker_id = worker
        )
      )
      select
          flagged_ids || coalesce(
            array_agg(walked.id) filter (where not walked.is_forbidden and walked.id <> all (flagged_ids)), '{}'
          ),
          flagged_priorities || coalesce(
            array_agg(walked.priority) filter (where not walked.is_forbidden and walked.id <> all (flagged_ids)), '{}'
          ),
          flagged_times || coalesce(
            array_agg(walked.run_at) filter (where not walked.is_forbidden and walked.id <> all (flagged_ids)), '{}'
          ),
          least(due, min(walked.run_at) filter (where walked.run_at > as_of)),
          -- The first end of all tasks that have more jobs.
          (array_agg(walked.priority order by walked.priority, walked.run_at, walked.id)
            filter (where walked.place = walk_size))[1],
          (array_agg(walked.run_at order by walked.priority, walked.run_at, walked.id)
            filter (where walked.place = walk_size))[1],
          (array_agg(walked.id order by walked.priority, walked.run_at, walked.id)
            filter (where walked.place = walk_size))[1]
        into flagged_ids, flagged_priorities, flagged_times, due, walk_priority, walk_run_at, walk_id
        from walked;
      if walk_priority is null or walk = 2 then
        flags_priority := walk_priority;
        flags_run_at := walk_run_at;
        flags_id := walk_id;
        exit;
      end if;
      exit when cardinality(flagged_ids) >= missing;
      if (flags_priority, flags_run_at, flags_id) > (walk_priority, walk_run_at, walk_id) then
        walk_priority := flags_priority;
        walk_run_at := flags_run_at;
        walk_id := flags_id;
      end if;
      walk_size := greatest(300 / cardinality(task_ids), 20);
    end loop;
  end if;

  while missing > 0 loop
    if cardinality(flagged_ids) > 0 then
      select min(flagged.priority) into flagged_level
        from unnest(flagged_ids, flagged_priorities) as flagged (id, priority)
        where flagged.priority >= from_priority and flagged.id <> all (passed_over);
    end if;
    if mark_priority is not null and exists (
      select from "graphile_worker"._private_python_dead_workers as dead where dead.worker_id = worker
    ) then
      exit;
    elsif mark_priority is not null then
      -- Finding the level by a query would scan past the jobs that the mark skips.
      level_without_queue := mark_priority;
      level_with_queue := mark_priority;
      tasks_without_queue := array(
        select -task.id
        from unnest(task_ids) as task (id)
        cross join lateral (
          select from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
            and job.priority = mark_priority and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
          order by job.run_at, job.id limit 1
        ) as job
        where forbidden_flags is null
      ) || task_ids;
      tasks_with_queue := task_ids;
      mark_priority := null;
    else
      -- Visits the levels of each task until one has a due job. A level without one only tells when the next job is due.
      with recursive alive as (
        -- A sweeper would release the jobs of a dead worker while they run.
        select task.id from unnest(task_ids) as task (id)
        where not exists (
          select from "graphile_worker"._private_python_dead_workers as dead where dead.worker_id = worker
        )
      ), without_flags (task_id, priority, run_at) as (
        select task.id, first.priority, first.run_at
        from alive as task
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = task.id
            and job.priority >= from_priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        union all
        select earlier.task_id, first.priority, first.run_at
        from without_flags as earlier
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = earlier.task_id
            and job.priority > earlier.priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        where earlier.run_at > as_of
      ), with_flags (task_id, priority, run_at) as (
        select task.id, first.priority, first.run_at
        from alive as task
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
            and job.priority >= from_priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        where forbidden_flags is null
        union all
        select earlier.task_id, first.priority, first.run_at
        from with_flags as earlier
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = earlier.task_id
            and job.priority > earlier.priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        where earlier.run_at > as_of
      ), with_queue (task_id, priority, run_at) as (
        select task.id, first.priority, first.run_at
        from alive as task
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is not null and job.task_id = task.id
            and job.priority >= from_priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        union all
        select earlier.task_id, first.priority, first.run_at
        from with_queue as earlier
        cross join lateral (
          select job.priority, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is not null and job.task_id = earlier.task_id
            and job.priority > earlier.priority
          order by job.priority, job.run_at, job.id limit 1
        ) as first
        where earlier.run_at > as_of
      )
      select
          min(found.priority) filter (where not found.queued and found.run_at <= as_of),
          array_agg(found.task_id) filter (where not found.queued and found.run_at <= as_of),
          min(found.priority) filter (where found.queued and found.run_at <= as_of),
          array_agg(found.task_id) filter (where found.queued and found.run_at <= as_of),
          least(
            due, min(found.run_at) filter (where not found.queued and found.run_at > as_of),
            (
              -- Jobs in queues that other workers hold are left out: the worker that releases such a queue sends a
              -- notification.
              select min(job.run_at)
              from with_queue as later
              cross join lateral (
                select job.run_at, job.job_queue_id from "graphile_worker"._private_jobs as job
                where job.is_available and job.job_queue_id is not null and job.task_id = later.task_id
                  and job.priority = later.priority and job.run_at > as_of
                order by job.run_at, job.id limit 100
              ) as job
              join "graphile_worker"._private_job_queues as queue on queue.id = any (array[job.job_queue_id])
              where later.run_at > as_of and (queue.is_available or queue.id = any (released))
            )
          )
        into level_without_queue, tasks_without_queue, level_with_queue, tasks_with_queue, due
        from (
          select task_id, priority, run_at, false as queued from without_flags
          union all
          select -task_id, priority, run_at, false from with_flags
          union all
          select task_id, priority, run_at, true from with_queue
        ) as found;
    end if;
    if least(level_without_queue, level_with_queue, flagged_level) > level then
      -- Another try found nothing more in its level. The jobs that it had to skip do not matter in this level.
      passed_over := '{}';
      passed_tasks := '{}';
      tries := 0;
    end if;
    level := least(level_without_queue, level_with_queue, flagged_level);
    exit when level is null;
    first_level := coalesce(first_level, level);
    if level > from_priority then
      from_run_at := '-infinity';
      from_id := 0;
    end if;
    if level_without_queue > level then
      tasks_without_queue := null;
    end if;
    if level_with_queue > level then
      tasks_with_queue := null;
    end if;
    candidate_ids := '{}';
    candidate_queues := '{}';
    candidate_times := '{}';

    if tasks_with_queue is not null then
      page_size := 2 * missing + 10;
      with page as materialized (
        select job.*, task.id as task_id
        from unnest(tasks_with_queue) as task (id)
        cross join lateral (
          select job.*, row_number() over (order by job.run_at, job.id) as place
          from (
            select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.task_id = task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
              and job.id <> all (passed_over)
            order by job.run_at, job.id limit page_size
          ) as job
        ) as job
      ), page_end as materialized (
        -- Up to here the pages have the jobs of all tasks. Behind it, a page that has ended may lack the next job of a
        -- queue.
        select page.run_at, page.id from page where page.place = page_size order by page.run_at, page.id limit 1
      ), free as materialized (
        select queue.id, given.run_at
        from (select page.job_queue_id as id, min(page.run_at) as run_at from page group by page.job_queue_id) as given
        join "graphile_worker"._private_job_queues as queue on queue.id = any (array[given.id]) and queue.is_available
        where given.id <> all (kept) and given.id <> all (spent)
      ), in_page as materialized (
        select * from (
          select page.id, page.job_queue_id, page.run_at,
            row_number() over (partition by page.job_queue_id order by page.run_at, page.id) as place
          from page
          where not exists (select from page_end where (page.run_at, page.id) > (page_end.run_at, page_end.id))
            -- Written so that it does not become a join: the queues are hashed.
            and (page.job_queue_id in (select free.id from free)) is true
        ) as page
        where page.place <= run_length
      ), visited as materialized (
        -- The next job of a queue that the worker holds may be anywhere, so it is looked up. The same is done for all
        -- queues if the pages of several tasks have too few jobs before the first of them ends.
        select unnest(kept) as id
        union all
        (
          select free.id from free
          where cardinality(tasks_with_queue) > 1 and (select count(*) from in_page) < missing
          order by free.run_at limit missing
        )
      ), found as (
        select in_page.id, in_page.job_queue_id, in_page.run_at
        from in_page
        where cardinality(tasks_with_queue) = 1 or (select count(*) from in_page) >= missing
        union all
        select job.id, job.job_queue_id, job.run_at
        from visited as queue
        cross join lateral (
          select job.*
          from unnest(tasks_with_queue) as task (id)
          cross join lateral (
            select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
              and job.task_id = task.id and job.priority = level and job.run_at <= as_of
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
              and job.id <> all (passed_over)
            order by job.run_at, job.id
            -- Many queues need fewer jobs each. Otherwise the jobs that are read would be the product of both.
            limit (select least(run_length, 1 + 2 * missing / greatest(count(*), 1)) from visited)
          ) as job
          order by job.run_at, job.id
          limit (select least(run_length, 1 + 2 * missing / greatest(count(*), 1)) from visited)
        ) as job
      ), best as (
        -- The first jobs of each queue, because a queue's jobs are found in order.
        select * from found order by found.run_at, found.id limit missing
      )
      select
        coalesce(array_agg(best.id), '{}'),
        coalesce(array_agg(best.job_queue_id), '{}'),
        coalesce(array_agg(best.run_at), '{}'),
        exists (select from page_end)
        into candidate_ids, candidate_queues, candidate_times, page_full
        from best;

      if page_full and cardinality(candidate_ids) < missing and after_queue is null then
        queue_cursor := null;
      elsif page_full and cardinality(candidate_ids) < missing then
        -- The page is full of jobs in locked queues: visit queues one by one, up to 500 in a call.
        with recursive visited (queue_id, place) as (
          select min(job.job_queue_id), 1 from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id > after_queue
          union all
          select (
            select min(job.job_queue_id) from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id > visited.queue_id
          ), visited.place + 1
          from visited where visited.queue_id is not null and visited.place < 500
        ), found as (
          select job.*
          from visited
          join "graphile_worker"._private_job_queues as queue
            on queue.id = any (array[visited.queue_id]) and queue.is_available
          cross join unnest(tasks_with_queue) as task (id)
          cross join lateral (
            select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
              and job.task_id = task.id and job.priority = level and job.run_at <= as_of
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
              and job.id <> all (passed_over)
            order by job.run_at, job.id limit least(run_length, 1 + missing / 50)
          ) as job
          -- A queue that has candidates already keeps them: others of its jobs would follow out of order.
          where visited.queue_id <> all (kept) and visited.queue_id <> all (spent)
            and visited.queue_id <> all (candidate_queues)
        ), ranked as (
          select found.*, row_number() over (partition by job_queue_id order by run_at, id) as place from found
        )
        select
          candidate_ids || coalesce(array_agg(ranked.id), '{}'),
          candidate_queues || coalesce(array_agg(ranked.job_queue_id), '{}'),
          candidate_times || coalesce(array_agg(ranked.run_at), '{}'),
          -- The highest of all levels, because the cursor of this level may be lower.
          greatest(
            queue_cursor, (select case when bool_or(queue_id is null) then 0 else max(queue_id) end from visited)
          )
          into candidate_ids, candidate_queues, candidate_times, queue_cursor
          from ranked where ranked.place <= least(run_length, 1 + missing / 50);
      end if;
    end if;

    if cardinality(candidate_ids) > 0 and (marked or level > first_level) then
      -- A queue that was locked when an earlier level was searched, or when an earlier call set the mark, may be free
      -- by now. The jobs of a queue keep their order, so a job that is not the first of its queue waits for the next
      -- call.
      select
        coalesce(array_agg(candidate.id), '{}'),
        coalesce(array_agg(candidate.queue_id), '{}'),
        coalesce(array_agg(candidate.run_at), '{}')
        into candidate_ids, candidate_queues, candidate_times
        from unnest(candidate_ids, candidate_queues, candidate_times) as candidate (id, queue_id, run_at)
        where candidate.queue_id <> all (array(
          select queue.id
          from (
            select given.queue_id as id, min(given.run_at) as run_at,
              (array_agg(given.id order by given.run_at, given.id))[1] as job_id
            from unnest(candidate_ids, candidate_queues, candidate_times) as given (id, queue_id, run_at)
            group by given.queue_id
          ) as queue
          cross join unnest(task_ids) as task (id)
          cross join lateral (
            select job.priority, job.run_at, job.id from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
              and job.task_id = task.id and job.id <> all (busy)
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            order by job.priority, job.run_at, job.id limit 1
          ) as first
          cross join lateral (
            select
            where first.run_at <= as_of
              and (first.priority, first.run_at, first.id) < (level, queue.run_at, queue.job_id)
            union all
            -- Only the first of each level, so that this does not scan past jobs that are due later.
            select from (
              with recursive other (priority, run_at, id) as (
                select first.priority, first.run_at, first.id where first.run_at > as_of and first.priority < level
                union all
                select job.* from other
                cross join lateral (
                  select job.priority, job.run_at, job.id from "graphile_worker"._private_jobs as job
                  where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
                    and job.task_id = task.id and job.priority > other.priority and job.id <> all (busy)
                    and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
                    and (left_out is null or job.id <> all (left_out))
                  order by job.priority, job.run_at, job.id limit 1
                ) as job
                where other.run_at > as_of and other.priority < level
              )
              select from other
              where other.run_at <= as_of
                and (other.priority, other.run_at, other.id) < (level, queue.run_at, queue.job_id)
            ) as later
            limit 1
          ) as earlier
        ));
    end if;

    -- Choose a number of jobs without a queue for each task, and the jobs with a queue by id.
    chosen_flagged := '{}';
    if flagged_level is distinct from level and cardinality(candidate_ids) = 0
        and cardinality(tasks_without_queue) = 1 and tries = 0 then
      chosen_ids := '{}';
      quota_tasks := tasks_without_queue;
      quotas := array[missing];
      if rooms is not null or limit_ids is not null then
        place := array_position(all_tasks, abs(tasks_without_queue[1]));
        quotas := array[least(missing, task_rooms[place], limit_rooms[task_limits[place]])];
      end if;
      expected := 0;  -- there is only one source of jobs, so a second try would find no more
    elsif flagged_level is distinct from level and tasks_without_queue is null
        and cardinality(candidate_ids) <= missing then
      chosen_ids := candidate_ids;
      chosen_queues := candidate_queues;
      quota_tasks := '{}';
      quotas := '{}';
      expected := cardinality(chosen_ids);
    else
      -- Jobs without a queue are only counted. If another worker claims some of them meanwhile, other jobs can replace
      -- them.
      with best as (
        select * from (
          select job.id, null::integer as queue_id, job.run_at, task.id as task_id
          from unnest(tasks_without_queue) as task (id)
          cross join lateral (
            (
              select job.id, job.run_at from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = task.id
                and job.priority = level and job.run_at <= as_of
                and (job.run_at, job.id) > (from_run_at, from_id)
                and (left_out is null or job.id <> all (left_out))
              order by job.run_at, job.id limit missing
            )
            union all
            (
              select job.id, job.run_at from "graphile_worker"._private_jobs as job
              where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = -task.id
                and job.priority = level and job.run_at <= as_of
                and (job.run_at, job.id) > (from_run_at, from_id)
                and (left_out is null or job.id <> all (left_out))
              order by job.run_at, job.id limit missing
            )
          ) as job
          where task.id <> all (passed_tasks)
          union all
          select flagged.id, null, flagged.run_at, null
          from unnest(flagged_ids, flagged_priorities, flagged_times) as flagged (id, priority, run_at)
          where flagged.priority = level and flagged.id <> all (passed_over)
          union all
          select candidate.id, candidate.queue_id, candidate.run_at, null
          from unnest(candidate_ids, candidate_queues, candidate_times) as candidate (id, queue_id, run_at)
        ) as any_kind
        order by run_at, id limit missing
      )
      select
        coalesce(array_agg(best.id) filter (where best.queue_id is not null), '{}'),
        coalesce(array_agg(best.queue_id) filter (where best.queue_id is not null), '{}'),
        coalesce(array_agg(best.id) filter (where best.queue_id is null and best.task_id is null), '{}'),
        (select coalesce(array_agg(quota.task_id), '{}') from (
          select task_id from best where task_id is not null group by task_id order by task_id) as quota),
        (select coalesce(array_agg(quota.size), '{}') from (
          select count(*) as size from best where task_id is not null group by task_id order by task_id) as quota),
        count(*)
        into chosen_ids, chosen_queues, chosen_flagged, quota_tasks, quotas, expected
        from best;
    end if;

    locked := '{}';
    locked_queues := '{}';
    last_chances := '{}';
    if cardinality(chosen_ids) > 0 then
      with queue as materialized (
        select unnest(kept) as id
        union all
        select queue.id
        from (select distinct given.id from unnest(chosen_queues) as given (id) where given.id <> all (kept)) as given
        cross join lateral (
          select queue.id from "graphile_worker"._private_job_queues as queue
          where queue.id = given.id and queue.is_available
          for update skip locked
        ) as queue
      ), job as materialized (
        select job.id, job.job_queue_id, job.is_last
        from unnest(chosen_ids, chosen_queues) as chosen (id, queue_id)
        cross join lateral (
          select job.id, job.job_queue_id, job.attempts + 1 >= job.max_attempts as is_last
          from "graphile_worker"._private_jobs as job
          where job.id = chosen.id and case when job.is_available and job.job_queue_id = chosen.queue_id
            and job.task_id = any (task_ids) and job.priority = level and job.run_at <= as_of
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out)) then true end
          for update skip locked
        ) as job
        where chosen.queue_id = any (array(select queue.id from queue))
      )
      select
        (select coalesce(array_agg(queue.id), '{}') from queue),
        coalesce(array_agg(job.id), '{}'),
        coalesce(array_agg(job.job_queue_id), '{}'),
        coalesce(array_agg(job.id) filter (where job.is_last), '{}')
        into obtained, locked, locked_queues, last_chances
        from job;
      if cardinality(locked) < cardinality(chosen_ids) then
        is_contended := true;
        busy := busy || array(
          select chosen.id from unnest(chosen_ids, chosen_queues) as chosen (id, queue_id)
          where chosen.queue_id = any (obtained) and chosen.id <> all (locked)
        );
        -- Another transaction has locked the first job of a queue. That is not a reason for the queue's other jobs to
        -- wait.
        select locked || coalesce(array_agg(job.id), '{}'),
            locked_queues || coalesce(array_agg(job.job_queue_id), '{}'),
            last_chances || coalesce(array_agg(job.id) filter (where job.is_last), '{}')
          into locked, locked_queues, last_chances
          from (
            select distinct chosen.queue_id from unnest(chosen_queues) as chosen (queue_id)
            where chosen.queue_id = any (obtained) and chosen.queue_id <> all (locked_queues)
          ) as chosen
          cross join lateral (
            select job.id, job.job_queue_id, job.attempts + 1 >= job.max_attempts as is_last
            from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = chosen.queue_id
              and job.task_id = any (task_ids) and job.priority = level and job.run_at <= as_of
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            order by job.run_at, job.id limit 1
            for update skip locked
          ) as job;
      end if;
    end if;

    -- Locked first and updated later, because a statement needs an extra lock for each job that another transaction
    -- changed while the statement was running.
    if quota_tasks[cardinality(quota_tasks)] > 0 then
      select locked || coalesce(array_agg(job.id), '{}'),
          last_chances || coalesce(array_agg(job.id) filter (where job.is_last), '{}')
        into locked, last_chances
        from unnest(quota_tasks, quotas) as quota (task_id, size)
        cross join lateral (
          select job.id, job.attempts + 1 >= job.max_attempts as is_last from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit quota.size
          for update skip locked
        ) as job;
    end if;
    if quota_tasks[1] < 0 then
      select locked || coalesce(array_agg(job.id), '{}'),
          last_chances || coalesce(array_agg(job.id) filter (where job.is_last), '{}')
        into locked, last_chances
        from unnest(quota_tasks, quotas) as quota (task_id, size)
        cross join lateral (
          select job.id, job.attempts + 1 >= job.max_attempts as is_last from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = -quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit quota.size
          for update skip locked
        ) as job;
    end if;
    if cardinality(chosen_flagged) > 0 then
      select locked || coalesce(array_agg(job.id), '{}'),
          last_chances || coalesce(array_agg(job.id) filter (where job.is_last), '{}'),
          is_contended or count(*) < cardinality(chosen_flagged)
        into locked, last_chances, is_contended
        from unnest(chosen_flagged) as chosen (id)
        cross join lateral (
          select job.id, job.attempts + 1 >= job.max_attempts as is_last from "graphile_worker"._private_jobs as job
          where job.id = chosen.id and case when job.is_available and job.job_queue_id is null
            and job.task_id = any (task_ids) and job.priority = level and job.run_at <= as_of
            and (job.flags is null or not job.flags ?| forbidden_flags) then true end
          for update skip locked
        ) as job;
    end if;

    if startable < wanted and cardinality(last_chances) > 0 then
      -- If the worker crashes, a job that it claimed loses the attempt. So a job that does not start at once is not claimed
      -- for its last attempt: it would have failed without having run. Jobs behind it in its queue keep their order.
      with ranked as (
        select job.id, job.job_queue_id, job.run_at, job.id = any (last_chances) as is_last,
          row_number() over (order by job.run_at, job.id) as place,
          row_number() over (partition by job.job_queue_id order by job.run_at, job.id) as place_in_queue
        from unnest(locked) as given (id)
        join "graphile_worker"._private_jobs as job on job.id = any (array[given.id])
      ), judged as (
        select ranked.id, ranked.job_queue_id,
          bool_or(
            ranked.is_last and (
              wanted - missing + ranked.place > startable
              or (ranked.job_queue_id is not null and ranked.place_in_queue > 1)
            )
          ) over (
            partition by coalesce(ranked.job_queue_id, -ranked.id) order by ranked.run_at, ranked.id
          ) as stays
        from ranked
      )
      select
          coalesce(array_agg(judged.id) filter (where not judged.stays), '{}'),
          coalesce(
            array_agg(judged.job_queue_id) filter (where not judged.stays and judged.job_queue_id is not null), '{}'
          ),
          expected - count(*) filter (where judged.stays),
          is_withheld or bool_or(judged.stays)
        into locked, locked_queues, expected, is_withheld
        from judged;
    end if;
    if rooms is not null or limit_ids is not null then
      is_trimmed := false;
      if cardinality(locked) > 0 then
        earlier_task_rooms := task_rooms;
        earlier_limit_rooms := limit_rooms;
        for pass in 1 .. 2 loop
          for claimed_task, count in
            select job.task_id, count(*)
            from unnest(locked) as chosen (id)
            join "graphile_worker"._private_jobs as job on job.id = any (array[chosen.id])
            group by job.task_id
          loop
            place := array_position(all_tasks, claimed_task);
            if task_rooms is not null then
              task_rooms[place] := task_rooms[place] - count;
            end if;
            if task_limits[place] is not null then
              limit_rooms[task_limits[place]] := limit_rooms[task_limits[place]] - count;
            end if;
          end loop;
          exit when pass = 2 or (coalesce(0 > any (task_rooms), false) or coalesce(0 > any (limit_rooms), false)) is false;
          task_rooms := earlier_task_rooms;
          limit_rooms := earlier_limit_rooms;
          -- Jobs of one limit were chosen independently of each other. Those that have no room stay, with the jobs behind
          -- them in their queues.
          with ranked as (
            select job.id, job.job_queue_id, job.run_at, task_rooms[given.place] as room,
              limit_rooms[task_limits[given.place]] as limit_room,
              row_number() over (partition by job.task_id order by job.run_at, job.id) as place_in_task,
              row_number() over (partition by task_limits[given.place] order by job.run_at, job.id) as place_in_limit
            from unnest(locked) as chosen (id)
            join "graphile_worker"._private_jobs as job on job.id = any (array[chosen.id])
            cross join lateral (select array_position(all_tasks, job.task_id) as place) as given
          ), judged as (
            select ranked.id, ranked.job_queue_id,
              bool_or(
                ranked.place_in_task > coalesce(ranked.room, 2147483647)
                or ranked.place_in_limit > coalesce(ranked.limit_room, 2147483647)
              ) over (
                partition by coalesce(ranked.job_queue_id, -ranked.id) order by ranked.run_at, ranked.id
              ) as stays
            from ranked
          )
          select
              coalesce(array_agg(judged.id) filter (where not judged.stays), '{}'),
              coalesce(
                array_agg(judged.job_queue_id) filter (where not judged.stays and judged.job_queue_id is not null), '{}'
              ),
              expected - count(*) filter (where judged.stays), coalesce(bool_or(judged.stays), false)
            into locked, locked_queues, expected, is_trimmed
            from judged;
        end loop;
        if 0 = any (task_rooms) or 0 = any (limit_rooms) then
          task_ids := array(
            select given.id
            from unnest(all_tasks, task_rooms, task_limits) as given (id, room, limit_place)
            where given.id = any (task_ids)
              and coalesce(given.room, 1) > 0 and coalesce(limit_rooms[given.limit_place], 1) > 0
          );
          tasks_without_queue := array(
            select given.id from unnest(tasks_without_queue) as given (id) where abs(given.id) = any (task_ids)
          );
          tasks_with_queue := array(
            select given.id from unnest(tasks_with_queue) as given (id) where given.id = any (task_ids)
          );
        end if;
      end if;
    end if;
    claimed_queues := claimed_queues || locked_queues;

    if careful then
      claimed := '{}';
      foreach candidate in array locked loop
        begin
          update "graphile_worker"._private_jobs as job
            set attempts = job.attempts + 1, locked_by = worker, locked_at = now()
            where job.id = candidate;
          -- Together with its queue, because the server may reject the change to the queue.
          update "graphile_worker"._private_job_queues as queue set locked_by = worker, locked_at = now()
            where queue.id = (select job.job_queue_id from "graphile_worker"._private_jobs as job where job.id = candidate)
              and queue.id <> all (released);
          claimed := claimed || candidate;
        exception when others then
          get stacked diagnostics why = message_text, code = returned_sqlstate, origin = pg_exception_context;
          if left(code, 2) in ('53', '57', '58') then
            raise;
          end if;
          left_out := left_out || candidate;
          claimed_queues := array_remove(
            claimed_queues, (select job.job_queue_id from "graphile_worker"._private_jobs as job where job.id = candidate)
          );
          refused := refused || candidate;
          refusals := array_append(refusals, why);
          refusal_states := array_append(refusal_states, code);
          refusal_origins := array_append(refusal_origins, origin);
        end;
      end loop;
      return query
        select
          null, job.id, job.task_id, job.job_queue_id, null, job.payload::text, job.priority,
          least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'),
          job.attempts, job.max_attempts, job.last_error,
          nullif(least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.run_at),
          nullif(least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.created_at),
          job.key, job.revision, job.flags::text, null::timestamptz,
          null::boolean, null::timestamptz, null::integer, null::double precision, null::boolean
        from "graphile_worker"._private_jobs as job
        where job.id = any (claimed);
    else
      return query
        update "graphile_worker"._private_jobs as job
          set attempts = job.attempts + 1, locked_by = worker, locked_at = now()
          where job.id = any (locked)
          returning
            null, job.id, job.task_id, job.job_queue_id, null, job.payload::text, job.priority,
            least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'),
            job.attempts, job.max_attempts, job.last_error,
            nullif(least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.run_at),
            nullif(least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.created_at),
            job.key, job.revision, job.flags::text, null::timestamptz,
            null::boolean, null::timestamptz, null::integer, null::double precision, null::boolean;
    end if;
    get diagnostics count = row_count;
    missing := missing - count;
    exit when missing = 0 or is_withheld or cardinality(task_ids) = 0;

    tries := tries + 1;
    if count < expected and tries < 8 then
      -- Jobs that were chosen and could not be locked must not hide the jobs after them.
      passed_over := passed_over || chosen_ids || chosen_flagged || locked;
      spent := spent || array(
        select chosen.queue_id from unnest(chosen_queues) as chosen (queue_id)
        where chosen.queue_id <> all (obtained)
      );
      passed_tasks := passed_tasks || array(
        select quota.task_id
        from unnest(quota_tasks) as quota (task_id)
        where not exists (
          select from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit 1
          for update skip locked
        ) and not exists (
          select from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = -quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit 1
          for update skip locked
        )
      );
    end if;
    if cardinality(locked_queues) > 0 then
      if run_length > 1 then
        kept := kept || array(
          select distinct queue.id from unnest(locked_queues) as queue (id) where queue.id <> all (kept)
        );
      else
        kept := array(select queue.id from unnest(kept) as queue (id) where queue.id <> all (locked_queues));
        spent := spent || locked_queues;
      end if;
    end if;
    continue when is_trimmed or count < expected and tries < 8;
    passed_over := '{}';
    passed_tasks := '{}';
    tries := 0;

    -- Locked rows look like missing rows, so check whether due jobs are left, and when the next job is due. Jobs in
    -- queues that other workers hold are left out: the worker that releases such a queue sends a notification.
    select is_contended or coalesce(bool_or(later.run_at <= as_of), false),
        least(due, min(later.run_at) filter (where later.run_at > as_of))
      into is_contended, due
      from (
        select job.run_at
        from unnest(tasks_without_queue) as task (id)
        cross join lateral (
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (left_out is null or job.id <> all (left_out))
            limit 1
          )
          union all
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = task.id
              and job.priority = level and job.run_at > as_of
            order by job.run_at, job.id limit 1
          )
          union all
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = -task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (left_out is null or job.id <> all (left_out))
            limit 1
          )
          union all
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = -task.id
              and job.priority = level and job.run_at > as_of
            order by job.run_at, job.id limit 1
          )
        ) as job
        union all
        select job.run_at
        from unnest(tasks_with_queue) as task (id)
        cross join lateral (
          select job.run_at
          from (
            select job.run_at, job.job_queue_id from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.task_id = task.id
              and job.priority = level and job.run_at > as_of
            order by job.run_at, job.id limit 100
          ) as job
          join "graphile_worker"._private_job_queues as queue on queue.id = any (array[job.job_queue_id])
          where queue.is_available or queue.id = any (released)
          order by job.run_at limit 1
        ) as job
      ) as later;
    exit when level = 32767;
    from_priority := level + 1;
    from_run_at := '-infinity';
    from_id := 0;
  end loop;

  -- Shares ------------------------------------------------------------------------------------------------------

  if limit_ids is not null then
    for place in 1 .. cardinality(limit_ids) loop
      share := job_counts[place] + used[place] - limit_rooms[place];
      if share <> limit_shares[place] then
        insert into "graphile_worker"._private_python_shares (limit_id, worker_id, held)
          values (limit_ids[place], worker, share)
          on conflict (limit_id, worker_id) do update set held = excluded.held;
        -- Workers that wait do not renew wanted_at before they poll. So it may be too old, although they still wait.
        if share < former_shares[place] and (limit_waits[place] or limit_totals[place] >= limit_sizes[place]) then
          perform pg_notify('jobs:insert', json_build_object('r', random())::text);
        end if;
      end if;
      if limit_wishes[place] > 0 and used[place] = 0 and is_short is null then
        -- The limit leaves no room, although a job is due. If there was room and nothing was claimed, more room would not
        -- help.
        update "graphile_worker"._private_python_limits as known
          set wanted_at = clock_timestamp(), wanted_by = case when share = 0 then worker else known.wanted_by end
          where known.id = any (array(
            select known.id from "graphile_worker"._private_python_limits as known
            where known.id = limit_ids[place]
              and (
                known.wanted_at is null or known.wanted_at < clock_timestamp() - interval '1 second'
                or known.wanted_by is null and share = 0
              )
            for update skip locked
          ));
      elsif used[place] > 0 and limit_waits[place] then
        update "graphile_worker"._private_python_limits as known
          set wanted_by = null
          where known.id = any (array(
            select known.id from "graphile_worker"._private_python_limits as known
            where known.id = limit_ids[place] and known.wanted_by = worker
            for update skip locked
          ));
      end if;
    end loop;
  end if;

  -- Queues ------------------------------------------------------------------------------------------------------

  if cardinality(refused) > 0 then
    return query select
        'unclaimable', job.id, job.task_id, null::integer, null, given.origin, null::smallint, null::timestamptz,
        null::smallint, null::smallint, given.why, null::timestamptz, null::timestamptz, given.code,
        null::integer, null, null::timestamptz, null::boolean, null::timestamptz, null::integer,
        null::double precision, null::boolean
      from unnest(refused, refusals, refusal_states, refusal_origins) as given (id, why, code, origin)
      join "graphile_worker"._private_jobs as job on job.id = any (array[given.id]);
  end if;
  if cardinality(released) > 0 and cardinality(claimed_queues) > 0 then
    -- A queue that we held and claimed from again keeps its lock, and its row is not written.
    select
        array(select queue.id from unnest(released) as queue (id) where queue.id <> all (claimed_queues)),
        array(select queue.id from unnest(claimed_queues) as queue (id) where queue.id <> all (released))
      into released, claimed_queues;
  end if;
  if cardinality(released) > 0 or cardinality(claimed_queues) > 0 then
    return query
      update "graphile_worker"._private_job_queues as queue
        set
          locked_by = case when queue.id = any (claimed_queues) then worker end,
          locked_at = case when queue.id = any (claimed_queues) then now() end
        where queue.id = any (released || claimed_queues)
        returning
          'queue', null::bigint, null::integer, queue.id, queue.queue_name::text, null, null::smallint,
          null::timestamptz, null::smallint, null::smallint, null, null::timestamptz, null::timestamptz, null,
          null::integer, null, null::timestamptz, null::boolean, null::timestamptz, null::integer,
          null::double precision, null::boolean;
  end if;
  if cardinality(released) > 0 then
    -- Includes jobs that are due within 10 seconds, because no worker has set a timer for a job in a locked queue.
    perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', count(*))::text)
      from unnest(released) as queue (id)
      where exists (
        select from "graphile_worker"._private_jobs as job
        where job.is_available and job.job_queue_id = queue.id and job.run_at <= now() + interval '10 seconds'
      )
      having count(*) > 0;
  end if;

  kind := 'end';
  if flags_priority is not null then
    priority := flags_priority;
    run_at := least(greatest(flags_run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00');
    id := flags_id;
  end if;
  locked_at := now();
  contended := coalesce(is_short, false) or is_contended and missing > 0 and not is_withheld;
  next_due := case when due is not null then least(due, '9999-12-31 23:59:59+00') end;
  next_queue := queue_cursor;
  cost := extract(epoch from clock_timestamp() - started);
  withheld := is_withheld;
  return next;
end
$$;

CREATE TABLE graphile_worker._private_python_pauses (
    kind text NOT NULL,
    name text NOT NULL,
    paused_at timestamp with time zone NOT NULL,
    until timestamp with time zone,
    reason text,
    paused_by text NOT NULL,
    locked_by text,
    locked_at timestamp with time zone,
    CONSTRAINT _private_python_pauses_check CHECK (((name = ''::text) = (kind = 'all'::text))),
    CONSTRAINT _private_python_pauses_kind_check CHECK ((kind = ANY (ARRAY['all'::text, 'task'::text, 'queue'::text])))
);

CREATE FUNCTION graphile_worker._private_python_pause(kind text, name text DEFAULT ''::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone, reason text DEFAULT NULL::text, paused_by text DEFAULT (SESSION_USER)::text) RETURNS graphile_worker._private_python_pauses
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
  pause "graphile_worker"._private_python_pauses;
  queue record;
begin
  insert into "graphile_worker"._private_python_pauses as known (kind, name, paused_at, until, reason, paused_by)
    values (
      _private_python_pause.kind, coalesce(_private_python_pause.name, ''), clock_timestamp(),
      _private_python_pause.until, _private_python_pause.reason,
      coalesce(_private_python_pause.paused_by, session_user::text)
    )
    on conflict (kind, name) do update
      set until = excluded.until, reason = excluded.reason, paused_by = excluded.paused_by
    returning known.* into pause;
  while pause.kind = 'queue' loop
    insert into "graphile_worker"._private_job_queues (queue_name)
      select pause.name
      where not exists (select from "graphile_worker"._private_job_queues as known where known.queue_name = pause.name)
      on conflict do nothing;
    select known.id, known.locked_by, known.locked_at into queue
      from "graphile_worker"._private_job_queues as known where known.queue_name = pause.name for update;
    continue when not found;  -- a cleanup has removed it
    if queue.locked_by is distinct from 'python:paused' then
      update "graphile_worker"._private_python_pauses as known
        set locked_by = queue.locked_by, locked_at = queue.locked_at
        where known.kind = pause.kind and known.name = pause.name;
      update "graphile_worker"._private_job_queues as known
        set locked_by = 'python:paused', locked_at = '9999-01-01 00:00:00+00'
        where known.id = queue.id;
    end if;
    exit;
  end loop;
  perform pg_notify('_private_python_pause', '');
  return pause;
end
$$;

CREATE FUNCTION graphile_worker._private_python_resume(kind text, name text DEFAULT ''::text, expired boolean DEFAULT false) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
  pause "graphile_worker"._private_python_pauses;
  queue record;
  holder record;
  result text;
begin
  if expired then
    if _private_python_resume.kind = 'queue' then
      -- Before the pause is removed: if the queue is busy, both stay as they are until the next try.
      select known.id, known.locked_by into queue
        from "graphile_worker"._private_job_queues as known
        where known.queue_name = _private_python_resume.name
        for update skip locked;
      if not found and exists (
        select from "graphile_worker"._private_job_queues as known where known.queue_name = _private_python_resume.name
      ) then
        return null;
      end if;
    end if;
    select * into pause from "graphile_worker"._private_python_pauses as known
      where known.kind = _private_python_resume.kind and known.name = _private_python_resume.name
        and known.until <= clock_timestamp()
      for update skip locked;
    if not found then
      return null;
    end if;
  else
    select * into pause from "graphile_worker"._private_python_pauses as known
      where known.kind = _private_python_resume.kind
        and known.name = coalesce(_private_python_resume.name, '')
      for update;
  end if;
  if pause.kind is not null then
    delete from "graphile_worker"._private_python_pauses as known where known.kind = pause.kind and known.name = pause.name;
    result := '';
  end if;
  if _private_python_resume.kind = 'queue' then
    -- An exchange that records a job of the queue locks the queue's row too. So after this statement, either the job
    -- is gone, or its worker finds the queue's lock given back and releases it together with the job.
    select known.id, known.locked_by into queue
      from "graphile_worker"._private_job_queues as known
      where known.queue_name = _private_python_resume.name and known.locked_by = 'python:paused'
      for update;
    if found then
      result := '';
      -- No job of the queue was claimed since the pause began, so none runs if the queue was not locked then.
      select job.locked_by,
          case when job.locked_by = pause.locked_by then pause.locked_at else job.locked_at end as locked_at
        into holder
        from "graphile_worker"._private_jobs as job
        where (pause.kind is null or pause.locked_by is not null)
          and job.job_queue_id = queue.id and job.locked_at is not null
        order by job.locked_at limit 1;
      if found then
        result := holder.locked_by;
      end if;
      update "graphile_worker"._private_job_queues as known
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
$$;

CREATE TABLE graphile_worker._private_jobs (
    id bigint CONSTRAINT jobs_id_not_null1 NOT NULL,
    job_queue_id integer,
    task_id integer CONSTRAINT jobs_task_id_not_null NOT NULL,
    payload json DEFAULT '{}'::json CONSTRAINT jobs_payload_not_null1 NOT NULL,
    priority smallint DEFAULT 0 CONSTRAINT jobs_priority_not_null1 NOT NULL,
    run_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_run_at_not_null1 NOT NULL,
    attempts smallint DEFAULT 0 CONSTRAINT jobs_attempts_not_null1 NOT NULL,
    max_attempts smallint DEFAULT 25 CONSTRAINT jobs_max_attempts_not_null1 NOT NULL,
    last_error text,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_created_at_not_null1 NOT NULL,
    updated_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_updated_at_not_null1 NOT NULL,
    key text,
    locked_at timestamp with time zone,
    locked_by text,
    revision integer DEFAULT 0 CONSTRAINT jobs_revision_not_null1 NOT NULL,
    flags jsonb,
    is_available boolean GENERATED ALWAYS AS (((locked_at IS NULL) AND (attempts < max_attempts))) STORED CONSTRAINT jobs_is_available_not_null NOT NULL,
    CONSTRAINT jobs_key_check CHECK (((length(key) > 0) AND (length(key) <= 512))),
    CONSTRAINT jobs_max_attempts_check CHECK ((max_attempts >= 1))
);

CREATE FUNCTION graphile_worker.add_job(identifier text, payload json DEFAULT NULL::json, queue_name text DEFAULT NULL::text, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, max_attempts integer DEFAULT NULL::integer, job_key text DEFAULT NULL::text, priority integer DEFAULT NULL::integer, flags text[] DEFAULT NULL::text[], job_key_mode text DEFAULT 'replace'::text) RETURNS graphile_worker._private_jobs
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
  dedupe constant boolean := job_key is not null and coalesce(job_key_mode = 'unsafe_dedupe', false);
  job_key_preserve_run_at constant boolean := coalesce(job_key_mode = 'preserve_run_at', false);
  small_max_attempts smallint;
  small_priority smallint;
  added "graphile_worker"._private_jobs;
begin
  if job_key is not null and job_key_mode not in ('replace', 'preserve_run_at', 'unsafe_dedupe') then
    raise exception 'The job_key_mode "%" does not exist', job_key_mode
      using errcode = 'GWBKM', hint = 'Use replace, preserve_run_at or unsafe_dedupe.';
  end if;

  -- Cast before anything is inserted, so that a number out of range does not use up an id.
  small_max_attempts := coalesce(max_attempts, 25);
  small_priority := coalesce(priority, 0);

  -- Repeated if a worker or another caller comes between two of the statements.
  -- (The line above is the marker by which this function is recognized: keep its words.)
  loop
    insert into "graphile_worker"._private_tasks (identifier)
      select add_job.identifier
      where not exists (
        select from "graphile_worker"._private_tasks as task where task.identifier = add_job.identifier
      )
      on conflict (identifier) do nothing;
    if queue_name is not null then
      insert into "graphile_worker"._private_job_queues (queue_name)
        select add_job.queue_name
        where not exists (
          select from "graphile_worker"._private_job_queues as queue where queue.queue_name = add_job.queue_name
        )
        on conflict (queue_name) do nothing;
    end if;

    if job_key is not null and not dedupe then
      -- See add_jobs.
      update "graphile_worker"._private_jobs as job
        set key = null, attempts = job.max_attempts, updated_at = now()
        where job.key = job_key and not job.is_available;
    end if;

    insert into "graphile_worker"._private_jobs as job
      (job_queue_id, task_id, payload, run_at, max_attempts, key, priority, flags)
    values (
      (select queue.id from "graphile_worker"._private_job_queues as queue
        where queue.queue_name = add_job.queue_name),
      (select task.id from "graphile_worker"._private_tasks as task where task.identifier = add_job.identifier),
      coalesce(add_job.payload, '{}'),
      coalesce(add_job.run_at, now()),
      small_max_attempts,
      job_key,
      small_priority,
      (select jsonb_object_agg(flag, true) from unnest(add_job.flags) as flag)
    )
    on conflict (key) do update set
      job_queue_id = excluded.job_queue_id,
      task_id = excluded.task_id,
      payload = case
        when json_typeof(job.payload) = 'array' and json_typeof(excluded.payload) = 'array'
          then (job.payload::jsonb || excluded.payload::jsonb)::json
        else excluded.payload
      end,
      max_attempts = excluded.max_attempts,
      priority = excluded.priority,
      flags = excluded.flags,
      run_at = case
        when job_key_preserve_run_at and job.attempts = 0 then job.run_at
        else excluded.run_at
      end,
      attempts = 0,
      last_error = null,
      revision = job.revision + 1,
      updated_at = now()
    where job.locked_at is null and not dedupe
    returning * into added;
    exit when found;

    if dedupe then
      -- This applies to the job with the key in any state, because the caller chose "unsafe".
      update "graphile_worker"._private_jobs as job
        set revision = job.revision + 1, updated_at = now()
        where job.key = job_key
        returning * into added;
      if found then
        return added;
      end if;
    end if;
  end loop;

  if added.job_queue_id is null and queue_name is not null then
    raise exception 'The queue "%" was removed while a job was being added to it', queue_name
      using errcode = 'serialization_failure', hint = 'Add the job again.';
  end if;
  perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', 1)::text);
  return added;
end
$$;

CREATE FUNCTION graphile_worker.add_jobs(specs graphile_worker.job_spec[], job_key_preserve_run_at boolean DEFAULT false) RETURNS SETOF graphile_worker._private_jobs
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
  total constant integer := coalesce(cardinality(specs), 0);
  first constant integer := array_lower(specs, 1);
  current_spec "graphile_worker".job_spec;
  position integer := 0;
  added "graphile_worker"._private_jobs;
begin
  if total = 0 then
    return;
  end if;

  -- Only missing names are inserted: with an identity value used up by every call, the values would run out.
  insert into "graphile_worker"._private_tasks (identifier)
    select distinct spec.identifier
    from unnest(specs) as spec
    where not exists (
      select from "graphile_worker"._private_tasks as task where task.identifier = spec.identifier
    )
    order by spec.identifier
    on conflict (identifier) do nothing;
  insert into "graphile_worker"._private_job_queues (queue_name)
    select distinct spec.queue_name
    from unnest(specs) as spec
    where spec.queue_name is not null and not exists (
      select from "graphile_worker"._private_job_queues as queue where queue.queue_name = spec.queue_name
    )
    order by spec.queue_name
    on conflict (queue_name) do nothing;

  -- A job that is running, or that has failed permanently, gives up its key. It does not run again, and the new job
  -- gets the key.
  if exists (select from unnest(specs) as spec where spec.job_key is not null) then
    -- All calls lock in the same order, so that two calls with the same keys do not deadlock.
    perform from "graphile_worker"._private_jobs as job
      join unnest(specs) as spec on spec.job_key = job.key
      order by job.key
      for update of job;
    update "graphile_worker"._private_jobs as job
      set key = null, attempts = job.max_attempts, updated_at = now()
      from unnest(specs) as spec
      where job.key = spec.job_key and not job.is_available;
  end if;

  -- The random number keeps PostgreSQL from merging equal notifications of one transaction into one.
  perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', total)::text);

  -- No join and no sort: rows are inserted, numbered and returned in the order of the specs.
  -- (The line above is the marker by which this function is recognized: keep its words.)
  for added in
    insert into "graphile_worker"._private_jobs as job
      (job_queue_id, task_id, payload, run_at, max_attempts, key, priority, flags)
    select
      case when spec.queue_name is not null then (
        select queue.id from "graphile_worker"._private_job_queues as queue
        where queue.queue_name = spec.queue_name
      ) end,
      (select task.id from "graphile_worker"._private_tasks as task where task.identifier = spec.identifier),
      coalesce(spec.payload, '{}'),
      coalesce(spec.run_at, now()),
      coalesce(spec.max_attempts, 25::smallint),
      spec.job_key,
      coalesce(spec.priority, 0::smallint),
      case when spec.flags is not null then (
        select jsonb_object_agg(flag, true) from unnest(spec.flags) as flag
      ) end
    from unnest(specs) as spec
    on conflict (key) do update set
      job_queue_id = excluded.job_queue_id,
      task_id = excluded.task_id,
      payload = case
        when json_typeof(job.payload) = 'array' and json_typeof(excluded.payload) = 'array'
          then (job.payload::jsonb || excluded.payload::jsonb)::json
        else excluded.payload
      end,
      max_attempts = excluded.max_attempts,
      priority = excluded.priority,
      flags = excluded.flags,
      run_at = case
        when job_key_preserve_run_at and job.attempts = 0 then job.run_at
        else excluded.run_at
      end,
      attempts = 0,
      last_error = null,
      revision = job.revision + 1,
      updated_at = now()
    where job.locked_at is null
    returning *
  loop
    current_spec := specs[first + position];
    position := position + 1;
    -- A spec without a row met a job that a worker claimed after the update above. The new call sees that the job is
    -- running, and takes its key.
    while added.key is distinct from current_spec.job_key loop
      return query select * from "graphile_worker".add_jobs(array[current_spec], job_key_preserve_run_at);
      current_spec := specs[first + position];
      position := position + 1;
    end loop;
    if added.job_queue_id is null and current_spec.queue_name is not null then
      raise exception 'The queue "%" was removed while a job was being added to it', current_spec.queue_name
        using errcode = 'serialization_failure', hint = 'Add the job again.';
    end if;
    return next added;
  end loop;
  while position < total loop
    return query select * from "graphile_worker".add_jobs(array[specs[first + position]], job_key_preserve_run_at);
    position := position + 1;
  end loop;
end
$$;

CREATE FUNCTION graphile_worker.complete_jobs(job_ids bigint[]) RETURNS SETOF graphile_worker._private_jobs
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  delete from "graphile_worker"._private_jobs as job
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$$;

CREATE FUNCTION graphile_worker.delete_stale_workers(worker_ids text[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  delete from "graphile_worker"._private_workers as worker where worker.id = any (worker_ids);
$$;

CREATE FUNCTION graphile_worker.force_unlock_workers(worker_ids text[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  update "graphile_worker"._private_jobs as job
    set locked_at = null, locked_by = null
    where job.locked_by = any (worker_ids);
  update "graphile_worker"._private_job_queues as queue
    set locked_at = null, locked_by = null
    where queue.locked_by = any (worker_ids);
$$;

CREATE FUNCTION graphile_worker.list_orphan_locked_workers(stale_threshold interval) RETURNS TABLE(worker_id text)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  select held.locked_by
    from (
      select locked_by, locked_at from "graphile_worker"._private_jobs
      union all
      select locked_by, locked_at from "graphile_worker"._private_job_queues
    ) as held
    where held.locked_by is not null
      and held.locked_at < now() - stale_threshold
      and not exists (
        select from "graphile_worker"._private_workers as worker where worker.id = held.locked_by
      )
    group by held.locked_by;
$$;

CREATE FUNCTION graphile_worker.list_stale_workers(stale_threshold interval) RETURNS TABLE(worker_id text)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  select worker.id
    from "graphile_worker"._private_workers as worker
    where worker.last_heartbeat_at < now() - stale_threshold;
$$;

CREATE FUNCTION graphile_worker.permanently_fail_jobs(job_ids bigint[], error_message text DEFAULT NULL::text) RETURNS SETOF graphile_worker._private_jobs
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  update "graphile_worker"._private_jobs as job
    set last_error = coalesce(error_message, 'Manually marked as failed'),
        attempts = job.max_attempts,
        updated_at = now()
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$$;

CREATE FUNCTION graphile_worker.recover_dead_worker_jobs(worker_ids text[], recovery_delay interval DEFAULT '00:00:00'::interval) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  recovered integer;
begin
  update "graphile_worker"._private_jobs as job
    set attempts = greatest(0, job.attempts - 1),
        run_at = greatest(job.run_at, now() + recovery_delay),
        last_error = 'Job recovered after worker interruption',
        locked_at = null,
        locked_by = null
    where job.locked_by = any (worker_ids);
  get diagnostics recovered = row_count;
  update "graphile_worker"._private_job_queues as queue
    set locked_at = null, locked_by = null
    where queue.locked_by = any (worker_ids);
  return recovered;
end
$$;

CREATE FUNCTION graphile_worker.remove_job(job_key text) RETURNS graphile_worker._private_jobs
    LANGUAGE plpgsql STRICT
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  job "graphile_worker"._private_jobs;
begin
  -- The row is locked first, so that the checks below stay true until the end. If the key went to another job while
  -- this call waited for the lock, the loop selects again.
  loop
    select * into job from "graphile_worker"._private_jobs as found where found.key = job_key for update;
    exit when found;
    if not exists (select from "graphile_worker"._private_jobs as found where found.key = job_key) then
      return job;
    end if;
  end loop;
  if job.locked_at is null or job.locked_at < now() - interval '4 hours' then
    delete from "graphile_worker"._private_jobs as found where found.id = job.id;
    perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', -1)::text);
    return job;
  end if;
  -- The job is running: it may finish, but it is never retried.
  update "graphile_worker"._private_jobs as found
    set key = null, attempts = found.max_attempts, updated_at = now()
    where found.id = job.id
    returning * into job;
  return job;
end
$$;

CREATE FUNCTION graphile_worker.reschedule_jobs(job_ids bigint[], run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, priority integer DEFAULT NULL::integer, attempts integer DEFAULT NULL::integer, max_attempts integer DEFAULT NULL::integer) RETURNS SETOF graphile_worker._private_jobs
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  update "graphile_worker"._private_jobs as job
    set run_at = coalesce(reschedule_jobs.run_at, job.run_at),
        priority = coalesce(reschedule_jobs.priority::smallint, job.priority),
        attempts = coalesce(reschedule_jobs.attempts::smallint, job.attempts),
        max_attempts = coalesce(reschedule_jobs.max_attempts::smallint, job.max_attempts),
        updated_at = now()
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$$;

CREATE FUNCTION graphile_worker.worker_deregister(worker_id text) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  delete from "graphile_worker"._private_workers as worker where worker.id = worker_id;
$$;

CREATE FUNCTION graphile_worker.worker_heartbeat(worker_id text, metadata json DEFAULT NULL::json) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
  insert into "graphile_worker"._private_workers as worker (id, last_heartbeat_at, metadata)
    values (worker_id, now(), worker_heartbeat.metadata::jsonb)
    on conflict (id) do update set
      last_heartbeat_at = excluded.last_heartbeat_at,
      metadata = coalesce(excluded.metadata, worker.metadata);
$$;

CREATE TABLE graphile_worker._private_job_queues (
    id integer CONSTRAINT job_queues_id_not_null NOT NULL,
    queue_name text CONSTRAINT job_queues_queue_name_not_null1 NOT NULL,
    locked_at timestamp with time zone,
    locked_by text,
    is_available boolean GENERATED ALWAYS AS ((locked_at IS NULL)) STORED CONSTRAINT job_queues_is_available_not_null NOT NULL,
    CONSTRAINT job_queues_queue_name_check CHECK ((length(queue_name) <= 128))
);

CREATE TABLE graphile_worker._private_known_crontabs (
    identifier text CONSTRAINT known_crontabs_identifier_not_null NOT NULL,
    known_since timestamp with time zone CONSTRAINT known_crontabs_known_since_not_null NOT NULL,
    last_execution timestamp with time zone
);

CREATE TABLE graphile_worker._private_python_cancellations (
    id bigint NOT NULL,
    job_id bigint NOT NULL,
    reason text NOT NULL,
    requested_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

ALTER TABLE graphile_worker._private_python_cancellations ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME graphile_worker._private_python_cancellations_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE graphile_worker._private_python_dead_workers (
    worker_id text NOT NULL,
    died_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE graphile_worker._private_python_depths (
    period integer NOT NULL,
    at timestamp with time zone NOT NULL,
    task text NOT NULL,
    samples integer NOT NULL,
    ready bigint NOT NULL,
    scheduled bigint NOT NULL,
    running bigint NOT NULL,
    failed bigint NOT NULL,
    estimated boolean NOT NULL
);

CREATE TABLE graphile_worker._private_python_failures (
    job_id bigint NOT NULL,
    attempts smallint NOT NULL,
    run_at timestamp with time zone NOT NULL,
    last_error_hash bigint,
    failed_at timestamp with time zone NOT NULL,
    worker_died boolean DEFAULT false NOT NULL,
    error_type text,
    traceback text
);

CREATE TABLE graphile_worker._private_python_flushes (
    worker text NOT NULL,
    number bigint NOT NULL,
    at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE graphile_worker._private_python_limits (
    id integer NOT NULL,
    name text NOT NULL,
    tasks text[] DEFAULT '{}'::text[] NOT NULL,
    concurrency integer,
    concurrency_override integer,
    wanted_at timestamp with time zone,
    wanted_by text,
    CONSTRAINT _private_python_limits_concurrency_check CHECK ((concurrency > 0)),
    CONSTRAINT _private_python_limits_concurrency_override_check CHECK ((concurrency_override >= 0))
)
WITH (fillfactor='50');

ALTER TABLE graphile_worker._private_python_limits ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME graphile_worker._private_python_limits_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE graphile_worker._private_python_migrations (
    id integer NOT NULL,
    name text NOT NULL,
    breaking boolean DEFAULT false NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE graphile_worker._private_python_progress (
    job_id bigint NOT NULL,
    locked_at timestamp with time zone NOT NULL,
    value json NOT NULL,
    at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE graphile_worker._private_python_runs (
    job_id bigint NOT NULL,
    attempt smallint NOT NULL,
    outcome smallint NOT NULL,
    final boolean NOT NULL,
    ended_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    duration real,
    run_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    task_id integer NOT NULL,
    queue_name text,
    worker text,
    key text,
    error text,
    error_type text,
    traceback text,
    result json,
    no_result text,
    payload json
)
PARTITION BY RANGE (ended_at);

CREATE TABLE graphile_worker._private_python_runs_default (
    job_id bigint CONSTRAINT _private_python_runs_job_id_not_null NOT NULL,
    attempt smallint CONSTRAINT _private_python_runs_attempt_not_null NOT NULL,
    outcome smallint CONSTRAINT _private_python_runs_outcome_not_null NOT NULL,
    final boolean CONSTRAINT _private_python_runs_final_not_null NOT NULL,
    ended_at timestamp with time zone CONSTRAINT _private_python_runs_ended_at_not_null NOT NULL,
    started_at timestamp with time zone,
    duration real,
    run_at timestamp with time zone CONSTRAINT _private_python_runs_run_at_not_null NOT NULL,
    created_at timestamp with time zone CONSTRAINT _private_python_runs_created_at_not_null NOT NULL,
    task_id integer CONSTRAINT _private_python_runs_task_id_not_null NOT NULL,
    queue_name text,
    worker text,
    key text,
    error text,
    error_type text,
    traceback text,
    result json,
    no_result text,
    payload json
);

CREATE TABLE graphile_worker._private_python_sessions (
    worker_id text NOT NULL,
    generation bigint NOT NULL,
    connected_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE graphile_worker._private_python_shares (
    limit_id integer NOT NULL,
    worker_id text NOT NULL,
    held integer NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE graphile_worker._private_python_statistics (
    period integer NOT NULL,
    at timestamp with time zone NOT NULL,
    task text NOT NULL,
    worker text NOT NULL,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    snoozed bigint NOT NULL,
    cancelled bigint NOT NULL,
    interrupted bigint NOT NULL,
    run_seconds double precision NOT NULL,
    wait_seconds double precision NOT NULL,
    runs bigint[] NOT NULL,
    waits bigint[] NOT NULL
);

CREATE TABLE graphile_worker._private_python_turns (
    name text NOT NULL,
    due_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE graphile_worker._private_tasks (
    id integer CONSTRAINT tasks_id_not_null NOT NULL,
    identifier text CONSTRAINT tasks_identifier_not_null NOT NULL,
    CONSTRAINT tasks_identifier_check CHECK ((length(identifier) <= 128))
);

CREATE TABLE graphile_worker._private_workers (
    id text NOT NULL,
    last_heartbeat_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    metadata jsonb
);

ALTER TABLE graphile_worker._private_job_queues ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME graphile_worker.job_queues_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW graphile_worker.jobs AS
 SELECT job.id,
    queue.queue_name,
    task.identifier AS task_identifier,
    job.priority,
    job.run_at,
    job.attempts,
    job.max_attempts,
    job.last_error,
    job.created_at,
    job.updated_at,
    job.key,
    job.locked_at,
    job.locked_by,
    job.revision,
    job.flags
   FROM ((graphile_worker._private_jobs job
     JOIN graphile_worker._private_tasks task ON ((task.id = job.task_id)))
     LEFT JOIN graphile_worker._private_job_queues queue ON ((queue.id = job.job_queue_id)));

ALTER TABLE graphile_worker._private_jobs ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME graphile_worker.jobs_id_seq1
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE graphile_worker.migrations (
    id integer NOT NULL,
    ts timestamp with time zone DEFAULT now() NOT NULL,
    breaking boolean DEFAULT false NOT NULL
);

ALTER TABLE graphile_worker._private_tasks ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME graphile_worker.tasks_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

ALTER TABLE ONLY graphile_worker._private_python_runs ATTACH PARTITION graphile_worker._private_python_runs_default DEFAULT;

ALTER TABLE ONLY graphile_worker._private_python_cancellations
    ADD CONSTRAINT _private_python_cancellations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_python_dead_workers
    ADD CONSTRAINT _private_python_dead_workers_pkey PRIMARY KEY (worker_id);

ALTER TABLE ONLY graphile_worker._private_python_depths
    ADD CONSTRAINT _private_python_depths_pkey PRIMARY KEY (period, at, task);

ALTER TABLE ONLY graphile_worker._private_python_failures
    ADD CONSTRAINT _private_python_failures_pkey PRIMARY KEY (job_id);

ALTER TABLE ONLY graphile_worker._private_python_flushes
    ADD CONSTRAINT _private_python_flushes_pkey PRIMARY KEY (worker);

ALTER TABLE ONLY graphile_worker._private_python_limits
    ADD CONSTRAINT _private_python_limits_name_key UNIQUE (name);

ALTER TABLE ONLY graphile_worker._private_python_limits
    ADD CONSTRAINT _private_python_limits_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_python_migrations
    ADD CONSTRAINT _private_python_migrations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_python_pauses
    ADD CONSTRAINT _private_python_pauses_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY graphile_worker._private_python_progress
    ADD CONSTRAINT _private_python_progress_pkey PRIMARY KEY (job_id);

ALTER TABLE ONLY graphile_worker._private_python_sessions
    ADD CONSTRAINT _private_python_sessions_pkey PRIMARY KEY (worker_id);

ALTER TABLE ONLY graphile_worker._private_python_shares
    ADD CONSTRAINT _private_python_shares_pkey PRIMARY KEY (limit_id, worker_id);

ALTER TABLE ONLY graphile_worker._private_python_statistics
    ADD CONSTRAINT _private_python_statistics_pkey PRIMARY KEY (period, at, task, worker);

ALTER TABLE ONLY graphile_worker._private_python_turns
    ADD CONSTRAINT _private_python_turns_pkey PRIMARY KEY (name);

ALTER TABLE ONLY graphile_worker._private_workers
    ADD CONSTRAINT _private_workers_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_job_queues
    ADD CONSTRAINT job_queues_pkey1 PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_job_queues
    ADD CONSTRAINT job_queues_queue_name_key UNIQUE (queue_name);

ALTER TABLE ONLY graphile_worker._private_jobs
    ADD CONSTRAINT jobs_key_key1 UNIQUE (key);

ALTER TABLE ONLY graphile_worker._private_jobs
    ADD CONSTRAINT jobs_pkey1 PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_known_crontabs
    ADD CONSTRAINT known_crontabs_pkey PRIMARY KEY (identifier);

ALTER TABLE ONLY graphile_worker.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_tasks
    ADD CONSTRAINT tasks_identifier_key UNIQUE (identifier);

ALTER TABLE ONLY graphile_worker._private_tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (id);

CREATE INDEX _private_python_jobs_of_queue ON graphile_worker._private_jobs USING btree (job_queue_id, task_id, priority, run_at, id) WHERE (is_available AND (job_queue_id IS NOT NULL));

CREATE INDEX _private_python_jobs_with_flags ON graphile_worker._private_jobs USING btree (task_id, priority, run_at, id) WHERE (is_available AND (job_queue_id IS NULL) AND (flags IS NOT NULL));

CREATE INDEX _private_python_jobs_with_queue ON graphile_worker._private_jobs USING btree (task_id, priority, run_at, id) INCLUDE (job_queue_id) WHERE (is_available AND (job_queue_id IS NOT NULL));

CREATE INDEX _private_python_jobs_without_flags ON graphile_worker._private_jobs USING btree (task_id, priority, run_at, id) WHERE (is_available AND (job_queue_id IS NULL) AND (flags IS NULL));

CREATE INDEX _private_python_runs_failed ON ONLY graphile_worker._private_python_runs USING btree (ended_at) WHERE (outcome <> 1);

CREATE INDEX _private_python_runs_default_ended_at_idx ON graphile_worker._private_python_runs_default USING btree (ended_at) WHERE (outcome <> 1);

CREATE INDEX _private_python_runs_job_id ON ONLY graphile_worker._private_python_runs USING btree (job_id);

CREATE INDEX _private_python_runs_default_job_id_idx ON graphile_worker._private_python_runs_default USING btree (job_id);

CREATE INDEX _private_python_runs_task_id ON ONLY graphile_worker._private_python_runs USING btree (task_id, ended_at);

CREATE INDEX _private_python_runs_default_task_id_ended_at_idx ON graphile_worker._private_python_runs_default USING btree (task_id, ended_at);

CREATE INDEX _private_workers_last_heartbeat_at_idx ON graphile_worker._private_workers USING btree (last_heartbeat_at);

CREATE INDEX jobs_main_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id, job_queue_id) WHERE (is_available = true);

CREATE INDEX jobs_no_queue_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id) WHERE ((is_available = true) AND (job_queue_id IS NULL));

ALTER INDEX graphile_worker._private_python_runs_failed ATTACH PARTITION graphile_worker._private_python_runs_default_ended_at_idx;

ALTER INDEX graphile_worker._private_python_runs_job_id ATTACH PARTITION graphile_worker._private_python_runs_default_job_id_idx;

ALTER INDEX graphile_worker._private_python_runs_task_id ATTACH PARTITION graphile_worker._private_python_runs_default_task_id_ended_at_idx;

ALTER TABLE graphile_worker._private_job_queues ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_jobs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_known_crontabs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_tasks ENABLE ROW LEVEL SECURITY;
