-- Results of jobs, for those who wait for them.

-- name: read_results
-- The jobs that have ended, with the last attempt that the history has. Each job is looked up by its id, in one snapshot:
-- the transaction that deletes a job also writes its attempt, so a job without either has left no result.
-- No attempt is older than $2, which leaves most partitions out.
select
  given.id,
  job.id is not null as is_there,
  job.last_error,
  run.outcome,
  run.final,
  run.error,
  case when job.id is null then run.error_type else failure.error_type end as error_type,
  case when job.id is null then run.traceback else failure.traceback end as traceback,
  failure.error_type as recorded_type,
  run.result::pg_catalog.text as result,
  run.no_result
from unnest($1::bigint[]) as given (id)
left join lateral (
  select job.id, job.last_error, job.attempts, job.run_at, not job.is_available and job.locked_at is null as is_over
  from {schema}._private_jobs as job
  where job.id {=} given.id
  offset 0
) as job on true
left join lateral (
  select run.*
  from {schema}._private_python_runs as run
  where (job.id is null or job.is_over) and run.job_id {=} given.id and run.ended_at {>=} $2
  order by run.ended_at desc, run.attempt desc
  limit 1
) as run on true
left join lateral (
  -- Only while the job is as that failure left it.
  select failure.error_type, failure.traceback
  from {schema}._private_python_failures as failure
  where job.is_over and failure.job_id {=} job.id and failure.attempts {=} job.attempts and failure.run_at {=} job.run_at
    and failure.last_error_hash {=} pg_catalog.hashtextextended(job.last_error, 0)
) as failure on true
where job.id is null or job.is_over;
