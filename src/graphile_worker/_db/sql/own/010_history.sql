-- History: a row for each attempt to run a job, if the worker or the task keeps history. The transaction that records
-- the outcome of the attempt writes the row, so there is never one without the other. Rows are not changed later.
--
-- Jobs that workers in other languages run leave no rows.
--
-- Workers create a partition for each day ahead of time, and drop partitions that are older than `history_keep`. A row
-- of a day without a partition goes to the default partition. There is no foreign key and no unique constraint: each
-- completion would have to check them. The fence of the claim makes sure that an attempt is recorded once.
create table if not exists {schema}._private_python_runs (
  job_id bigint not null,
  attempt smallint not null,
  outcome smallint not null,        -- 1 completed, 2 failed, 3 cancelled, 4 snoozed, 5 the worker died
  final boolean not null,           -- whether the job does not run again
  ended_at timestamptz not null,    -- when the outcome was recorded, which is later during an outage
  started_at timestamptz,           -- null if the job did not run: for example, it was completed by hand
  duration real,                    -- seconds that the task ran
  run_at timestamptz not null,      -- when the attempt was due
  created_at timestamptz not null,
  task_id integer not null,
  queue_name text,
  worker text,                      -- null if no worker recorded the outcome
  key text,
  error text,
  error_type text,
  traceback text,
  result json,                      -- null if it is not kept; the JSON value null if the task returned None
  no_result text,                   -- why a result that should have been kept is missing: it is too large, or not JSON
  payload json
) partition by range (ended_at);

create table if not exists {schema}._private_python_runs_default
  partition of {schema}._private_python_runs default;

create index if not exists _private_python_runs_job_id on {schema}._private_python_runs (job_id);
create index if not exists _private_python_runs_task_id on {schema}._private_python_runs (task_id, ended_at);
-- Attempts that completed their jobs, usually most of them, are not in this one.
create index if not exists _private_python_runs_failed on {schema}._private_python_runs (ended_at) where outcome <> 1;
