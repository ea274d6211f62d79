-- These indexes hold the jobs in the order in which a claim reads them. So a claim never scans past jobs that it cannot
-- take: jobs of other tasks, jobs in locked queues, jobs that are due later. They contain only available rows, so
-- claiming and completing a job costs nothing here; adding a job does.
--
-- Jobs that have flags are apart, because a worker may have to look for those without a forbidden flag one by one. Each
-- job is in only one of the indexes, so it costs no more.

-- name: jobs_without_flags
create index if not exists _private_python_jobs_without_flags on {schema}._private_jobs
  (task_id, priority, run_at, id)
  where is_available and job_queue_id is null and flags is null;

-- name: jobs_with_flags
create index if not exists _private_python_jobs_with_flags on {schema}._private_jobs
  (task_id, priority, run_at, id)
  where is_available and job_queue_id is null and flags is not null;

-- name: jobs_with_queue
create index if not exists _private_python_jobs_with_queue on {schema}._private_jobs
  (task_id, priority, run_at, id) include (job_queue_id)
  where is_available and job_queue_id is not null;

-- name: jobs_of_queue
create index if not exists _private_python_jobs_of_queue on {schema}._private_jobs
  (job_queue_id, task_id, priority, run_at, id)
  where is_available and job_queue_id is not null;
