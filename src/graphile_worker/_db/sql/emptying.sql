-- Removes everything that a test may have left behind. Tasks stay, because workers remember their ids.

-- name: is_installed
select exists (
  select from pg_catalog.pg_class as class
  join pg_catalog.pg_namespace as namespace on namespace.oid {=} class.relnamespace
  where namespace.nspname {=} $1 and class.relname {=} '_private_python_runs'
);

-- name: empty_queue
with jobs as (delete from {schema}._private_jobs),
  queues as (delete from {schema}._private_job_queues),
  crontabs as (delete from {schema}._private_known_crontabs),
  cancellations as (delete from {schema}._private_python_cancellations),
  failures as (delete from {schema}._private_python_failures),
  progress as (delete from {schema}._private_python_progress)
delete from {schema}._private_python_runs;
