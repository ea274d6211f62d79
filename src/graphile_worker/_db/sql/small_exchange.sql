-- Small exchanges as plain statements, which take the server a third less time than the function of
-- own/012_exchange.sql. Most of a small call's time is the function's settings and its many inner statements.
--
-- They keep every rule of the function, and answer less: completed jobs without a queue and without a row for the
-- history, and a claim of the next jobs of one task without a queue and without flags. The next jobs in the order of all
-- jobs, up to the first one of another kind. If that is less than was wanted, the reply's last row has the kind
-- 'partial', and the function has to look for more.
--
-- One statement has one snapshot, so the rules are kept in this way:
-- * A row is locked before it is deleted or updated, and a locked row is skipped. A row that changed after the snapshot
--   is locked in its newest version, and every condition of the query that locks it is checked on that version.
-- * The row of the session is locked until the commit. Nothing happens if it has another generation.
-- * A worker that was declared dead after the snapshot claims jobs, as in the function. The sweeper finds them, because
--   it looks again.
--
-- The settings are those of the function, and are set once in a session.

-- name: set_planner
select set_config(wanted.name, wanted.value, false)
from pg_settings as setting
join (
  values
    ('jit', 'off'), ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'),
    ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'), ('enable_sort', 'off'), ('enable_incremental_sort', 'off')
) as wanted (name, value) on wanted.name = setting.name;

-- name: record
-- The first common table expressions of both statements.
with current_session as materialized (
  select true as is_valid from {schema}._private_python_sessions as latest
  where latest.worker_id = $1 and latest.generation = $2
  for share nowait
), held as materialized (
  select job.place
  from unnest($3::bigint[], $4::timestamptz[]) as given (id, locked_at)
  cross join lateral (
    select job.ctid as place from {schema}._private_jobs as job
    where job.id = given.id and job.locked_by = $1 and job.locked_at = given.locked_at
    for update skip locked
  ) as job
  where (select current_session.is_valid from current_session)
), deleted as (
  delete from {schema}._private_jobs as job
  where job.ctid = any (array(select held.place from held))
  returning job.id, job.locked_at
);

-- name: unrecorded
-- The columns are those of the function.
select
  case when held.id is null then 'lost' else 'busy' end as kind, given.id as id, null::integer as task_id,
  null::integer as job_queue_id, null::text as queue_name, null::text as payload, null::smallint as priority,
  null::timestamptz as run_at, null::smallint as attempts, null::smallint as max_attempts, null::text as last_error,
  null::timestamptz as created_at, null::timestamptz as updated_at, null::text as key, null::integer as revision,
  null::text as flags, given.locked_at as locked_at, null::boolean as contended, null::timestamptz as next_due,
  null::integer as next_queue, null::double precision as cost, null::boolean as withheld
from unnest($3::bigint[], $4::timestamptz[]) as given (id, locked_at)
left join lateral (
  select job.id from {schema}._private_jobs as job
  where job.id = any (array[given.id]) and job.locked_by = $1 and job.locked_at = given.locked_at
) as held on true
where (select count(*) from deleted) < cardinality($3::bigint[])
  and (given.id, given.locked_at) not in (select deleted.id, deleted.locked_at from deleted);

-- name: complete
{record}
{unrecorded}
union all
select
  case when (select current_session.is_valid from current_session) then 'end' else 'stale' end, null, null, null, null,
  null, null, null, null, null, null, null, null, null, null, null, now(), false, null, null, 0, false;

-- name: complete_and_claim
-- The first job of each task and kind, and of these the one that is next in the order of all jobs. Only jobs before the
-- second of them are claimed.
{record}, next_jobs as materialized (
  select task.id as task_id, job.is_usual, job.priority, job.run_at, job.id
  from unnest($5::integer[]) as task (id)
  cross join lateral (
    (
      select true as is_usual, job.priority, job.run_at, job.id from {schema}._private_jobs as job
      where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = task.id
      order by job.priority, job.run_at, job.id limit 1
    )
    union all
    (
      select false, job.priority, job.run_at, job.id from {schema}._private_jobs as job
      where job.is_available and job.job_queue_id is null and job.flags is not null and job.task_id = task.id
      order by job.priority, job.run_at, job.id limit 1
    )
    union all
    (
      select false, job.priority, job.run_at, job.id from {schema}._private_jobs as job
      where job.is_available and job.job_queue_id is not null and job.task_id = task.id
      order by job.priority, job.run_at, job.id limit 1
    )
  ) as job
  where (select current_session.is_valid from current_session) and not exists (
    -- A sweeper would release the jobs of a dead worker while they run.
    select from {schema}._private_python_dead_workers as dead where dead.worker_id = $1
  )
), best as materialized (
  select next_jobs.*, lead(next_jobs.priority) over in_order as second_priority,
    lead(next_jobs.run_at) over in_order as second_run_at, lead(next_jobs.id) over in_order as second_id
  from next_jobs
  window in_order as (order by next_jobs.priority, next_jobs.run_at, next_jobs.id)
  order by next_jobs.priority, next_jobs.run_at, next_jobs.id limit 1
), locked as materialized (
  select job.id, job.run_at, job.is_last
  from best
  cross join lateral (
    select job.id, job.run_at, job.attempts + 1 >= job.max_attempts as is_last from {schema}._private_jobs as job
    where job.is_available and job.job_queue_id is null and job.flags is null and job.task_id = best.task_id
      and job.priority = best.priority and job.run_at <= now()
      and (
        best.second_priority is distinct from best.priority
        or (job.run_at, job.id) < (best.second_run_at, best.second_id)
      )
    order by job.run_at, job.id limit $6::integer
    for update skip locked
  ) as job
  where best.is_usual
), judged as materialized (
  -- If the worker crashes, a job that it claimed loses the attempt. So a job that does not start at once is not claimed
  -- for its last attempt, nor is any job after it.
  select ranked.id, bool_or(ranked.is_last and ranked.place > $7::integer) over in_order as stays
  from (
    select locked.*, row_number() over (order by locked.run_at, locked.id) as place from locked
  ) as ranked
  window in_order as (order by ranked.place)
), claimed as (
  update {schema}._private_jobs as job
    set attempts = job.attempts + 1, locked_by = $1, locked_at = now()
    where job.id = any (array(select judged.id from judged where not judged.stays))
    returning
      job.id, job.task_id, job.payload::text as payload, job.priority,
      least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as run_at,
      job.attempts, job.max_attempts, job.last_error,
      nullif(least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.run_at)
        as created_at,
      nullif(least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00'), job.created_at)
        as updated_at,
      job.key, job.revision
)
{unrecorded}
union all
select
  null, claimed.id, claimed.task_id, null, null, claimed.payload, claimed.priority, claimed.run_at, claimed.attempts,
  claimed.max_attempts, claimed.last_error, claimed.created_at, claimed.updated_at, claimed.key, claimed.revision, null,
  null, null, null, null, null, null
from claimed
union all
select
  case
    when (select current_session.is_valid from current_session) is null then 'stale'
    when exists (select from judged where judged.stays) then 'end'
    when (select count(*) from claimed) < $6::integer and exists (select from next_jobs) then 'partial'
    else 'end'
  end, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, now(), false, null,
  case when (select count(*) from claimed) = 0 and not exists (select from next_jobs) then 0 end,
  extract(epoch from clock_timestamp() - statement_timestamp())::double precision,
  exists (select from judged where judged.stays);
