-- Exporting and importing jobs. Timestamps are sent as text, because PostgreSQL has infinity, and years that Python's
-- datetime does not have. The format does not depend on the settings of the session.

-- name: export_jobs
select
  job.id,
  (select task.identifier from {schema}._private_tasks as task where task.id = job.task_id) as task_identifier,
  (select queue.queue_name from {schema}._private_job_queues as queue where queue.id = job.job_queue_id) as queue_name,
  job.payload::text as payload,
  job.priority,
  {run_at} as run_at,
  job.attempts,
  job.max_attempts,
  job.last_error,
  job.key,
  job.flags::text as flags,
  job.revision,
  {created_at} as created_at,
  {updated_at} as updated_at
from {schema}._private_jobs as job where true

-- name: run_at
case when isfinite(job.run_at) then to_json(job.run_at at time zone 'UTC') #>> '{}' || 'Z' else job.run_at::text end

-- name: created_at
to_json(job.created_at at time zone 'UTC') #>> '{}' || 'Z'

-- name: updated_at
to_json(job.updated_at at time zone 'UTC') #>> '{}' || 'Z'

-- name: add_tasks
insert into {schema}._private_tasks (identifier)
select distinct given.identifier
from unnest($1::text[]) as given (identifier)
where not exists (select from {schema}._private_tasks as task where task.identifier = given.identifier)
order by given.identifier
on conflict (identifier) do nothing;

-- name: add_queues
insert into {schema}._private_job_queues (queue_name)
select distinct given.queue_name
from unnest($1::text[]) as given (queue_name)
where given.queue_name is not null
  and not exists (select from {schema}._private_job_queues as queue where queue.queue_name = given.queue_name)
order by given.queue_name
on conflict (queue_name) do nothing;

-- name: given
select given.*, task.id as task_id, queue.id as job_queue_id
  from unnest(
    $1::bigint[], $2::text[], $3::text[], $4::text[], $5::smallint[], $6::text[], $7::smallint[], $8::smallint[],
    $9::text[], $10::text[], $11::text[], $12::integer[], $13::text[], $14::text[]
  ) with ordinality as given (
    id, task_identifier, queue_name, payload, priority, run_at, attempts, max_attempts,
    last_error, key, flags, revision, created_at, updated_at, place
  )
  join {schema}._private_tasks as task on task.identifier = given.task_identifier
  left join {schema}._private_job_queues as queue on queue.queue_name = given.queue_name
  order by given.place

-- name: import_with_ids
insert into {schema}._private_jobs (
  id, task_id, job_queue_id, payload, priority, run_at, attempts, max_attempts, last_error, key, flags, revision,
  created_at, updated_at
)
overriding system value
select
  id, task_id, job_queue_id, payload::json, priority, run_at::timestamptz, attempts, max_attempts, last_error, key,
  flags::jsonb, revision, created_at::timestamptz, updated_at::timestamptz
from ({given}) as given
on conflict do nothing
returning id, key;

-- name: import_with_new_ids
insert into {schema}._private_jobs (
  task_id, job_queue_id, payload, priority, run_at, attempts, max_attempts, last_error, key, flags, revision,
  created_at, updated_at
)
select
  task_id, job_queue_id, payload::json, priority, run_at::timestamptz, attempts, max_attempts, last_error, key,
  flags::jsonb, revision, created_at::timestamptz, updated_at::timestamptz
from ({given}) as given
on conflict do nothing
returning id, key;

-- name: find_existing
select id, key from {schema}._private_jobs where id = any ($1::bigint[]) or key = any ($2::text[]);

-- name: reserve_ids
-- Reserves far more than needed: other sessions may take ids between the read and the change, but never so many.
select setval(sequence, $2::bigint + 10000)
from (select pg_get_serial_sequence($1::text, 'id')::regclass as sequence) as of_jobs
where coalesce(pg_sequence_last_value(sequence), 0) < $2::bigint;

-- name: notify_jobs
select pg_notify('jobs:insert', json_build_object('r', random(), 'count', $1::integer)::text);
