-- Reading the history, and keeping its partitions. own/010_history.sql explains the table.

-- name: reads_history
-- False if the schema is of an older release, or if the role lacks the privilege.
select coalesce(has_table_privilege(to_regclass($1::text || '._private_python_runs'), 'select'), false);

-- name: attempt_columns
  run.job_id, run.attempt, run.outcome, run.final as is_final,
  coalesce(
    (select task.identifier from {schema}._private_tasks as task where task.id = run.task_id),
    '(removed task ' || run.task_id || ')'
  ) as task_identifier,
  run.queue_name, run.key, run.worker,
  least(greatest(run.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as created_at,
  least(greatest(run.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as run_at,
  run.started_at, run.ended_at, run.duration::float8 as duration, run.error, run.error_type, run.traceback,
  run.result::text as result, run.no_result, run.payload::text as payload

-- name: conditions
-- Each parameter that is null selects everything.
  ($1::timestamptz is null or run.ended_at >= $1) and ($2::timestamptz is null or run.ended_at < $2)
    and ($3::smallint[] is null or run.outcome = any ($3))
    and ($4::text is null or run.key = $4)
    and ($5::text is null or run.error_type = $5 or run.error_type like '%.' || $5)
    and ($6::timestamptz is null or (run.ended_at, run.job_id) < ($6, $7::bigint))

-- name: list_attempts
-- The latest first. Task by task, because no index has the attempts of all tasks in order. The tasks are read from the
-- history, because a cleanup may have removed them elsewhere.
with recursive task (id) as (
  (select run.task_id from {schema}._private_python_runs as run order by run.task_id limit 1)
  union all
  select (
    select run.task_id from {schema}._private_python_runs as run where run.task_id > task.id
    order by run.task_id limit 1
  )
  from task where task.id is not null
)
select {attempt_columns}
from task
cross join lateral (
  select run.* from {schema}._private_python_runs as run
  where run.task_id = task.id and {conditions}
  order by run.ended_at desc, run.job_id desc limit $8
) as run
where task.id is not null
order by run.ended_at desc, run.job_id desc
limit $8;

-- name: list_attempts_of_task
select {attempt_columns}
from {schema}._private_python_runs as run
where run.task_id = (select task.id from {schema}._private_tasks as task where task.identifier = $9) and {conditions}
order by run.ended_at desc, run.job_id desc
limit $8;

-- name: list_failed_attempts
select {attempt_columns}
from {schema}._private_python_runs as run
where run.outcome <> 1 and {conditions}
order by run.ended_at desc, run.job_id desc
limit $8;

-- name: list_attempts_of_job
select {attempt_columns}
from {schema}._private_python_runs as run
where run.job_id = $1
order by run.ended_at, run.attempt
limit $2;

-- name: summarize
-- Seconds are of attempts that ran.
select
  coalesce(
    (select task.identifier from {schema}._private_tasks as task where task.id = run.task_id),
    '(removed task ' || run.task_id || ')'
  ) as task_identifier,
  count(*) as attempts,
  count(*) filter (where run.outcome = 1) as completed,
  count(*) filter (where run.outcome = 2) as failed,
  count(*) filter (where run.outcome = 2 and run.final) as failed_permanently,
  count(*) filter (where run.outcome = 3) as cancelled,
  count(*) filter (where run.outcome = 4) as snoozed,
  count(*) filter (where run.outcome = 5) as workers_died,
  percentile_cont(0.5) within group (order by run.duration::float8) as median_duration,
  percentile_cont(0.95) within group (order by run.duration::float8) as p95_duration,
  percentile_cont(0.95) within group (
    order by extract(epoch from greatest(run.started_at - run.run_at, interval '0'))::float8
  ) as p95_wait
from {schema}._private_python_runs as run
where run.ended_at >= coalesce($1::timestamptz, '-infinity')
group by run.task_id
order by count(*) desc, run.task_id;

-- name: inspect_partitions
-- The partitions of the history by name, and whether this role may create and drop them. Only the owner may. A member of
-- the owner acts as the owner, as in a migration.
select
  current_user::text as role,
  pg_get_userbyid(parent.relowner)::text as owner,
  pg_has_role(parent.relowner, 'member') and has_schema_privilege(parent.relowner, parent.relnamespace, 'create')
    as may_create,
  array(
    select child.relname::text
    from pg_catalog.pg_inherits as part
    join pg_catalog.pg_class as child on child.oid = part.inhrelid
    where part.inhparent = parent.oid
    order by child.relname
  ) as partitions,
  clock_timestamp() as now
from pg_catalog.pg_class as parent
where parent.oid = to_regclass($1::text || '._private_python_runs');

-- name: take_turn
-- One worker at a time creates and drops partitions.
select pg_try_advisory_xact_lock(hashtextextended($1::text || ' graphile_worker history', 0)) as mine;

-- name: limit_locks
set local lock_timeout = '50ms';

-- name: act_as
set local role {owner};

-- name: create_partition
-- Attached afterwards, because to create it as a partition would lock out all writers of the history.
create table {schema}.{partition} (like {schema}._private_python_runs including defaults including indexes);

-- name: attach_partition
alter table {schema}._private_python_runs attach partition {schema}.{partition} for values from ({first}) to ({last});

-- name: analyze
-- Autovacuum analyzes the partitions, but not the whole.
analyze {schema}._private_python_runs;

-- name: lock_at_once
-- Fails if the table is in use, and never lets a writer wait in a queue behind it.
lock table {schema}._private_python_runs in access exclusive mode nowait;

-- name: lock_soon
-- Writers wait for at most the time of limit_locks.
lock table {schema}._private_python_runs in access exclusive mode;

-- name: drop_partition
drop table {schema}.{partition};

-- name: delete_old_rows
-- Of the default partition: rows of days that had no partition. A part at a time, so that no transaction is long.
with old as (
  select run.ctid as place from only {schema}._private_python_runs_default as run
  where run.ended_at < $1 limit 5000 for update skip locked
)
delete from only {schema}._private_python_runs_default as run
where run.ctid = any (array(select old.place from old));

-- name: count_stray_rows
-- Rows in the default partition, up to a limit, and the oldest of them.
select count(*) as count, min(stray.ended_at) as oldest
from (select run.ended_at from only {schema}._private_python_runs_default as run limit 10000) as stray;
