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

CREATE FUNCTION graphile_worker._private_python_exchange_v2(worker text, job_ids bigint[], job_locks timestamp with time zone[], queue_ids integer[], queue_locks timestamp with time zone[], changes json, task_ids integer[], wanted integer, run_length integer, forbidden_flags text[], as_of timestamp with time zone, mark_priority smallint, mark_run_at timestamp with time zone, mark_id bigint, after_queue integer, session bigint, careful boolean, left_out bigint[]) RETURNS TABLE(kind text, id bigint, task_id integer, job_queue_id integer, queue_name text, payload text, priority smallint, run_at timestamp with time zone, attempts smallint, max_attempts smallint, last_error text, created_at timestamp with time zone, updated_at timestamp with time zone, key text, revision integer, flags text, locked_at timestamp with time zone, contended boolean, next_due timestamp with time zone, next_queue integer, cost double precision)
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
  kept integer[] := '{}';            -- queues that are ours, and may give us a job now
  released integer[];
  spent integer[] := '{}';           -- queues that gave us what they may
  claimed_queues integer[] := '{}';
  missing integer := greatest(wanted, 0);
  marked constant boolean := mark_priority is not null;
  level smallint;
  first_level smallint;
  level_without_queue smallint;
  level_with_queue smallint;
  tasks_without_queue integer[];     -- those that have jobs for us, if there are any in this level
  tasks_with_queue integer[];
  from_priority smallint := coalesce(mark_priority, -32768);
  from_run_at timestamptz := coalesce(mark_run_at, '-infinity');
  from_id bigint := coalesce(mark_id, 0);
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
  passed_over bigint[] := '{}';      -- jobs of this level that we cannot have
  busy bigint[] := '{}';             -- jobs of our queues that somebody's transaction has
  passed_tasks integer[] := '{}';    -- tasks that have no more jobs for us in this level
  tries integer := 0;
  count integer;
  is_contended boolean := false;
  due timestamptz;
  queue_cursor integer := 0;
  patience text;
  ignored text;
  started timestamptz;
  claimed bigint[];                  -- used only with `careful`, as all that follow
  candidate bigint;
  why text;
  code text;
  origin text;
  refused bigint[];
  refusals text[];
  refusal_states text[];
  refusal_origins text[];
