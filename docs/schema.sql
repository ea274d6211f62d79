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
    AS $$
#variable_conflict use_column
declare
  dedupe constant boolean := job_key is not null and coalesce(job_key_mode = 'unsafe_dedupe', false);
  job_key_preserve_run_at constant boolean := coalesce(job_key_mode = 'preserve_run_at', false);
  added "graphile_worker"._private_jobs;
begin
  if job_key is not null and job_key_mode not in ('replace', 'preserve_run_at', 'unsafe_dedupe') then
    raise exception 'The job_key_mode "%" does not exist', job_key_mode
      using errcode = 'GWBKM', hint = 'Use replace, preserve_run_at or unsafe_dedupe.';
  end if;

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
      coalesce(add_job.max_attempts, 25)::smallint,
      job_key,
      coalesce(add_job.priority, 0)::smallint,
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
    AS $$
  delete from "graphile_worker"._private_jobs as job
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$$;

CREATE FUNCTION graphile_worker.delete_stale_workers(worker_ids text[]) RETURNS void
    LANGUAGE sql
    AS $$
  delete from "graphile_worker"._private_workers as worker where worker.id = any (worker_ids);
$$;

CREATE FUNCTION graphile_worker.force_unlock_workers(worker_ids text[]) RETURNS void
    LANGUAGE sql
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
    AS $$
  select worker.id
    from "graphile_worker"._private_workers as worker
    where worker.last_heartbeat_at < now() - stale_threshold;
$$;

CREATE FUNCTION graphile_worker.permanently_fail_jobs(job_ids bigint[], error_message text DEFAULT NULL::text) RETURNS SETOF graphile_worker._private_jobs
    LANGUAGE sql
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
    AS $$
  delete from "graphile_worker"._private_workers as worker where worker.id = worker_id;
$$;

CREATE FUNCTION graphile_worker.worker_heartbeat(worker_id text, metadata json DEFAULT NULL::json) RETURNS void
    LANGUAGE sql
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

CREATE TABLE graphile_worker._private_python_migrations (
    id integer NOT NULL,
    name text NOT NULL,
    breaking boolean DEFAULT false NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
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

ALTER TABLE ONLY graphile_worker._private_python_migrations
    ADD CONSTRAINT _private_python_migrations_pkey PRIMARY KEY (id);

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

CREATE INDEX _private_workers_last_heartbeat_at_idx ON graphile_worker._private_workers USING btree (last_heartbeat_at);

CREATE INDEX jobs_main_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id, job_queue_id) WHERE (is_available = true);

CREATE INDEX jobs_no_queue_index ON graphile_worker._private_jobs USING btree (priority, run_at) INCLUDE (id, task_id) WHERE ((is_available = true) AND (job_queue_id IS NULL));

ALTER TABLE graphile_worker._private_job_queues ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_jobs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_known_crontabs ENABLE ROW LEVEL SECURITY;

ALTER TABLE graphile_worker._private_tasks ENABLE ROW LEVEL SECURITY;
