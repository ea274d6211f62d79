-- The past of the dashboard's example, which no worker has run.

-- name: add_statistics
insert into {schema}._private_python_statistics (
  period, at, task, worker, done, failed, snoozed, cancelled, interrupted, run_seconds, wait_seconds, runs, waits
)
select
  given.period, to_timestamp(given.at), given.task, '', given.done, given.failed, 0, 0, 0,
  given.run_seconds, given.wait_seconds, given.runs, given.waits
from json_to_recordset($1::text::json) as given (
  period integer, at float8, task text, done bigint, failed bigint, run_seconds float8, wait_seconds float8,
  runs bigint[], waits bigint[]
)
on conflict do nothing;

-- name: add_depths
insert into {schema}._private_python_depths (
  period, at, task, samples, ready, scheduled, running, failed, estimated
)
select given.period, to_timestamp(given.at), '', 1, given.ready, given.scheduled, given.running, given.failed, false
from json_to_recordset($1::text::json) as given (
  period integer, at float8, ready bigint, scheduled bigint, running bigint, failed bigint
)
on conflict do nothing;
