-- The exchange: one call, one commit, in which a worker records what it finished, lets go of the serial queues
-- that it held for that or keeps them, and claims jobs for its free slots.
--
-- It is a function so that it is one round trip, each of its statements sees what was committed before it, and
-- the planner's settings belong to it wherever it runs. Its name has a version: workers of an older release go on
-- using theirs.
--
-- Rules that hold it together:
-- * What we finished is ours only if locked_by and locked_at are those of our claim. The lock of a queue is checked
--   in the same way, independently of the job: somebody may have removed the one and not the other.
-- * Never wait for a row: somebody's open transaction on a job must not stop a worker. What cannot be locked at
--   once, or in one case within a millisecond, is reported as busy, or left for another look.
-- * Claim only what is locked, with every condition checked on the version that was locked; a job with a queue
--   only after its queue.
-- * A worker that was declared dead claims nothing: others free what is locked under its name.
--
-- Job by job the reply has a row: without a kind it is claimed; otherwise it is about a finished job that is not
-- recorded: 'busy', still ours, ask again; 'lost', not ours any more; 'refused', still ours, see below. Behind them stands
-- a row of kind 'unclaimable' for each job that cannot be claimed, see below; then one of kind 'queue' for each
-- queue that was locked or released, with its name; and last one of kind 'end', which tells about the look for jobs.
--
-- A constraint or a trigger of the user's may refuse what we do to one job, and then the whole call fails. The worker
-- repeats it with `careful`: each job has a subtransaction of its own, and one that is refused is named in the reply, with
-- the message as its last_error, the SQLSTATE as its key, and the functions that were running as its payload. No
-- constraint is deferred then, or the commit would fail.
--
-- Each statement in here costs some 25 us whatever it does, each column of a claimed job some 0.3 us. So the usual
-- call has few statements, and what is the same for all claimed jobs, or as in another column, is not repeated.
drop function if exists {schema}._private_python_exchange_v1;

-- Which of a worker's sessions may exchange. A worker that connects raises its generation, and reads back only then what
-- it holds. A call of an earlier generation that arrives later, for example out of a pooler that was frozen, does nothing.
create table if not exists {schema}._private_python_sessions (
  worker_id text primary key,
  generation bigint not null,
  connected_at timestamptz not null default now()
);

