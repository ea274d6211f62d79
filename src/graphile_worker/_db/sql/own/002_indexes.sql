-- What a claim reads, in the order in which it reads it, so that it never walks past jobs that it cannot take:
-- those of other tasks, of locked queues, or due later. Only rows that are available are in them, so claiming
-- and completing a job costs nothing here; adding one does.

-- name: jobs_without_queue
create index if not exists _private_python_jobs_without_queue on {schema}._private_jobs
  (task_id, priority, run_at, id)
  where is_available and job_queue_id is null;

-- name: jobs_with_queue
create index if not exists _private_python_jobs_with_queue on {schema}._private_jobs
  (task_id, priority, run_at, id) include (job_queue_id)
  where is_available and job_queue_id is not null;

-- name: jobs_of_queue
create index if not exists _private_python_jobs_of_queue on {schema}._private_jobs
  (job_queue_id, task_id, priority, run_at, id)
  where is_available and job_queue_id is not null;
