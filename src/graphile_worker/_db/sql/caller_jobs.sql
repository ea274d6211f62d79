-- Jobs on a caller's connection, from any driver or ORM. Each statement has one text parameter, a JSON document, and
-- returns one text, a JSON document too: nothing else is adapted by the driver. Payloads travel as JSON texts inside
-- these documents, so that their numbers and escapes stay as they are. Times are UTC, without an offset. Every name is
-- qualified.

-- name: input
cast(cast({parameter} as pg_catalog.text) as pg_catalog.json)

-- name: spec_columns
  identifier pg_catalog.text, payload pg_catalog.text, queue_name pg_catalog.text, run_at pg_catalog.timestamptz,
  delay pg_catalog.float8, max_attempts pg_catalog.int2, job_key pg_catalog.text, job_key_mode pg_catalog.text,
  priority pg_catalog.int2, flags pg_catalog.text[]

-- name: spec_run_at
coalesce(spec.run_at, pg_catalog.now() {+} (spec.delay {*} interval '1 second'))

-- name: added_job
-- A job without an id was not added: npm's function returns it while a worker claims the job with the same key.
{schema}.add_job(
    identifier => spec.identifier,
    payload => spec.payload::pg_catalog.json,
    queue_name => spec.queue_name,
    run_at => {spec_run_at},
    max_attempts => spec.max_attempts,
    job_key => spec.job_key,
    priority => spec.priority,
    flags => spec.flags,
    job_key_mode => coalesce(spec.job_key_mode, 'replace')
  )

-- name: earliest
'0001-01-01 00:00:00+00'

-- name: latest
'9999-12-31 23:59:59.999999+00'

-- name: job_json
-- PostgreSQL has infinity, and years that Python's datetime does not have.
pg_catalog.json_build_object(
    'id', job.id,
    'task_id', job.task_id,
    'job_queue_id', job.job_queue_id,
    'payload', job.payload::pg_catalog.text,
    'priority', job.priority,
    'run_at', pg_catalog.timezone('UTC', least(greatest(job.run_at, {earliest}), {latest})),
    'attempts', job.attempts,
    'max_attempts', job.max_attempts,
    'last_error', job.last_error,
    'created_at', pg_catalog.timezone('UTC', least(greatest(job.created_at, {earliest}), {latest})),
    'updated_at', pg_catalog.timezone('UTC', least(greatest(job.updated_at, {earliest}), {latest})),
    'key', job.key,
    'locked_at', pg_catalog.timezone('UTC', job.locked_at),
    'locked_by', job.locked_by,
    'revision', job.revision,
    'flags', job.flags::pg_catalog.text,
    'is_available', job.is_available,
    'state', case
      when job.locked_at is not null then 'running'
      when job.attempts {>=} job.max_attempts then 'failed'
      when job.run_at {>} pg_catalog.now() then 'scheduled'
      else 'ready'
    end,
    'task_identifier',
    (select task.identifier from {schema}._private_tasks as task where task.id {=} job.task_id),
    'queue_name',
    (select queue.queue_name from {schema}._private_job_queues as queue where queue.id {=} job.job_queue_id)
  )

-- name: jobs_json
coalesce(pg_catalog.json_agg({job_json} order by job.id), '[]')::pg_catalog.text

-- name: add_each_job
-- Calls add_job for each spec. The jobs are returned in the order of the specs, with any installer's function. This text is
-- also the body of a function, which own/009_add.sql creates: if it changes, the function needs a new version.
select coalesce(pg_catalog.json_agg({job_json} order by spec.place), '[]')::pg_catalog.text
from rows from (
  pg_catalog.json_to_recordset({input}) as ({spec_columns})
) with ordinality as spec (
  identifier, payload, queue_name, run_at, delay, max_attempts, job_key, job_key_mode, priority, flags, place
)
cross join lateral {added_job} as job;

-- name: try_to_add
-- The same in one round trip, without a savepoint: the function of own/009_add.sql.
select {schema}._private_python_add_v1(cast({parameter} as pg_catalog.text));