create or replace function {schema}._private_python_exchange_v2(
  worker text,
  -- Finished jobs. Those with a queue bring its lock, unless more jobs of that queue are in hand.
  job_ids bigint[],
  job_locks timestamptz[],
  queue_ids integer[],
  queue_locks timestamptz[],
  -- What became of those that were not completed: [{id, locked_at, action: fail | return | snooze, ...}].
  changes json,
  -- What to claim.
  task_ids integer[],
  wanted integer,
  run_length integer,          -- how many jobs of one queue at once
  forbidden_flags text[],
  as_of timestamptz,           -- a job is due if its run_at is not later
  mark_priority smallint,      -- leave out what comes before this position, if given
  mark_run_at timestamptz,
  mark_id bigint,
  after_queue integer,         -- where to go on visiting queues one by one; null: not in this call
  session bigint,              -- the generation of the worker's session; null: a worker that never reads back
  -- Record and claim job by job, so that what a constraint or a trigger refuses costs that job alone.
  careful boolean,
  left_out bigint[]            -- do not claim these
) returns table (
  kind text,
  id bigint,
  task_id integer,
  job_queue_id integer,
  queue_name text,
  payload text,
  priority smallint,
  run_at timestamptz,
  attempts smallint,
  max_attempts smallint,
  last_error text,
  created_at timestamptz,      -- null if it is the run_at
  updated_at timestamptz,      -- null if it is the created_at
  key text,
  revision integer,
  flags text,
  locked_at timestamptz,       -- of a finished job; in the last row that of all claimed ones, the database's time
  contended boolean,           -- there may be more: rows were locked by others
  next_due timestamptz,        -- when the next job that we could run is due
  next_queue integer,          -- the next call's after_queue; 0 if all queues were visited, null if that was spared
  cost double precision        -- seconds that the look for jobs took
)
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
as $body$
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
    perform from {schema}._private_python_sessions as latest
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
          from {schema}._private_python_exchange_v2(
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
          select queue.id from {schema}._private_job_queues as queue
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
        delete from {schema}._private_jobs as job
          where job.locked_by = worker and job.ctid = any (array(
            select found.place
            from unnest(job_ids, job_locks) as given (id, locked_at)
            cross join lateral (
              select job.ctid as place from {schema}._private_jobs as job
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
          select job.id from {schema}._private_jobs as job
          where job.id = given.id and job.locked_by = worker and job.locked_at = given.locked_at
            -- Together with its queue, unless that is not ours any more.
            and (given.queue_id is null or given.queue_id = any (kept) or not exists (
              select from {schema}._private_job_queues as queue
              where queue.id = given.queue_id and queue.locked_by = worker
                and queue.locked_at = given.queue_locked_at
            ))
          for update skip locked
        ) as job;
      delete from {schema}._private_jobs as job
        where job.id = any (recorded)
          and not exists (
            select from json_to_recordset(changes) as change (id bigint, locked_at timestamptz)
            where change.id = job.id and change.locked_at = job.locked_at
          );
    end if;

    if changes is not null then
      update {schema}._private_jobs as job
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
        left join {schema}._private_jobs as ours
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
          join {schema}._private_jobs as ours
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
      select from {schema}._private_workers as dead where dead.id = worker and dead.metadata ? 'died_at'
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
            select job.priority from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
              and job.priority >= from_priority
            order by job.priority, job.run_at, job.id limit 1
          ) as without_queue,
          (
            select job.priority from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.task_id = task.id
              and job.priority >= from_priority
            order by job.priority, job.run_at, job.id limit 1
          ) as with_queue
        ) as found
        -- What a worker claims that was declared dead would be taken from it again while it runs.
        where not exists (
          select from {schema}._private_workers as dead where dead.id = worker and dead.metadata ? 'died_at'
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
          select job.id, job.job_queue_id, job.run_at from {schema}._private_jobs as job
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
        join {schema}._private_job_queues as queue on queue.id = given.id and queue.is_available
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
          select job.id, job.job_queue_id, job.run_at from {schema}._private_jobs as job
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
          select min(job.job_queue_id), 1 from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id > after_queue
          union all
          select (
            select min(job.job_queue_id) from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id > visited.queue_id
          ), visited.place + 1
          from visited where visited.queue_id is not null and visited.place < 500
        ), found as (
          select job.*
          from visited
          join {schema}._private_job_queues as queue on queue.id = visited.queue_id and queue.is_available
          cross join unnest(tasks_with_queue) as task (id)
          cross join lateral (
            select job.id, job.job_queue_id, job.run_at from {schema}._private_jobs as job
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
                select job.priority, job.run_at, job.id from {schema}._private_jobs as job
                where job.is_available and job.job_queue_id is not null and job.job_queue_id = queue.id
                  and job.task_id = task.id and job.id <> all (candidate_ids) and job.id <> all (busy)
                  and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
                  and (left_out is null or job.id <> all (left_out))
                order by job.priority, job.run_at, job.id limit 1
              )
              union all
              select job.* from other
              cross join lateral (
                select job.priority, job.run_at, job.id from {schema}._private_jobs as job
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
            select job.id, job.run_at from {schema}._private_jobs as job
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
          select queue.id from {schema}._private_job_queues as queue
          where queue.id = given.id and queue.is_available
          for update skip locked
        ) as queue
      ), job as materialized (
        select job.id, job.job_queue_id
        from unnest(chosen_ids, chosen_queues) as chosen (id, queue_id)
        cross join lateral (
          select job.id, job.job_queue_id from {schema}._private_jobs as job
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
            select job.id, job.job_queue_id from {schema}._private_jobs as job
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
          select job.id from {schema}._private_jobs as job
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
          update {schema}._private_jobs as job
            set attempts = job.attempts + 1, locked_by = worker, locked_at = now()
            where job.id = candidate;
          -- Together with its queue, which may be what is refused.
          update {schema}._private_job_queues as queue set locked_by = worker, locked_at = now()
            where queue.id = (select job.job_queue_id from {schema}._private_jobs as job where job.id = candidate);
          claimed := claimed || candidate;
        exception when others then
          get stacked diagnostics why = message_text, code = returned_sqlstate, origin = pg_exception_context;
          if left(code, 2) in ('53', '57', '58') then
            raise;
          end if;
          left_out := left_out || candidate;
          claimed_queues := array_remove(
            claimed_queues, (select job.job_queue_id from {schema}._private_jobs as job where job.id = candidate)
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
        from {schema}._private_jobs as job
        where job.id = any (claimed);
    else
      return query
        update {schema}._private_jobs as job
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
          select job.id from {schema}._private_jobs as job
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
            select job.run_at from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id is null and job.task_id = task.id
              and job.priority = level and job.run_at <= as_of
              and (job.run_at, job.id) > (from_run_at, from_id)
              and (forbidden_flags is null or job.flags is null or not job.flags ?| forbidden_flags)
              and (left_out is null or job.id <> all (left_out))
            limit 1
          )
          union all
          (
            select job.run_at from {schema}._private_jobs as job
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
            select job.run_at, job.job_queue_id from {schema}._private_jobs as job
            where job.is_available and job.job_queue_id is not null and job.task_id = task.id
              and job.priority = level and job.run_at > as_of
            order by job.run_at, job.id limit 100
          ) as job
          join {schema}._private_job_queues as queue on queue.id = job.job_queue_id
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
      join {schema}._private_jobs as job on job.id = given.id;
  end if;
  if cardinality(released) > 0 then
    released := array(select queue.id from unnest(released) as queue (id) where queue.id <> all (claimed_queues));
  end if;
  if cardinality(released) > 0 or cardinality(claimed_queues) > 0 then
    return query
      update {schema}._private_job_queues as queue
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
        select from {schema}._private_jobs as job
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
$body$;

-- Without sorts only the indexes of ours are left that have the jobs in order. PostgreSQL 12 has no such setting.
do $body$
begin
  if current_setting('server_version_num')::integer >= 130000 then
    alter function {schema}._private_python_exchange_v2 set enable_incremental_sort = off;
  end if;
end
$body$;
