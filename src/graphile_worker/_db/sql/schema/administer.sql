-- The functions that administer jobs. A lock expires after four hours: a job locked for longer is treated as not
-- running.

create function {schema}.remove_job(job_key text) returns {schema}._private_jobs
strict language plpgsql set search_path = pg_catalog, pg_temp as $body$
declare
  job {schema}._private_jobs;
begin
  -- The row is locked first, so that the checks below stay true until the end. If the key went to another job while
  -- this call waited for the lock, the loop selects again.
  loop
    select * into job from {schema}._private_jobs as found where found.key = job_key for update;
    exit when found;
    if not exists (select from {schema}._private_jobs as found where found.key = job_key) then
      return job;
    end if;
  end loop;
  if job.locked_at is null or job.locked_at < now() - interval '4 hours' then
    delete from {schema}._private_jobs as found where found.id = job.id;
    perform pg_notify('jobs:insert', json_build_object('r', random(), 'count', -1)::text);
    return job;
  end if;
  -- The job is running: it may finish, but it is never retried.
  update {schema}._private_jobs as found
    set key = null, attempts = found.max_attempts, updated_at = now()
    where found.id = job.id
    returning * into job;
  return job;
end
$body$;

create function {schema}.complete_jobs(job_ids bigint[]) returns setof {schema}._private_jobs
language sql set search_path = pg_catalog, pg_temp as $body$
  delete from {schema}._private_jobs as job
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$body$;

create function {schema}.permanently_fail_jobs(job_ids bigint[], error_message text default null)
returns setof {schema}._private_jobs
language sql set search_path = pg_catalog, pg_temp as $body$
  update {schema}._private_jobs as job
    set last_error = coalesce(error_message, 'Manually marked as failed'),
        attempts = job.max_attempts,
        updated_at = now()
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$body$;

create function {schema}.reschedule_jobs(
  job_ids bigint[],
  run_at timestamptz default null,
  priority integer default null,
  attempts integer default null,
  max_attempts integer default null
) returns setof {schema}._private_jobs
language sql set search_path = pg_catalog, pg_temp as $body$
  update {schema}._private_jobs as job
    set run_at = coalesce(reschedule_jobs.run_at, job.run_at),
        priority = coalesce(reschedule_jobs.priority::smallint, job.priority),
        attempts = coalesce(reschedule_jobs.attempts::smallint, job.attempts),
        max_attempts = coalesce(reschedule_jobs.max_attempts::smallint, job.max_attempts),
        updated_at = now()
    where job.id = any (job_ids)
      and (job.locked_at is null or job.locked_at < now() - interval '4 hours')
    returning *;
$body$;

create function {schema}.force_unlock_workers(worker_ids text[]) returns void
language sql set search_path = pg_catalog, pg_temp as $body$
  update {schema}._private_jobs as job
    set locked_at = null, locked_by = null
    where job.locked_by = any (worker_ids);
  update {schema}._private_job_queues as queue
    set locked_at = null, locked_by = null
    where queue.locked_by = any (worker_ids);
$body$;
