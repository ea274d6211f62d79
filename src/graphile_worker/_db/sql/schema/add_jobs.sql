-- add_jobs and add_job: the two functions that revision 20 changed. They are created in a new schema, and replaced in a
-- schema that this library upgrades from 19 to 20. A schema that another installer brought to 20 keeps its own.

-- name: replace_pending_job
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

-- name: functions

create or replace function {schema}.add_jobs(
  specs {schema}.job_spec[],
  job_key_preserve_run_at boolean default false
) returns setof {schema}._private_jobs
language plpgsql set search_path = pg_catalog, pg_temp as $body$
#variable_conflict use_column
declare
  total constant integer := coalesce(cardinality(specs), 0);
  first constant integer := array_lower(specs, 1);
  current_spec {schema}.job_spec;
  position integer := 0;
  added {schema}._private_jobs;
begin
  if total = 0 then
    return;
  end if;

  -- Only missing names are inserted: with an identity value used up by every call, the values would run out.
  insert into {schema}._private_tasks (identifier)
    select distinct spec.identifier
    from unnest(specs) as spec
    where not exists (
      select from {schema}._private_tasks as task where task.identifier = spec.identifier
    )
    order by spec.identifier
    on conflict (identifier) do nothing;
  insert into {schema}._private_job_queues (queue_name)
    select distinct spec.queue_name
    from unnest(specs) as spec
    where spec.queue_name is not null and not exists (
      select from {schema}._private_job_queues as queue where queue.queue_name = spec.queue_name
    )
    order by spec.queue_name
    on conflict (queue_name) do nothing;

  -- A job that is running, or that has failed permanently, gives up its key. It does not run again, and the new job
  -- gets the key.
  if exists (select from unnest(specs) as spec where spec.job_key is not null) then
    -- All calls lock in the same order, so that two calls with the same keys do not deadlock.
    perform from {schema}._private_jobs as job
      join unnest(specs) as spec on spec.job_key = job.key
      order by job.key
      for update of job;
    update {schema}._private_jobs as job
      set key = null, attempts = job.max_attempts, updated_at = now()
      from unnest(specs) as spec
      where job.key = spec.job_key and not job.is_available;
  end if;

  -- The random number keeps PostgreSQL from merging equal notifications of one transaction into one.
  perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', total)::text);

  -- No join and no sort: rows are inserted, numbered and returned in the order of the specs.
  -- (The line above is the marker by which this function is recognized: keep its words.)
  for added in
    insert into {schema}._private_jobs as job
      (job_queue_id, task_id, payload, run_at, max_attempts, key, priority, flags)
    select
      case when spec.queue_name is not null then (
        select queue.id from {schema}._private_job_queues as queue
        where queue.queue_name = spec.queue_name
      ) end,
      (select task.id from {schema}._private_tasks as task where task.identifier = spec.identifier),
      coalesce(spec.payload, '{}'),
      coalesce(spec.run_at, now()),
      coalesce(spec.max_attempts, 25::smallint),
      spec.job_key,
      coalesce(spec.priority, 0::smallint),
      case when spec.flags is not null then (
        select jsonb_object_agg(flag, true) from unnest(spec.flags) as flag
      ) end
    from unnest(specs) as spec
    {replace_pending_job}
    returning *
  loop
    current_spec := specs[first + position];
    position := position + 1;
    -- A spec without a row met a job that a worker claimed after the update above. The new call sees that the job is
    -- running, and takes its key.
    while added.key is distinct from current_spec.job_key loop
      return query select * from {schema}.add_jobs(array[current_spec], job_key_preserve_run_at);
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
    return query select * from {schema}.add_jobs(array[specs[first + position]], job_key_preserve_run_at);
    position := position + 1;
  end loop;
end
$body$;

-- A single job is added without arrays. With arrays, PostgreSQL would plan each statement again in every call, which
-- takes longer than the statements themselves.
create or replace function {schema}.add_job(
  identifier text,
  payload json default null,
  queue_name text default null,
  run_at timestamptz default null,
  max_attempts integer default null,
  job_key text default null,
  priority integer default null,
  flags text[] default null,
  job_key_mode text default 'replace'
) returns {schema}._private_jobs
language plpgsql set search_path = pg_catalog, pg_temp as $body$
#variable_conflict use_column
declare
  dedupe constant boolean := job_key is not null and coalesce(job_key_mode = 'unsafe_dedupe', false);
  job_key_preserve_run_at constant boolean := coalesce(job_key_mode = 'preserve_run_at', false);
  small_max_attempts smallint;
  small_priority smallint;
  added {schema}._private_jobs;
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
    insert into {schema}._private_tasks (identifier)
      select add_job.identifier
      where not exists (
        select from {schema}._private_tasks as task where task.identifier = add_job.identifier
      )
      on conflict (identifier) do nothing;
    if queue_name is not null then
      insert into {schema}._private_job_queues (queue_name)
        select add_job.queue_name
        where not exists (
          select from {schema}._private_job_queues as queue where queue.queue_name = add_job.queue_name
        )
        on conflict (queue_name) do nothing;
    end if;

    if job_key is not null and not dedupe then
      -- See add_jobs.
      update {schema}._private_jobs as job
        set key = null, attempts = job.max_attempts, updated_at = now()
        where job.key = job_key and not job.is_available;
    end if;

    insert into {schema}._private_jobs as job
      (job_queue_id, task_id, payload, run_at, max_attempts, key, priority, flags)
    values (
      (select queue.id from {schema}._private_job_queues as queue
        where queue.queue_name = add_job.queue_name),
      (select task.id from {schema}._private_tasks as task where task.identifier = add_job.identifier),
      coalesce(add_job.payload, '{}'),
      coalesce(add_job.run_at, now()),
      small_max_attempts,
      job_key,
      small_priority,
      (select jsonb_object_agg(flag, true) from unnest(add_job.flags) as flag)
    )
    {replace_pending_job} and not dedupe
    returning * into added;
    exit when found;

    if dedupe then
      -- This applies to the job with the key in any state, because the caller chose "unsafe".
      update {schema}._private_jobs as job
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
$body$;
