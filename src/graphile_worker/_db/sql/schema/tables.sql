-- The tables of Graphile Worker, revision 20, as an upgrade through all its revisions leaves them.
-- Names of constraints and sequences are part of the contract, odd ones included: a later upstream
-- migration may refer to them.

create table {schema}._private_tasks (
  id integer constraint tasks_id_not_null not null generated always as identity
    constraint tasks_pkey primary key,
  identifier text constraint tasks_identifier_not_null not null
    constraint tasks_identifier_key unique
    constraint tasks_identifier_check check (length(identifier) <= 128)
);
alter sequence {schema}._private_tasks_id_seq rename to tasks_id_seq;

create table {schema}._private_job_queues (
  id integer constraint job_queues_id_not_null not null generated always as identity
    constraint job_queues_pkey1 primary key,
  queue_name text constraint job_queues_queue_name_not_null1 not null
    constraint job_queues_queue_name_key unique
    constraint job_queues_queue_name_check check (length(queue_name) <= 128),
  locked_at timestamptz,
  locked_by text,
  is_available boolean constraint job_queues_is_available_not_null not null
    generated always as (locked_at is null) stored
);
alter sequence {schema}._private_job_queues_id_seq rename to job_queues_id_seq;

create table {schema}._private_jobs (
  id bigint constraint jobs_id_not_null1 not null generated always as identity
    constraint jobs_pkey1 primary key,
  job_queue_id integer,
  task_id integer constraint jobs_task_id_not_null not null,
  payload json default '{}' constraint jobs_payload_not_null1 not null,
  priority smallint default 0 constraint jobs_priority_not_null1 not null,
  run_at timestamptz default now() constraint jobs_run_at_not_null1 not null,
  attempts smallint default 0 constraint jobs_attempts_not_null1 not null,
  max_attempts smallint default 25 constraint jobs_max_attempts_not_null1 not null
    constraint jobs_max_attempts_check check (max_attempts >= 1),
  last_error text,
  created_at timestamptz default now() constraint jobs_created_at_not_null1 not null,
  updated_at timestamptz default now() constraint jobs_updated_at_not_null1 not null,
  key text
    constraint jobs_key_key1 unique
    constraint jobs_key_check check (length(key) > 0 and length(key) <= 512),
  locked_at timestamptz,
  locked_by text,
  revision integer default 0 constraint jobs_revision_not_null1 not null,
  flags jsonb,
  is_available boolean constraint jobs_is_available_not_null not null
    generated always as (locked_at is null and attempts < max_attempts) stored
);
alter sequence {schema}._private_jobs_id_seq rename to jobs_id_seq1;

create index jobs_main_index on {schema}._private_jobs
  using btree (priority, run_at) include (id, task_id, job_queue_id)
  where is_available = true;

create index jobs_no_queue_index on {schema}._private_jobs
  using btree (priority, run_at) include (id, task_id)
  where is_available = true and job_queue_id is null;

create table {schema}._private_known_crontabs (
  identifier text constraint known_crontabs_identifier_not_null not null
    constraint known_crontabs_pkey primary key,
  known_since timestamptz constraint known_crontabs_known_since_not_null not null,
  last_execution timestamptz
);

-- Enabled without a policy: only the owner, its members and superusers can access the rows.
alter table {schema}._private_tasks enable row level security;
alter table {schema}._private_job_queues enable row level security;
alter table {schema}._private_jobs enable row level security;
alter table {schema}._private_known_crontabs enable row level security;

create type {schema}.job_spec as (
  identifier text,
  payload json,
  queue_name text,
  run_at timestamptz,
  max_attempts smallint,
  job_key text,
  priority smallint,
  flags text[]
);

-- The payload is left out on purpose: it may be large, and it may be private.
create view {schema}.jobs as
  select
    job.id,
    queue.queue_name,
    task.identifier as task_identifier,
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
  from {schema}._private_jobs as job
  join {schema}._private_tasks as task on task.id = job.task_id
  left join {schema}._private_job_queues as queue on queue.id = job.job_queue_id;
