-- Requests to cancel jobs that could not be changed at once, because a worker runs them or another transaction has
-- locked them. The table is usually empty.
--
-- A job may be in it twice: with a unique key, two transactions that cancel the same job would wait for each other.
create table if not exists {schema}._private_python_cancellations (
  id bigint generated always as identity primary key,
  job_id bigint not null,
  reason text not null,
  -- Not the start of the transaction: the time is compared with changes to the job before and after the request.
  requested_at timestamptz not null default clock_timestamp()
);
