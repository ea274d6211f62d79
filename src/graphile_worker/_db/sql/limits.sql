-- Named limits: see own/014_limits.sql.

-- name: input
cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)

-- name: declare_limits
-- Writes only what has changed, and leaves rows alone that other transactions have locked. Returns how many limits could
-- not be written.
with given as materialized (
  select given.name, given.concurrency, array(select json_array_elements_text(given.tasks::json)) as tasks
  from unnest($1::text[], $2::integer[], $3::text[]) as given (name, concurrency, tasks)
), changed as materialized (
  select given.*
  from given
  join {schema}._private_python_limits as known on known.name = given.name
  where not (known.concurrency is not distinct from given.concurrency and known.tasks @> given.tasks)
), locked as materialized (
  select known.id, known.name from {schema}._private_python_limits as known
  where known.name in (select changed.name from changed)
  order by known.name
  for update skip locked
), updated as (
  update {schema}._private_python_limits as known
  set concurrency = changed.concurrency,
    tasks = array(select distinct name from unnest(known.tasks || changed.tasks) as task (name) order by name)
  from locked
  join changed on changed.name = locked.name
  where known.id = locked.id
)
select (select count(*) from changed) - (select count(*) from locked);

-- name: add_limits
-- Adds those that are missing.
insert into {schema}._private_python_limits as known (name, concurrency, tasks)
select given.name, given.concurrency, array(select json_array_elements_text(given.tasks::json))
from unnest($1::text[], $2::integer[], $3::text[]) as given (name, concurrency, tasks)
where not exists (select from {schema}._private_python_limits as same where same.name = given.name)
order by given.name
on conflict (name) do nothing;

-- name: read_limit_ids
select name, id from {schema}._private_python_limits where name = any ($1::text[]);

-- name: end_shares
-- Other workers may wait for the room.
with ended as (
  delete from {schema}._private_python_shares where worker_id = $1 returning held
)
select pg_notify('jobs:insert', json_build_object('r', random())::text)
from ended having coalesce(sum(ended.held), 0) > 0;

-- name: end_lost_shares
-- The shares of workers that are gone and were not swept, for example because they lost the connection when they stopped.
with ended as (
  delete from {schema}._private_python_shares as share
  where (share.limit_id, share.worker_id) in (
    select known.limit_id, known.worker_id from {schema}._private_python_shares as known
    where not exists (select from {schema}._private_workers as worker where worker.id = known.worker_id)
      and not exists (select from {schema}._private_jobs as job where job.locked_by = known.worker_id)
    for update skip locked
  )
  returning held
)
select pg_notify('jobs:insert', json_build_object('r', random())::text)
from ended having coalesce(sum(ended.held), 0) > 0;

-- name: reads_limits
select coalesce(pg_catalog.has_table_privilege(
  pg_catalog.to_regclass(cast({parameter} as pg_catalog.text) {||} '._private_python_shares'), 'select'
), false)::pg_catalog.text;

-- name: list_limits
select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
  'name', known.name,
  'concurrency', coalesce(known.concurrency_override, known.concurrency),
  'declared', known.concurrency,
  'held', (
    select coalesce(pg_catalog.sum(share.held), 0)
    from {schema}._private_python_shares as share where share.limit_id {=} known.id
  ),
  'tasks', known.tasks,
  'waiting', (
    select pg_catalog.count(*)
    from {schema}._private_tasks as task
    join {schema}._private_jobs as job on job.task_id {=} task.id
    where task.identifier {=} any (known.tasks) and job.is_available and job.run_at {<=} pg_catalog.now()
  ),
  'workers', (
    select coalesce(pg_catalog.json_object_agg(share.worker_id, share.held), '{}')
    from {schema}._private_python_shares as share where share.limit_id {=} known.id and share.held {>} 0
  )
) order by known.name), '[]')::pg_catalog.text
from {schema}._private_python_limits as known
where cast({parameter} as pg_catalog.text) is not null;

-- name: set_limit
-- Returns whether there is a limit with the name. Workers that wait for room try again.
with changed as (
  update {schema}._private_python_limits as known
  set concurrency_override = input.concurrency
  from pg_catalog.json_to_record({input}) as input (name pg_catalog.text, concurrency pg_catalog.int4)
  where known.name {=} input.name
  returning known.id
), notified as (
  select pg_catalog.pg_notify(
    'jobs:insert', pg_catalog.json_build_object('r', pg_catalog.random())::pg_catalog.text
  )
  from changed
)
select (pg_catalog.count(*) {>} 0)::pg_catalog.text from changed, notified;

-- name: read_outsiders
-- Tasks with a limit that other workers than Python's run at the moment: the limit does not count those jobs.
select task.identifier, pg_catalog.count(*)::integer as jobs
from {schema}._private_jobs as job
join {schema}._private_tasks as task on task.id {=} job.task_id
where job.locked_at is not null and not pg_catalog.starts_with(job.locked_by, 'python-')
  and exists (
    select from {schema}._private_python_limits as known where task.identifier {=} any (known.tasks)
  )
group by task.identifier
order by task.identifier;
