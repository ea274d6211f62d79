-- Statistics of what Python workers did, the number of jobs over time, and the progress of jobs.

-- What workers counted, by period. Each worker writes rows of its own, so that workers never wait for each other. An
-- elected worker merges them, and later merges short periods into longer ones. Histograms count jobs by the buckets of
-- _base/histogram.py; trailing zeros are left out. Tasks have their names, so that a removed task keeps its statistics.
create table if not exists {schema}._private_python_statistics (
  period integer not null,  -- the length in seconds: 60, 300 or 3600
  at timestamptz not null,  -- the beginning
  task text not null,
  worker text not null,  -- empty once the rows of all workers are merged
  done bigint not null,
  failed bigint not null,
  snoozed bigint not null,
  cancelled bigint not null,
  interrupted bigint not null,
  run_seconds double precision not null,
  wait_seconds double precision not null,
  runs bigint[] not null,
  waits bigint[] not null,
  primary key (period, at, task, worker)
);

-- The number of the last batch of counts that each worker has written. A worker that lost its connection sends its last
-- batch again, and the number shows whether that batch is already written.
create table if not exists {schema}._private_python_flushes (
  worker text primary key,
  number bigint not null,
  at timestamptz not null
) with (fillfactor = 50);

-- The number of jobs in each state. A row has the sums of its samples: the average is the sum divided by the number of
-- samples in the row of the same period whose task is empty. That row also has the sums of all tasks.
create table if not exists {schema}._private_python_depths (
  period integer not null,
  at timestamptz not null,
  task text not null,
  samples integer not null,
  ready bigint not null,
  scheduled bigint not null,
  running bigint not null,
  failed bigint not null,
  estimated boolean not null,  -- whether a sample read only a part of the table
  primary key (period, at, task)
);

-- When the next worker may do what only one worker does at a time.
create table if not exists {schema}._private_python_turns (
  name text primary key,
  due_at timestamptz not null
) with (fillfactor = 50);
insert into {schema}._private_python_turns (name, due_at)
values ('sample', pg_catalog.now()), ('roll_up', pg_catalog.now() {+} interval '1 minute')
on conflict do nothing;

-- What running jobs reported. The row of a job stays while the job is retried, and goes with the job.
create table if not exists {schema}._private_python_progress (
  job_id bigint primary key,
  locked_at timestamptz not null,  -- of the run that reported it
  value json not null,
  at timestamptz not null
) with (fillfactor = 50);
