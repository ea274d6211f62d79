-- Functions that an earlier release of this library installed get the search_path that new functions are created with.
-- Then none of their names resolves to a function or operator that another role created, whatever the caller's
-- search_path is. Functions that npm or the Rust port created stay as they are. Functions of this library are
-- recognized by a marker in their text.
do $body$
declare
  own_function regprocedure;
begin
  for own_function in
    select function.oid
    from (values
      ('add_jobs', 'returned in the order of the specs'),
      ('add_job', 'comes between two of the statements'),
      ('remove_job', 'as found where found.key = job_key'),
      ('complete_jobs', 'where job.id = any (job_ids)'),
      ('permanently_fail_jobs', 'where job.id = any (job_ids)'),
      ('reschedule_jobs', 'where job.id = any (job_ids)'),
      ('force_unlock_workers', 'where job.locked_by = any (worker_ids)'),
      ('worker_heartbeat', 'coalesce(excluded.metadata, worker.metadata)'),
      ('worker_deregister', 'as worker where worker.id = worker_id'),
      ('list_stale_workers', 'where worker.last_heartbeat_at < now() - stale_threshold'),
      ('list_orphan_locked_workers', 'as worker where worker.id = held.locked_by'),
      ('recover_dead_worker_jobs', 'where job.locked_by = any (worker_ids)'),
      ('delete_stale_workers', 'as worker where worker.id = any (worker_ids)')
    ) as known (name, words)
    join pg_catalog.pg_proc as function
      on function.proname = known.name and position(known.words in function.prosrc) > 0
    join pg_catalog.pg_type as job
      on job.typnamespace = function.pronamespace and job.oid = pg_typeof(null::{schema}._private_jobs)
    where function.proconfig is null
  loop
    execute format('alter function %s set search_path = pg_catalog, pg_temp', own_function);
  end loop;
end
$body$;
