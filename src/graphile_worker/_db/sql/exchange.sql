-- The statements that a worker runs on its own connections.

-- name: identify_backend
-- The start time is text, because it is only compared.
select pid, backend_start::text as started from pg_catalog.pg_stat_activity where pid = pg_backend_pid();

-- name: end_backend
select pg_terminate_backend(pid)
from pg_catalog.pg_stat_activity where pid = $1 and backend_start::text = $2 and pid <> pg_backend_pid();

-- name: limit_wait
-- Returns the value from before: the columns are evaluated from left to right.
select current_setting('lock_timeout') as before, set_config('lock_timeout', $1, true);

-- name: begin_generation
-- Waits until none of the worker's earlier calls is under way. After that none of them can begin.
insert into {schema}._private_python_sessions as latest (worker_id, generation) values ($1, 1)
on conflict (worker_id) do update set generation = latest.generation + 1, connected_at = now()
returning generation;

-- name: confirm_generation
-- The same check as in the exchange: returns no row if the worker has connected again since.
select true from {schema}._private_python_sessions
where worker_id = $1 and generation = $2
for share nowait;

-- name: end_session
delete from {schema}._private_python_sessions where worker_id = $1 and generation = $2;

-- name: check_constraints_now
-- Not at the commit, where an error could no longer be attributed to a row.
set constraints all immediate;

-- name: register_tasks
-- Inserts only missing names, so that an existing name does not use up an identity value.
insert into {schema}._private_tasks (identifier)
select wanted.identifier
from pg_catalog.unnest($1::pg_catalog.text[]) as wanted (identifier)
where not exists (select from {schema}._private_tasks as task where task.identifier {=} wanted.identifier)
order by wanted.identifier
on conflict (identifier) do nothing;

-- name: read_tasks
select id, identifier from {schema}._private_tasks where identifier {=} any ($1::pg_catalog.text[]);

-- name: exchange
select * from {schema}._private_python_exchange_v4(
  $1, $2, $3, $4, $5, $6, $7::pg_catalog.text::pg_catalog.json, $8, $9, $10, $11, $12, $13,
  coalesce($14, pg_catalog.now()), $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31
);

-- name: read_locked_jobs
-- The columns have the same order as in the reply of an exchange.
select
  null, job.id, job.task_id, job.job_queue_id,
  (select queue.queue_name from {schema}._private_job_queues as queue where queue.id = job.job_queue_id),
  job.payload::text as payload, job.priority,
  least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as run_at,
  job.attempts, job.max_attempts, job.last_error,
  least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as created_at,
  least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as updated_at,
  job.key, job.revision,
  job.flags::text as flags, job.locked_at
from {schema}._private_jobs as job
where job.locked_by = $1
order by job.priority, job.run_at, job.id;

-- name: read_locked_queues
-- Includes the locks that paused queues had. They are given back if a job of the queue still runs when the pause ends.
select id, locked_at from {schema}._private_job_queues where locked_by = $1
union all
select queue.id, pause.locked_at
from {schema}._private_python_pauses as pause
join {schema}._private_job_queues as queue on queue.queue_name = pause.name and queue.locked_by = 'python:paused'
where pause.kind = 'queue' and pause.locked_by = $1;

-- name: read_taken_jobs
-- The jobs that a sweeper released after it had declared the worker dead.
select taken.id, taken.locked_at
from {schema}._private_workers as worker
cross join lateral jsonb_to_recordset(worker.metadata -> 'taken') as taken (id bigint, locked_at timestamptz)
where worker.id = $1 and jsonb_typeof(worker.metadata -> 'taken') = 'array';

-- name: unlock_queues
-- Returns the queues that are still locked, because another transaction has locked the row. Fenced by the time of the
-- lock, because the worker may have locked the queue again since.
with given as (
  select given.id, given.locked_at from unnest($2::integer[], $3::timestamptz[]) as given (id, locked_at)
), free as materialized (
  select queue.id
  from given
  cross join lateral (
    select queue.id from {schema}._private_job_queues as queue
    where queue.id = given.id and queue.locked_by = $1 and queue.locked_at = given.locked_at
    for update skip locked
  ) as queue
), unlocked as (
  update {schema}._private_job_queues as queue set locked_at = null, locked_by = null
  where queue.id = any (array(select free.id from free))
)
select queue.id
from given
join {schema}._private_job_queues as queue
  on queue.id = given.id and queue.locked_by = $1 and queue.locked_at = given.locked_at
where queue.id <> all (array(select free.id from free));

-- name: renew_jobs
update {schema}._private_jobs as job set locked_at = now()
from (
  select held.id
  from unnest($2::bigint[], $3::timestamptz[]) as given (id, locked_at)
  cross join lateral (
    select job.id from {schema}._private_jobs as job
    where job.id = given.id and job.locked_by = $1 and job.locked_at = given.locked_at
    for update skip locked
  ) as held
) as held
where job.id = held.id
returning job.id, job.locked_at;

-- name: renew_queues
update {schema}._private_job_queues as queue set locked_at = now()
from (
  select held.id
  from unnest($2::integer[], $3::timestamptz[]) as given (id, locked_at)
  cross join lateral (
    select queue.id from {schema}._private_job_queues as queue
    where queue.id = given.id and queue.locked_by = $1 and queue.locked_at = given.locked_at
    for update skip locked
  ) as held
) as held
where queue.id = held.id
returning queue.id, queue.locked_at;
