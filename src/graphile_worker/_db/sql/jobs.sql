-- Adding, reading and administering jobs. Payloads and flags are sent as text, so that it does not matter which codecs
-- the caller's connection has for json. Delays are sent as seconds, because a day of an interval has 23 or 25 hours
-- when the session's time zone changes its offset. Names are qualified: most statements may run on a caller's
-- connection.

-- name: job_columns
  job.id,
  job.task_id,
  job.job_queue_id,
  job.payload::pg_catalog.text as payload,
  job.priority,
  {run_at} as run_at,
  job.attempts,
  job.max_attempts,
  job.last_error,
  least(greatest(job.created_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as created_at,
  least(greatest(job.updated_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00') as updated_at,
  job.key,
  job.locked_at,
  job.locked_by,
  job.revision,
  job.flags::pg_catalog.text as flags,
  job.is_available,
  {job_state} as state

-- name: run_at
-- PostgreSQL has infinity, and years that Python's datetime does not have.
least(greatest(job.run_at, '0001-01-01 00:00:00+00'), '9999-12-31 23:59:59.999999+00')

-- name: job_state
case
    when job.locked_at is not null then 'running'
    when job.attempts {>=} job.max_attempts then 'failed'
    when job.run_at {>} pg_catalog.now() then 'scheduled'
    else 'ready'
  end

-- name: job_names
-- A task or queue that the call itself created is not visible to the statement around the call. The name is then null,
-- and the caller uses the name that it passed.
  (select task.identifier from {schema}._private_tasks as task where task.id {=} job.task_id)
    as task_identifier,
  (select queue.queue_name from {schema}._private_job_queues as queue where queue.id {=} job.job_queue_id)
    as queue_name

-- name: add_job
select {job_columns}, {job_names}
from {schema}.add_job(
  identifier => $1,
  payload => $2::pg_catalog.text::pg_catalog.json,
  queue_name => $3,
  run_at => coalesce(
    $4::pg_catalog.timestamptz, pg_catalog.now() {+} ($5::double precision {*} interval '1 second')
  ),
  max_attempts => $6,
  job_key => $7,
  priority => $8,
  flags => $9,
  job_key_mode => coalesce($10, 'replace')
) as job;

-- name: job_specs
array(
    select row(
      spec.identifier,
      spec.payload::pg_catalog.json,
      spec.queue_name,
      coalesce(spec.run_at, pg_catalog.now() {+} (spec.delay {*} interval '1 second')),
      spec.max_attempts,
      spec.job_key,
      spec.priority,
      spec.flags::pg_catalog.text[]
    )::{schema}.job_spec
    from unnest(
      $1::pg_catalog.text[], $2::pg_catalog.text[], $3::pg_catalog.text[], $4::pg_catalog.timestamptz[],
      $5::double precision[], $6::smallint[], $7::pg_catalog.text[], $8::smallint[], $9::pg_catalog.text[]
    ) as spec (
      identifier, payload, queue_name, run_at, delay, max_attempts, job_key, priority, flags
    )
  )

-- name: add_jobs
-- For functions that keep the order of the specs. Values that the caller already has are not sent back.
select
  job.id,
  job.task_id,
  job.job_queue_id,
  case when job.run_at {<>} pg_catalog.now() then {run_at} end as run_at,
  job.revision,
  case when job.created_at {<>} pg_catalog.now() then job.created_at end as created_at,
  case when job.revision {>} 0 then job.payload::pg_catalog.text end as merged_payload
from {schema}.add_jobs({job_specs}, $10) as job;

-- name: add_unread_jobs
-- Returns only the number of jobs; a row without an id is not a job.
select pg_catalog.count(job.id) as count from {schema}.add_jobs({job_specs}, $10) as job;

-- name: add_jobs_in_any_order
select {job_columns} from {schema}.add_jobs({job_specs}, $10) as job;

-- name: read_names
select 'task' as kind, id, identifier as name from {schema}._private_tasks where id {=} any ($1)
union all
select 'queue', id, queue_name from {schema}._private_job_queues where id {=} any ($2);

-- name: prepare_bulk
-- The time of the transaction, and whether this library installed add_jobs, which then returns rows in the order of the
-- specs. The function is recognized by a marker in its text, because npm may replace it at any time.
select pg_catalog.now() as now, position('returned in the order of the specs' in prosrc) {>} 0 as keeps_order
from pg_catalog.pg_proc
where oid {=} ($1::pg_catalog.text {||} '.add_jobs(' {||} $1 {||} '.job_spec[],boolean)')::pg_catalog.regprocedure;

-- name: remove_job
select {job_columns}, {job_names} from {schema}.remove_job($1) as job where job.id is not null;

-- name: complete_jobs
select {job_columns}, {job_names} from {schema}.complete_jobs($1::bigint[]) as job order by job.id;

-- name: permanently_fail_jobs
select {job_columns}, {job_names}
from {schema}.permanently_fail_jobs($1::bigint[], $2) as job order by job.id;

-- name: reschedule_jobs
select {job_columns}, {job_names}
from {schema}.reschedule_jobs(
  job_ids => $1::bigint[],
  run_at => coalesce(
    $2::pg_catalog.timestamptz, pg_catalog.now() {+} ($3::double precision {*} interval '1 second')
  ),
  priority => $4,
  attempts => $5,
  max_attempts => $6
) as job order by job.id;

-- name: force_unlock_workers
select {schema}.force_unlock_workers($1::pg_catalog.text[]);

-- name: select_jobs
select {job_columns}, {job_names} from {schema}._private_jobs as job where true

-- name: is_current_failure
-- A recorded failure counts only while the job is as that failure left it. A running job has one more attempt.
failure.job_id {=} job.id
    and failure.attempts {=} (job.attempts {-} case when job.locked_at is null then 0 else 1 end)
    and failure.run_at {=} job.run_at
    and failure.last_error_hash {=} pg_catalog.hashtextextended(job.last_error, 0)

-- name: select_jobs_and_failures
select {job_columns}, {job_names}, failure.failed_at, failure.error_type, failure.traceback
from {schema}._private_jobs as job
left join {schema}._private_python_failures as failure on {is_current_failure}
where true

-- name: having_id
and job.id {=} {value}

-- name: having_key
and job.key {=} {value}

-- name: having_task
and job.task_id {=} (select id from {schema}._private_tasks where identifier {=} {value})

-- name: having_queue_name
and job.job_queue_id {=} (select id from {schema}._private_job_queues where queue_name {=} {value})

-- name: having_state_ready
-- The same condition as in job_state, written so that the planner can estimate the number of rows.
and job.is_available and job.run_at {<=} pg_catalog.now()

-- name: having_state_scheduled
and job.is_available and job.run_at {>} pg_catalog.now()

-- name: having_state_running
and job.locked_at is not null

-- name: having_state_failed
and not job.is_available and job.locked_at is null

-- name: having_state_first_run
-- Scheduled jobs that have not failed yet.
and job.is_available and job.run_at {>} pg_catalog.now() and job.attempts {=} 0

-- name: having_state_retrying
and job.is_available and job.run_at {>} pg_catalog.now() and job.attempts {>} 0

-- name: having_state_blocked
-- Ready jobs whose serial queue is locked.
and job.is_available and job.run_at {<=} pg_catalog.now()
and job.job_queue_id {=} any (
  array(select queue.id from {schema}._private_job_queues as queue where queue.locked_at is not null)
)

-- name: available
and job.is_available

-- name: having_flags
and job.flags {?&} {value}::pg_catalog.text[]

-- name: having_fingerprint
and job.last_error is not null and {fingerprint} {=} {value}

-- name: fingerprint
-- As in failures.sql.
pg_catalog.regexp_replace(
    pg_catalog.left(pg_catalog.split_part(pg_catalog.ltrim(job.last_error, E' \n\t'), E'\n', 1), 200),
    '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|0x[0-9a-f]+|\m(?=[a-f]*[0-9])[0-9a-f]{8,}\M|[0-9]+',
    '#', 'gi'
  )

-- name: having_failed_within
and exists (
  select from {schema}._private_python_failures as failure
  where {is_current_failure}
    and failure.failed_at {>} (pg_catalog.now() {-} ({value}::double precision {*} interval '1 second'))
)

-- name: payload_matches
-- The parameter is a value, followed by a path. A value that is not escaped in the JSON text is found by a quick search,
-- which spares most payloads from being parsed. The server cannot take a payload apart that has the character 0 or
-- half a surrogate pair, so such payloads do not match.
and (
  pg_catalog.strpos(job.payload::pg_catalog.text, ({value}::pg_catalog.text[])[1]) {>} 0
  or pg_catalog.strpos(job.payload::pg_catalog.text, E'\\') {>} 0
)
and case
  when pg_catalog.strpos(job.payload::pg_catalog.text, E'\\u') {>} 0 and job.payload::pg_catalog.text {~} '\\u0000|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]'
    then false
  else (job.payload {#>>} ({value}::pg_catalog.text[])[2:]) {=} ({value}::pg_catalog.text[])[1]
end

-- name: having_payload_1
{payload_matches}

-- name: having_payload_2
{payload_matches}

-- name: having_payload_3
{payload_matches}

-- name: having_payload_4
{payload_matches}

-- name: having_text_outside_payload
and (job.last_error {~~*} {value} or job.key {~~*} {value} or job.locked_by {~~*} {value})

-- name: above_id
and job.id {>} {value}

-- name: before_id
and job.id {<} {value}

-- name: last_jobs
order by job.id desc limit {value}

-- name: delete_many
select id from {schema}.complete_jobs($1::bigint[]);

-- name: having_locked_by
and job.locked_by {=} {value}

-- name: having_locked_by_any
and job.locked_by {=} any ({value}::pg_catalog.text[])

-- name: having_text
and (
  job.payload::pg_catalog.text {~~*} {value} or job.last_error {~~*} {value} or job.key {~~*} {value}
  or job.locked_by {~~*} {value}
)

-- name: having_error_type
-- With or without the module of the type.
and exists (
  select from {schema}._private_python_failures as failure
  where {is_current_failure}
    and (failure.error_type {=} {value} or pg_catalog.right(failure.error_type, pg_catalog.length({value}) {+} 1) {=} ('.' {||} {value}))
)

-- name: after_id
and job.id {>} {value}

-- name: first_jobs
order by job.id limit {value}

-- name: count_jobs
select
  task.identifier,
  counted.*
from (
  select
    job.task_id,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as ready,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {>} pg_catalog.now()) as scheduled,
    pg_catalog.count(job.locked_at) as running,
    pg_catalog.count(*) filter (where not job.is_available and job.locked_at is null) as failed,
    pg_catalog.min({run_at}) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as oldest_due
  from {schema}._private_jobs as job
  group by job.task_id
) as counted
left join {schema}._private_tasks as task on task.id {=} counted.task_id
order by task.identifier;

-- name: read_now
select pg_catalog.now();

-- name: select_ids
select job.id from {schema}._private_jobs as job where true

-- name: count_selected
select pg_catalog.count(*) from {schema}._private_jobs as job where true

-- name: highest_id
select coalesce(pg_catalog.max(id), 0) from {schema}._private_jobs;

-- name: having_id_any
and job.id {=} any ({value}::bigint[])

-- name: up_to_id
and job.id {<=} {value}

-- name: not_running
-- The same rule as in the functions that administer jobs: a lock expires after four hours.
and (job.locked_at is null or job.locked_at {<} (pg_catalog.now() {-} interval '4 hours'))

-- name: not_locked
and job.locked_at is null

-- name: attempted
and job.attempts {>} 0

-- name: not_finished
and (job.is_available or job.locked_at is not null)

-- name: lock
for update skip locked

-- name: disable_sort
-- Pages are read in the order of ids. Sorting the rest of the table for each page would be the wrong plan.
select pg_catalog.set_config('enable_sort', 'off', true);

-- name: complete_many
-- With what the history keeps of each job.
select
  job.id, {run_at} as run_at, job.created_at, job.task_id, job.key, job.flags::pg_catalog.text as flags,
  (select queue.queue_name from {schema}._private_job_queues as queue where queue.id {=} job.job_queue_id)
    as queue_name
from {schema}.complete_jobs($1::bigint[]) as job;

-- name: remove_many
-- The job with the key. A running job has lost its key.
select id, key is null as runs from {schema}.remove_job($2) as job where job.id {=} any ($1::bigint[]);

-- name: fail_many
select id from {schema}.permanently_fail_jobs($1::bigint[], $2);

-- name: reschedule_many
select id
from {schema}.reschedule_jobs(
  job_ids => $1::bigint[],
  run_at => coalesce(
    $2::pg_catalog.timestamptz, pg_catalog.now() {+} ($3::double precision {*} interval '1 second')
  ),
  priority => $4,
  attempts => $5,
  max_attempts => $6
);

-- name: retry_many
update {schema}._private_jobs as job
set attempts = 0, run_at = pg_catalog.now(), updated_at = pg_catalog.now()
where job.id {=} any ($1::bigint[]) and job.locked_at is null and job.attempts {>} 0
returning job.id;

-- name: notify_due_jobs
-- The functions do not notify workers of these changes; without this, workers would only see them on the next poll.
select pg_catalog.pg_notify(
  'jobs:insert',
  pg_catalog.json_build_object('r', pg_catalog.random(), 'count', $1::integer)::pg_catalog.text
);

-- name: read_unchanged
select job.id, job.locked_by, {job_state} as state
from {schema}._private_jobs as job where job.id {=} any ($1::bigint[])
order by job.id;

-- name: count_queues
select queue.queue_name, queue.locked_by, queue.locked_at, coalesce(counted.jobs, 0) as jobs,
  coalesce(counted.ready, 0) as ready, coalesce(counted.failed, 0) as failed, counted.oldest_due
from {schema}._private_job_queues as queue
left join (
  select
    job.job_queue_id,
    pg_catalog.count(*) as jobs,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as ready,
    pg_catalog.count(*) filter (where not job.is_available and job.locked_at is null) as failed,
    pg_catalog.min({run_at}) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as oldest_due
  from {schema}._private_jobs as job
  where job.job_queue_id is not null
  group by job.job_queue_id
) as counted on counted.job_queue_id {=} queue.id
where ($1::pg_catalog.text[] is null or queue.queue_name {=} any ($1::pg_catalog.text[]))
  and (queue.locked_at is not null or not $2::boolean)
order by jobs desc, queue.queue_name
limit $3;

-- name: list_running
select job.id, {job_names}, job.locked_by, job.locked_at
from {schema}._private_jobs as job
where job.locked_at is not null and job.locked_by is not null
order by job.locked_at, job.id;

-- name: hides_rows
-- A role that row level security excludes sees an empty table, and no error.
select coalesce(pg_catalog.bool_or(pg_catalog.row_security_active(class.oid)), false)
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid {=} class.relnamespace
where namespace.nspname {=} $1 and class.relname {=} '_private_jobs';