begin
  -- The row is locked until the commit. A worker that connects again waits for that when it raises the generation, so it
  -- knows that none of its calls is still under way; one that arrives even later finds no row, and does nothing.
  if session is not null then
    perform from "graphile_worker"._private_python_sessions as latest
      where latest.worker_id = worker and latest.generation = session
      for share nowait;
    if not found then
      raise exception 'This call was given up by its worker' using errcode = 'GWGUP';
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
          from "graphile_worker"._private_python_exchange_v2(
            worker, job_ids[place:place], job_locks[place:place],
            case when queue_ids[place] is not null then queue_ids[place:place] end,
            case when queue_ids[place] is not null then queue_locks[place:place] end,
            (
              select json_agg(change.value) from json_array_elements(changes) as change (value)
              where (change.value ->> 'id')::bigint = job_ids[place]
                and (change.value ->> 'locked_at')::timestamptz = job_locks[place]
            ),
            '{}', 0, 1, null, as_of, null, null, null, null, null, false, null
          ) as one
          where one.kind in ('busy', 'lost');
      exception when others then
        get stacked diagnostics why = message_text, code = returned_sqlstate, origin = pg_exception_context;
        if left(code, 2) in ('53', '57', '58') then
          raise;  -- the server lacks something, or shuts down: not because of this job
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
      select coalesce(array_agg(queue.id), '{}') into kept
        from unnest(queue_ids, queue_locks) as given (id, locked_at)
        cross join lateral (
          select queue.id from "graphile_worker"._private_job_queues as queue
          where queue.id = given.id and queue.locked_by = worker and queue.locked_at = given.locked_at
          for update skip locked
        ) as queue;
    end if;

    recorded := null;
    if changes is null and (queue_ids is null or cardinality(kept) = cardinality(array_remove(queue_ids, null))) then
      -- As usual all are completed, and their queues are ours. Then they are deleted without being locked first, which
      -- would cost as much again. If somebody has locked one, or one is not ours any more, this is undone.
      patience := current_setting('lock_timeout');
      begin
        ignored := set_config('lock_timeout', '1', true);
        -- Looked up by their ids, deleted by their places: there is one way only to plan that. What somebody has freed
        -- or taken in between is not ours any more; and we ourselves claim nothing meanwhile.
        delete from "graphile_worker"._private_jobs as job
          where job.locked_by = worker and job.ctid = any (array(
            select found.place
            from unnest(job_ids, job_locks) as given (id, locked_at)
            cross join lateral (
              select job.ctid as place from "graphile_worker"._private_jobs as job
              where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
              offset 0
            ) as found
          ));
        get diagnostics count = row_count;
        if count < cardinality(job_ids) then
          raise lock_not_available;
        end if;
        recorded := job_ids;
        ignored := set_config('lock_timeout', patience, true);
      exception when lock_not_available then
        recorded := null;
      end;
    end if;

    if recorded is null then
      select coalesce(array_agg(job.id), '{}'), coalesce(array_agg(given.locked_at), '{}')
        into recorded, recorded_locks
        from (
          select id, locked_at, queue_ids[place] as queue_id, queue_locks[place] as queue_locked_at
          from unnest(job_ids, job_locks) with ordinality as given (id, locked_at, place)
        ) as given
        cross join lateral (
          select job.id from "graphile_worker"._private_jobs as job
          where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
            -- Together with its queue, unless that is not ours any more.
            and (given.queue_id is null or given.queue_id = any (kept) or not exists (
              select from "graphile_worker"._private_job_queues as queue
              where queue.id = given.queue_id and queue.locked_by = worker
                and queue.locked_at = given.queue_locked_at
            ))
          for update skip locked
        ) as job;
      delete from "graphile_worker"._private_jobs as job
        where job.id = any (recorded)
          and not exists (
            select from json_to_recordset(changes) as change (id bigint, locked_at timestamptz)
            where change.id = job.id and change.locked_at = job.locked_at
          );
    end if;

    if changes is not null then
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
          -- Of a batch the items that are left, as they are stored. There may be many thousands: a filter is no
          -- condition that could become a join, and without hash joins a loop, so their places are hashed.
          payload = case
            when change."left" is null or json_typeof(job.payload) <> 'array' then job.payload
            else coalesce((
              select json_agg(item.value order by item.place)
                filter (where item.place in (select unnest(change."left")))
              from json_array_elements(job.payload) with ordinality as item (value, place)
            ), job.payload)
          end,
          -- The attempt is given back, but not to a job whose key was taken over or removed while it ran: that
          -- one has been brought to its last attempt so that it does not run again.
          attempts = case
            when change.final then job.max_attempts
            when change.action <> 'fail' and job.attempts = change.attempts
                and job.key is not distinct from change.key
              then greatest(0, job.attempts - 1)
            else job.attempts
          end
        from json_to_recordset(changes)
          as change (
            id bigint, locked_at timestamptz, action text, error text, delay float8, at timestamptz,
            final boolean, "left" integer[], attempts smallint, key text
          )
        where job.id = change.id and job.locked_at = change.locked_at and job.id = any (recorded);
      -- Whoever has a free slot can have what was given back.
      perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', count(*))::text)
        from json_to_recordset(changes) as change (id bigint, action text)
        where change.action = 'return' and change.id = any (recorded)
        having count(*) > 0;
    end if;

    if cardinality(recorded) < cardinality(job_ids) then
      return query select
          case when ours.id is null then 'lost' else 'busy' end, given.id, null::integer, null::integer, null,
          null, null::smallint, null::timestamptz, null::smallint, null::smallint, null, null::timestamptz,
          null::timestamptz, null, null::integer, null, given.locked_at, null::boolean, null::timestamptz,
          null::integer, null::double precision
        from unnest(job_ids, job_locks) as given (id, locked_at)
        left join "graphile_worker"._private_jobs as ours
          on ours.id = given.id and ours.locked_by = worker and ours.locked_at = given.locked_at
        -- A job that somebody freed and we claimed again may be there twice.
        where not exists (
          select from unnest(recorded, recorded_locks) as done (id, locked_at)
          where done.id = given.id and done.locked_at = given.locked_at
        );
      -- The queue of a job that is still ours stays locked.
      select coalesce(array_agg(queue.id), '{}') into kept
        from unnest(kept) as queue (id)
        where not exists (
          select from unnest(job_ids, job_locks, queue_ids) as given (id, locked_at, queue_id)
          join "graphile_worker"._private_jobs as ours
            on ours.id = given.id and ours.locked_by = worker and ours.locked_at = given.locked_at
          where given.queue_id = queue.id
        );
    end if;
  end if;
  released := kept;

  -- Claim -------------------------------------------------------------------------------------------------------
  --
  -- Priority by priority, because jobs of a better one that are due later would otherwise stand in the way.

  started := clock_timestamp();
  while missing > 0 loop
    if mark_priority is not null and exists (
      select from "graphile_worker"._private_workers as dead where dead.id = worker and dead.metadata ? 'died_at'
    ) then
      exit;
    elsif mark_priority is not null then
      -- To ask for the level would be to walk past what the mark is to leave out.
      level_without_queue := mark_priority;
      level_with_queue := mark_priority;
      tasks_without_queue := task_ids;
      tasks_with_queue := task_ids;
      mark_priority := null;
    else
      select
          min(found.without_queue), array_agg(task.id) filter (where found.without_queue is not null),
          min(found.with_queue), array_agg(task.id) filter (where found.with_queue is not null)
        into level_without_queue, tasks_without_queue, level_with_queue, tasks_with_queue
        from unnest(task_ids) as task (id)
        cross join lateral (select
          (
            select job.priority from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
              and job.priority >= from_priority
            order by job.priority, job.run_at, job.id limit 1
          ) as without_queue,
          (
            select job.priority from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.task_id = task.id
              and job.priority >= from_priority
            order by job.priority, job.run_at, job.id limit 1
          ) as with_queue
        ) as found
        -- What a worker claims that was declared dead would be taken from it again while it runs.
        where not exists (
          select from "graphile_worker"._private_workers as dead where dead.id = worker and dead.metadata ? 'died_at'
        );
    end if;
    if least(level_without_queue, level_with_queue) > level then
      -- Another try found nothing more in its level: what it was to leave out is of no meaning here.
      passed_over := '{}';
      passed_tasks := '{}';
      tries := 0;
    end if;
    level := least(level_without_queue, level_with_queue);
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
        select job.id, job.job_queue_id, job.run_at, task.id as task_id
        from unnest(tasks_with_queue) as task (id)
        cross join lateral (
          select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is not null and job.task_id = task.id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out))
            and job.id <> all (passed_over)
          order by job.run_at, job.id limit page_size
        ) as job
      ), free as materialized (
        select queue.id
        from (select distinct page.job_queue_id as id from page) as given
        join "graphile_worker"._private_job_queues as queue on queue.id = given.id and queue.is_available
        where given.id <> all (kept) and given.id <> all (spent)
      ), found as (
        select page.id, page.job_queue_id, page.run_at
        from page
        where page.job_queue_id = any (array(select free.id from free)) and cardinality(tasks_with_queue) = 1
        union all
        -- Of queues that are ours the next job is found wherever it stands; and so with several tasks, for then
        -- the page of one may end before the page of another begins.
        select job.id, job.job_queue_id, job.run_at
        from (
          select unnest(kept) as id
          union all
          select free.id from free where cardinality(tasks_with_queue) > 1
        ) as queue
        cross join unnest(tasks_with_queue) as task (id)
        cross join lateral (
          select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
            and job.task_id = task.id and job.priority = level and job.run_at <= as_of
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out))
            and job.id <> all (passed_over)
          order by job.run_at, job.id limit run_length
        ) as job
      ), ranked as (
        select found.*, row_number() over (partition by job_queue_id order by run_at, id) as place from found
      )
      select
        coalesce(array_agg(ranked.id), '{}'),
        coalesce(array_agg(ranked.job_queue_id), '{}'),
        coalesce(array_agg(ranked.run_at), '{}'),
        (select coalesce(max(size), 0) >= page_size from (select count(*) as size from page group by task_id) as pages)
        into candidate_ids, candidate_queues, candidate_times, page_full
        from ranked where ranked.place <= run_length;

      if page_full and cardinality(candidate_ids) < missing and after_queue is null then
        queue_cursor := null;
      elsif page_full and cardinality(candidate_ids) < missing then
        -- The page is full of jobs in locked queues: visit queue by queue, some at a time.
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
          join "graphile_worker"._private_job_queues as queue on queue.id = visited.queue_id and queue.is_available
          cross join unnest(tasks_with_queue) as task (id)
          cross join lateral (
            select job.id, job.job_queue_id, job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
              and job.task_id = task.id and job.priority = level and job.run_at <= as_of
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
              and job.id <> all (passed_over)
            order by job.run_at, job.id limit run_length
          ) as job
          where visited.queue_id <> all (kept) and visited.queue_id <> all (spent)
            and job.id <> all (candidate_ids)
        ), ranked as (
          select found.*, row_number() over (partition by job_queue_id order by run_at, id) as place from found
        )
        select
          candidate_ids || coalesce(array_agg(ranked.id), '{}'),
          candidate_queues || coalesce(array_agg(ranked.job_queue_id), '{}'),
          candidate_times || coalesce(array_agg(ranked.run_at), '{}'),
          -- Of all levels, in case that of this one is the smaller.
          greatest(
            queue_cursor, (select case when bool_or(queue_id is null) then 0 else max(queue_id) end from visited)
          )
          into candidate_ids, candidate_queues, candidate_times, queue_cursor
          from ranked where ranked.place <= run_length;
      end if;
    end if;

    if cardinality(candidate_ids) > 0 and (marked or level > first_level) then
      -- A queue that was locked when we looked at what comes before, or when the look did that set the mark, may be free
      -- by now. Its jobs keep their order, so those that are not its first wait for the next look.
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
            -- The first of each level, because those that are due later must not be walked past.
            with recursive other (priority, run_at, id) as (
              (
                select job.priority, job.run_at, job.id from "graphile_worker"._private_jobs as job
                where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
                  and job.task_id = task.id and job.id <> all (candidate_ids) and job.id <> all (busy)
                  and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
                  and (left_out is null or job.id <> all (left_out))
                order by job.priority, job.run_at, job.id limit 1
              )
              union all
              select job.* from other
              cross join lateral (
                select job.priority, job.run_at, job.id from "graphile_worker"._private_jobs as job
                where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
                  and job.task_id = task.id and job.priority > other.priority
                  and job.id <> all (candidate_ids) and job.id <> all (busy)
                  and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
                  and (left_out is null or job.id <> all (left_out))
                order by job.priority, job.run_at, job.id limit 1
              ) as job
              where other.run_at > as_of and other.priority < level
            )
            select from other
            where other.run_at <= as_of
              and (other.priority, other.run_at, other.id) < (level, queue.run_at, queue.job_id)
            limit 1
          ) as earlier
        ));
    end if;

    -- Choose: so many jobs without queue of each task, and these jobs with queue.
    if cardinality(candidate_ids) = 0 and cardinality(tasks_without_queue) = 1 and tries = 0 then
      chosen_ids := '{}';
      quota_tasks := tasks_without_queue;
      quotas := array[missing];
      expected := 0;  -- there is nothing that others could be taken from
    elsif tasks_without_queue is null and cardinality(candidate_ids) <= missing then
      chosen_ids := candidate_ids;
      chosen_queues := candidate_queues;
      quota_tasks := '{}';
      quotas := '{}';
      expected := cardinality(chosen_ids);
    else
      -- Of those without queue it is only counted how many come first, so that others can be taken for those that are
      -- being taken by somebody else.
      with best as (
        select * from (
          select job.id, null::integer as queue_id, job.run_at, task.id as task_id
          from unnest(tasks_without_queue) as task (id)
          cross join lateral (
            select job.id, job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            order by job.run_at, job.id limit missing
          ) as job
          where task.id <> all (passed_tasks)
          union all
          select candidate.id, candidate.queue_id, candidate.run_at, null
          from unnest(candidate_ids, candidate_queues, candidate_times) as candidate (id, queue_id, run_at)
        ) as any_kind
        order by run_at, id limit missing
      )
      select
        coalesce(array_agg(best.id) filter (where best.queue_id is not null), '{}'),
        coalesce(array_agg(best.queue_id) filter (where best.queue_id is not null), '{}'),
        (select coalesce(array_agg(quota.task_id), '{}') from (
          select task_id from best where queue_id is null group by task_id order by task_id) as quota),
        (select coalesce(array_agg(quota.size), '{}') from (
          select count(*) as size from best where queue_id is null group by task_id order by task_id) as quota),
        count(*)
        into chosen_ids, chosen_queues, quota_tasks, quotas, expected
        from best;
    end if;

    locked := '{}';
    locked_queues := '{}';
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
        select job.id, job.job_queue_id
        from unnest(chosen_ids, chosen_queues) as chosen (id, queue_id)
        cross join lateral (
          select job.id, job.job_queue_id from "graphile_worker"._private_jobs as job
          where job.id = chosen.id and job.is_available and job.job_queue_id = chosen.queue_id
            and job.task_id = any (task_ids) and job.priority = level and job.run_at <= as_of
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out))
          for update skip locked
        ) as job
        where chosen.queue_id = any (array(select queue.id from queue))
      )
      select
        (select coalesce(array_agg(queue.id), '{}') from queue),
        coalesce(array_agg(job.id), '{}'),
        coalesce(array_agg(job.job_queue_id), '{}')
        into obtained, locked, locked_queues
        from job;
      if cardinality(locked) < cardinality(chosen_ids) then
        is_contended := true;
        busy := busy || array(
          select chosen.id from unnest(chosen_ids, chosen_queues) as chosen (id, queue_id)
          where chosen.queue_id = any (obtained) and chosen.id <> all (locked)
        );
        -- Somebody's transaction has the first job of a queue: not a reason for the others of it to wait.
        select locked || coalesce(array_agg(job.id), '{}'),
            locked_queues || coalesce(array_agg(job.job_queue_id), '{}')
          into locked, locked_queues
          from (
            select distinct chosen.queue_id from unnest(chosen_queues) as chosen (queue_id)
            where chosen.queue_id = any (obtained) and chosen.queue_id <> all (locked_queues)
          ) as chosen
          cross join lateral (
            select job.id, job.job_queue_id from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.job_queue_id = chosen.queue_id
              and job.task_id = any (task_ids) and job.priority = level and job.run_at <= as_of
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            order by job.run_at, job.id limit 1
            for update skip locked
          ) as job;
      end if;
      claimed_queues := claimed_queues || locked_queues;
    end if;

    -- Locked first and updated then, because whatever is committed while a statement runs costs it a lock of its own
    -- on each job that it comes too late for.
    if cardinality(quotas) > 0 then
      select locked || coalesce(array_agg(job.id), '{}') into locked
        from unnest(quota_tasks, quotas) as quota (task_id, size)
        cross join lateral (
          select job.id from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.task_id = quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit quota.size
          for update skip locked
        ) as job;
    end if;

    if careful then
      claimed := '{}';
      foreach candidate in array locked loop
        begin
          update "graphile_worker"._private_jobs as job
            set attempts = job.attempts + 1, locked_by = worker, locked_at = now()
            where job.id = candidate;
          -- Together with its queue, which may be what is refused.
          update "graphile_worker"._private_job_queues as queue set locked_by = worker, locked_at = now()
            where queue.id = (select job.job_queue_id from "graphile_worker"._private_jobs as job where job.id = candidate);
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
          null::boolean, null::timestamptz, null::integer, null::double precision
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
            null::boolean, null::timestamptz, null::integer, null::double precision;
    end if;
    get diagnostics count = row_count;
    missing := missing - count;
    exit when missing = 0;

    tries := tries + 1;
    if count < expected and tries < 8 then
      -- What we chose and could not have must not keep us from what stands behind it.
      passed_over := passed_over || chosen_ids || locked;
      spent := spent || array(
        select chosen.queue_id from unnest(chosen_queues) as chosen (queue_id)
        where chosen.queue_id <> all (obtained)
      );
      passed_tasks := passed_tasks || array(
        select quota.task_id
        from unnest(quota_tasks) as quota (task_id)
        left join lateral (
          select job.id from "graphile_worker"._private_jobs as job
          where job.is_available and job.job_queue_id is null and job.task_id = quota.task_id
            and job.priority = level and job.run_at <= as_of
            and (job.run_at, job.id) > (from_run_at, from_id)
            and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
            and (left_out is null or job.id <> all (left_out))
          order by job.run_at, job.id limit 1
          for update skip locked
        ) as job on true
        where job.id is null
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
    continue when count < expected and tries < 8;
    passed_over := '{}';
    passed_tasks := '{}';
    tries := 0;

    -- Rows that somebody has locked look like no rows. And when is there more? Jobs in queues that others hold are
    -- left out: whoever releases such a queue tells us.
    select is_contended or coalesce(bool_or(later.run_at <= as_of), false),
        least(due, min(later.run_at) filter (where later.run_at > as_of))
      into is_contended, due
      from (
        select job.run_at
        from unnest(tasks_without_queue) as task (id)
        cross join lateral (
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            limit 1
          )
          union all
          (
            select job.run_at from "graphile_worker"._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
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
          join "graphile_worker"._private_job_queues as queue on queue.id = job.job_queue_id
          where queue.is_available or queue.id = any (released)
          order by job.run_at limit 1
        ) as job
      ) as later;
    exit when level = 32767;
    from_priority := level + 1;
    from_run_at := '-infinity';
    from_id := 0;
  end loop;

  -- Queues ------------------------------------------------------------------------------------------------------

  if cardinality(refused) > 0 then
    return query select
        'unclaimable', job.id, job.task_id, null::integer, null, given.origin, null::smallint, null::timestamptz,
        null::smallint, null::smallint, given.why, null::timestamptz, null::timestamptz, given.code,
        null::integer, null, null::timestamptz, null::boolean, null::timestamptz, null::integer,
        null::double precision
      from unnest(refused, refusals, refusal_states, refusal_origins) as given (id, why, code, origin)
      join "graphile_worker"._private_jobs as job on job.id = given.id;
  end if;
  if cardinality(released) > 0 then
    released := array(select queue.id from unnest(released) as queue (id) where queue.id <> all (claimed_queues));
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
          null::double precision;
  end if;
  if cardinality(released) > 0 then
    -- A little ahead: nobody else has set a timer for a job in a queue that was locked.
    perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', count(*))::text)
      from unnest(released) as queue (id)
      where exists (
        select from "graphile_worker"._private_jobs as job
        where job.is_available and job.job_queue_id = queue.id and job.run_at <= now() + interval '10 seconds'
      )
      having count(*) > 0;
  end if;

  kind := 'end';
  locked_at := now();
  contended := is_contended and missing > 0;
  next_due := case when due is not null then least(due, '9999-12-31 23:59:59+00') end;
  next_queue := queue_cursor;
  cost := extract(epoch from clock_timestamp() - started);
  return next;
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

  -- Cast before anything is inserted, so that a number out of range uses up no id.
  small_max_attempts := coalesce(max_attempts, 25);
  small_priority := coalesce(priority, 0);

  -- Repeated if a worker or another caller comes between two of the statements.
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
      -- Whatever the state of the job that has the key: "unsafe" is the caller's choice.
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

  -- Only what is missing is inserted: an identity value spent on every call would run out.
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

  -- A job that runs, or that failed for good, gives up its key: it will not run again, and the key is
  -- free for the new job.
  if exists (select from unnest(specs) as spec where spec.job_key is not null) then
    -- In one order for all, so that two calls with the same keys do not wait for each other.
    perform from "graphile_worker"._private_jobs as job
      join unnest(specs) as spec on spec.job_key = job.key
      order by job.key
      for update of job;
    update "graphile_worker"._private_jobs as job
      set key = null, attempts = job.max_attempts, updated_at = now()
      from unnest(specs) as spec
      where job.key = spec.job_key and not job.is_available;
  end if;

  -- The random number keeps PostgreSQL from folding equal notifications of one transaction into one.
  perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', total)::text);

  -- No join and no sort: rows are inserted, numbered and returned in the order of the specs.
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
    -- A spec that gave no row met a job that a worker took after we looked for such jobs above. Seen
    -- again with new eyes that job runs, and gives up its key.
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
  -- Locked first, so that what is decided below stays true until we are done. If somebody gave the key to
  -- another job while we waited for the lock, we look again.
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
  -- It runs now: let it finish, but never again.
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

CREATE TABLE graphile_worker._private_python_migrations (
    id integer NOT NULL,
    name text NOT NULL,
    breaking boolean DEFAULT false NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE graphile_worker._private_python_sessions (
    worker_id text NOT NULL,
    generation bigint NOT NULL,
    connected_at timestamp with time zone DEFAULT now() NOT NULL
);

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

ALTER TABLE ONLY graphile_worker._private_python_cancellations
    ADD CONSTRAINT _private_python_cancellations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_python_migrations
    ADD CONSTRAINT _private_python_migrations_pkey PRIMARY KEY (id);

ALTER TABLE ONLY graphile_worker._private_python_sessions
    ADD CONSTRAINT _private_python_sessions_pkey PRIMARY KEY (worker_id);

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

CREATE INDEX _private_python_jobs_with_queue ON graphile_worker._private_jobs USING btree (task_id, priority, run_at, id) INCLUDE (job_queue_id) WHERE (is_available AND (job_queue_id IS NOT NULL));

CREATE INDEX _private_python_jobs_without_queue ON graphile_worker._private_jobs USING btree (task_id, priority, run_at, id) WHERE (is_available AND (job_queue_id IS NULL));

CREATE INDEX _private_workers_last_heartbeat_at_idx ON graphile_worker._private_workers USING btree (last_heartbeat_at);

CREATE INDEX jobs_main_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id, job_queue_id) WHERE (is_available = true);

CREATE INDEX jobs_no_queue_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id) WHERE ((is_available = true) AND (job_queue_id IS NULL));

ALTER TABLE graphile_worker._private_job_queues ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_jobs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_known_crontabs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_tasks ENABLE ROW LEVEL SECURITY;
