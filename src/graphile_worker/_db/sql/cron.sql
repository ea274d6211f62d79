-- Recurring tasks. Each schedule has a row in _private_known_crontabs. The worker that adds the jobs of a minute moves
-- last_execution to that minute, under the row's lock, and only forward. So each minute is added once, however many
-- workers, in whatever language, have the schedule. Rows are locked in the order of the crontab, as Node workers do,
-- so that workers do not deadlock.

-- name: read_schedules
select wanted.identifier, known.known_since, known.last_execution, now() as now
from unnest($1::text[]) as wanted (identifier)
left join {schema}._private_known_crontabs as known on known.identifier = wanted.identifier;

-- name: read_time
select now();

-- name: list_schedules
select identifier, known_since, last_execution
from {schema}._private_known_crontabs
order by identifier;

-- name: register_schedules
insert into {schema}._private_known_crontabs (identifier, known_since)
select wanted.identifier, $2
from unnest($1::text[]) with ordinality as wanted (identifier, place)
order by wanted.place
on conflict (identifier) do nothing;

-- name: lock_schedules
select known.identifier, known.last_execution
from {schema}._private_known_crontabs as known
where known.identifier = any ($1::text[])
order by array_position($1::text[], known.identifier)
for update;

-- name: record_executions
update {schema}._private_known_crontabs as known
set last_execution = executed.minute
from unnest($1::text[], $2::timestamptz[]) as executed (identifier, minute)
where known.identifier = executed.identifier;

-- name: find_unfinished
-- The jobs with these keys that are waiting, also for a retry, or running.
select job.key
from {schema}._private_jobs as job
where job.key = any ($1::text[]) and (job.locked_at is not null or job.attempts < job.max_attempts);
