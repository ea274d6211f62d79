-- Jobs that somebody wants cancelled, and that could not be changed at once: a worker has them, or somebody's
-- transaction. As a rule the table is empty.
--
-- A job may be in it twice: with a unique key whoever cancels a job would wait for another transaction that does.
create table if not exists {schema}._private_python_cancellations (
  id bigint generated always as identity primary key,
  job_id bigint not null,
  reason text not null,
  -- Not the time of the transaction: it is compared with what was done to the job before and after.
  requested_at timestamptz not null default clock_timestamp()
);