-- name: add_jobs
-- Calls add_jobs, which must return the jobs in the order of the specs. Values that the caller has are not returned.
with input as (
  select document.specs, document.preserve_run_at
  from pg_catalog.json_to_record({input}) as document (specs pg_catalog.json, preserve_run_at pg_catalog.bool)
)
select coalesce(
  pg_catalog.json_agg(
    pg_catalog.json_build_array(
      job.id,
      job.task_id,
      job.job_queue_id,
      case when job.run_at {<>} pg_catalog.now()
        then pg_catalog.timezone('UTC', least(greatest(job.run_at, {earliest}), {latest})) end,
      job.revision,
      case when job.created_at {<>} pg_catalog.now() then pg_catalog.timezone('UTC', job.created_at) end,
      case when job.revision {>} 0 then job.payload::pg_catalog.text end
    )
    order by job.ordinality
  ),
  '[]'
)::pg_catalog.text
from input
cross join lateral {schema}.add_jobs(
  array(
    select row(
      spec.identifier,
      spec.payload::pg_catalog.json,
      spec.queue_name,
      {spec_run_at},
      spec.max_attempts,
      spec.job_key,
      spec.priority,
      spec.flags
    )::{schema}.job_spec
    from pg_catalog.json_to_recordset(input.specs) as spec ({spec_columns})
  ),
  input.preserve_run_at
) with ordinality as job;

-- name: prepare_bulk
-- The time of the transaction, and whether add_jobs returns the jobs in the order of the specs: see jobs.sql.
select pg_catalog.json_build_array(
  pg_catalog.timezone('UTC', pg_catalog.now()),
  position('returned in the order of the specs' in procedure.prosrc) {>} 0
)::pg_catalog.text
from (select cast({parameter} as pg_catalog.text) as quoted) as schema
inner join pg_catalog.pg_proc as procedure on procedure.oid {=} (
  schema.quoted {||} '.add_jobs(' {||} schema.quoted {||} '.job_spec[],boolean)'
)::pg_catalog.regprocedure;

-- name: remove_job
select {jobs_json} from {schema}.remove_job(cast({parameter} as pg_catalog.text)) as job where job.id is not null;

-- name: input_ids
array(select id::pg_catalog.int8 from pg_catalog.json_array_elements_text(input.ids) as id)

-- name: complete_jobs
select {jobs_json}
from pg_catalog.json_to_record({input}) as input (ids pg_catalog.json)
cross join lateral {schema}.complete_jobs({input_ids}) as job;

-- name: permanently_fail_jobs
select {jobs_json}
from pg_catalog.json_to_record({input}) as input (ids pg_catalog.json, reason pg_catalog.text)
cross join lateral {schema}.permanently_fail_jobs({input_ids}, input.reason) as job;

-- name: reschedule_jobs
select {jobs_json}
from pg_catalog.json_to_record({input}) as input (
  ids pg_catalog.json, run_at pg_catalog.timestamptz, delay pg_catalog.float8, priority pg_catalog.int2,
  attempts pg_catalog.int2, max_attempts pg_catalog.int2
)
cross join lateral {schema}.reschedule_jobs(
  job_ids => {input_ids},
  run_at => coalesce(input.run_at, pg_catalog.now() {+} (input.delay {*} interval '1 second')),
  priority => input.priority,
  attempts => input.attempts,
  max_attempts => input.max_attempts
) as job;

-- name: force_unlock_workers
select pg_catalog.count(*)::pg_catalog.text
from {schema}.force_unlock_workers(array(select pg_catalog.json_array_elements_text({input})));

-- name: list_jobs
-- The inner query ends with parts of jobs.sql, which filter, order and limit jobs. Their values are columns of the input.
with input as materialized (
  select given.*
  from pg_catalog.json_to_record({input}) as given (
    having_id pg_catalog.int8, having_task pg_catalog.text, having_queue_name pg_catalog.text, having_key pg_catalog.text,
    having_locked_by pg_catalog.text, having_text pg_catalog.text, having_error_type pg_catalog.text,
    after_id pg_catalog.int8, first_jobs pg_catalog.int8
  )
)
select {jobs_json}
from (select job.* from {schema}._private_jobs as job where true {filters}) as job;

-- name: filter_value
(select input.{column} from input)

-- name: read_failures
-- When jobs failed the last time. A recorded failure counts only while the job is as that failure left it.
select coalesce(
  pg_catalog.json_object_agg(job.id, pg_catalog.json_build_object(
    'failed_at', pg_catalog.timezone('UTC', failure.failed_at), 'error_type', failure.error_type,
    'traceback', failure.traceback
  )), '{}'
)::pg_catalog.text
from pg_catalog.json_to_record({input}) as input (ids pg_catalog.json)
cross join {schema}._private_jobs as job
inner join {schema}._private_python_failures as failure on failure.job_id {=} job.id
  and failure.attempts {=} (job.attempts {-} case when job.locked_at is null then 0 else 1 end)
  and failure.run_at {=} job.run_at
  and failure.last_error_hash {=} pg_catalog.hashtextextended(job.last_error, 0)
where job.id {=} any ({input_ids});
