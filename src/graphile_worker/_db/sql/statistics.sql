-- Statistics: see own/011_statistics.sql for the tables.

-- name: may_write
select coalesce(pg_catalog.bool_and(
  coalesce(pg_catalog.has_table_privilege(found.oid, 'select')
    and pg_catalog.has_table_privilege(found.oid, 'insert')
    and pg_catalog.has_table_privilege(found.oid, 'update')
    and pg_catalog.has_table_privilege(found.oid, 'delete'), false)
), false)
from (
  select pg_catalog.to_regclass($1::pg_catalog.text {||} '._private_python_' {||} name)::pg_catalog.oid as oid
  from pg_catalog.unnest($2::pg_catalog.text[]) as name
) as found;

-- name: add_runs
coalesce((
    select pg_catalog.array_agg(coalesce(pair.a, 0) {+} coalesce(pair.b, 0) order by pair.place)
    from rows from (pg_catalog.unnest(stored.runs), pg_catalog.unnest(excluded.runs))
      with ordinality as pair (a, b, place)
  ), '{}')

-- name: add_waits
coalesce((
    select pg_catalog.array_agg(coalesce(pair.a, 0) {+} coalesce(pair.b, 0) order by pair.place)
    from rows from (pg_catalog.unnest(stored.waits), pg_catalog.unnest(excluded.waits))
      with ordinality as pair (a, b, place)
  ), '{}')

-- name: add_to_stored
on conflict (period, at, task, worker) do update set
    done = stored.done {+} excluded.done,
    failed = stored.failed {+} excluded.failed,
    snoozed = stored.snoozed {+} excluded.snoozed,
    cancelled = stored.cancelled {+} excluded.cancelled,
    interrupted = stored.interrupted {+} excluded.interrupted,
    run_seconds = stored.run_seconds {+} excluded.run_seconds,
    wait_seconds = stored.wait_seconds {+} excluded.wait_seconds,
    runs = {add_runs},
    waits = {add_waits}

-- name: flush
-- Adds a batch of counts to the worker's own rows, unless the batch is already written. If an earlier attempt to write
-- it is still running in another session, this statement waits for that attempt, and then writes nothing.
with turn as (
  insert into {schema}._private_python_flushes as flush (worker, number, at)
  values ($1::pg_catalog.text, $2::pg_catalog.int8, pg_catalog.now())
  on conflict (worker) do update set number = excluded.number, at = excluded.at
  where flush.number {<} excluded.number
  returning flush.worker
), written as (
  insert into {schema}._private_python_statistics as stored (
    period, at, task, worker, done, failed, snoozed, cancelled, interrupted, run_seconds, wait_seconds, runs, waits
  )
  select
    60, pg_catalog.to_timestamp(given.at), given.task, turn.worker, given.done, given.failed, given.snoozed,
    given.cancelled, given.interrupted, given.run_seconds, given.wait_seconds, given.runs, given.waits
  from turn
  cross join pg_catalog.json_to_recordset($3::pg_catalog.text::pg_catalog.json) as given (
    at pg_catalog.float8, task pg_catalog.text, done pg_catalog.int8, failed pg_catalog.int8,
    snoozed pg_catalog.int8, cancelled pg_catalog.int8, interrupted pg_catalog.int8,
    run_seconds pg_catalog.float8, wait_seconds pg_catalog.float8,
    runs pg_catalog.int8[], waits pg_catalog.int8[]
  )
  {add_to_stored}
  returning 1
)
select pg_catalog.count(*) from written;

-- name: take_turn
-- Takes the turn if it is due and no other worker takes it. The row stays locked until the end of the transaction.
with turn as (
  select name from {schema}._private_python_turns
  where name {=} $1::pg_catalog.text and due_at {<=} pg_catalog.now()
  for update skip locked
)
update {schema}._private_python_turns as taken
set due_at = pg_catalog.now() {+} ($2::pg_catalog.float8 {*} interval '1 second')
from turn
where taken.name {=} turn.name
returning true;

-- name: postpone_turn
update {schema}._private_python_turns
set due_at = pg_catalog.now() {+} ($2::pg_catalog.float8 {*} interval '1 second')
where name {=} $1::pg_catalog.text;

-- name: limit_time
select pg_catalog.set_config('statement_timeout', $1::pg_catalog.text, true),
  pg_catalog.set_config('enable_seqscan', $2::pg_catalog.text, true);

-- name: period_start
pg_catalog.to_timestamp(
      pg_catalog.floor(extract(epoch from moved.at)::pg_catalog.float8 {/} $2::pg_catalog.int4)
        {*} $2::pg_catalog.int4
    )

-- name: is_old
-- Only whole periods are merged.
(moved.at {<} pg_catalog.to_timestamp(
    pg_catalog.floor(
      (extract(epoch from pg_catalog.now())::pg_catalog.float8 {-} $3::pg_catalog.float8) {/} $2::pg_catalog.int4
    ) {*} $2::pg_catalog.int4
  ))

-- name: merge_counts
-- Replaces rows of period $1 that are older than $3 seconds by rows of period $2 without a worker. One statement does
-- both, so a crash can neither lose nor double a count.
with gone as (
  delete from {schema}._private_python_statistics as moved
  where moved.period {=} $1::pg_catalog.int4 and {is_old}
    and (moved.worker {<>} '' or ($1::pg_catalog.int4 {<>} $2::pg_catalog.int4))
  returning moved.*
), moved as materialized (
  select {period_start} as start, moved.* from gone as moved
), counts as (
  select
    moved.start, moved.task,
    pg_catalog.sum(moved.done)::pg_catalog.int8 as done,
    pg_catalog.sum(moved.failed)::pg_catalog.int8 as failed,
    pg_catalog.sum(moved.snoozed)::pg_catalog.int8 as snoozed,
    pg_catalog.sum(moved.cancelled)::pg_catalog.int8 as cancelled,
    pg_catalog.sum(moved.interrupted)::pg_catalog.int8 as interrupted,
    pg_catalog.sum(moved.run_seconds) as run_seconds,
    pg_catalog.sum(moved.wait_seconds) as wait_seconds
  from moved
  group by moved.start, moved.task
), runs as (
  select one.start, one.task, pg_catalog.array_agg(one.jobs order by one.place) as jobs
  from (
    select moved.start, moved.task, bucket.place, pg_catalog.sum(bucket.jobs)::pg_catalog.int8 as jobs
    from moved cross join lateral pg_catalog.unnest(moved.runs) with ordinality as bucket (jobs, place)
    group by moved.start, moved.task, bucket.place
  ) as one
  group by one.start, one.task
), waits as (
  select one.start, one.task, pg_catalog.array_agg(one.jobs order by one.place) as jobs
  from (
    select moved.start, moved.task, bucket.place, pg_catalog.sum(bucket.jobs)::pg_catalog.int8 as jobs
    from moved cross join lateral pg_catalog.unnest(moved.waits) with ordinality as bucket (jobs, place)
    group by moved.start, moved.task, bucket.place
  ) as one
  group by one.start, one.task
), written as (
  insert into {schema}._private_python_statistics as stored (
    period, at, task, worker, done, failed, snoozed, cancelled, interrupted, run_seconds, wait_seconds, runs, waits
  )
  select
    $2::pg_catalog.int4, counts.start, counts.task, '', counts.done, counts.failed, counts.snoozed, counts.cancelled,
    counts.interrupted, counts.run_seconds, counts.wait_seconds, coalesce(runs.jobs, '{}'), coalesce(waits.jobs, '{}')
  from counts
  left join runs on runs.start {=} counts.start and runs.task {=} counts.task
  left join waits on waits.start {=} counts.start and waits.task {=} counts.task
  {add_to_stored}
  returning 1
)
select pg_catalog.count(*) from written;

-- name: add_to_depths
on conflict (period, at, task) do update set
    samples = stored.samples {+} excluded.samples,
    ready = stored.ready {+} excluded.ready,
    scheduled = stored.scheduled {+} excluded.scheduled,
    running = stored.running {+} excluded.running,
    failed = stored.failed {+} excluded.failed,
    estimated = stored.estimated or excluded.estimated

-- name: merge_depths
-- As merge_counts does.
with gone as (
  delete from {schema}._private_python_depths as moved
  where moved.period {=} $1::pg_catalog.int4 and {is_old}
  returning moved.*
), written as (
  insert into {schema}._private_python_depths as stored (
    period, at, task, samples, ready, scheduled, running, failed, estimated
  )
  select
    $2::pg_catalog.int4, {period_start}, moved.task,
    pg_catalog.sum(moved.samples)::pg_catalog.int4, pg_catalog.sum(moved.ready)::pg_catalog.int8,
    pg_catalog.sum(moved.scheduled)::pg_catalog.int8, pg_catalog.sum(moved.running)::pg_catalog.int8,
    pg_catalog.sum(moved.failed)::pg_catalog.int8, pg_catalog.bool_or(moved.estimated)
  from gone as moved
  group by 2, moved.task
  {add_to_depths}
  returning 1
)
select pg_catalog.count(*) from written;

-- name: delete_old
-- Deletes what is older than $1 seconds, and the numbers of workers that have written nothing for $2 seconds.
with counts as (
  delete from {schema}._private_python_statistics
  where at {<} (pg_catalog.now() {-} ($1::pg_catalog.float8 {*} interval '1 second'))
), depths as (
  delete from {schema}._private_python_depths
  where at {<} (pg_catalog.now() {-} ($1::pg_catalog.float8 {*} interval '1 second'))
)
delete from {schema}._private_python_flushes
where at {<} (pg_catalog.now() {-} ($2::pg_catalog.float8 {*} interval '1 second'));

-- name: count_pages
select pg_catalog.pg_relation_size(($1::pg_catalog.text {||} '._private_jobs')::pg_catalog.regclass)
  {/} pg_catalog.current_setting('block_size')::pg_catalog.int8;

-- name: store_depths
, named as (
  select task.identifier as task, counted.ready, counted.scheduled, counted.running, counted.failed
  from counted
  inner join {schema}._private_tasks as task on task.id {=} counted.task_id
  where (((counted.ready {+} counted.scheduled) {+} counted.running) {+} counted.failed) {>} 0
  union all
  select
    '', coalesce(pg_catalog.sum(counted.ready), 0), coalesce(pg_catalog.sum(counted.scheduled), 0),
    coalesce(pg_catalog.sum(counted.running), 0), coalesce(pg_catalog.sum(counted.failed), 0)
  from counted
), written as (
  insert into {schema}._private_python_depths as stored (
    period, at, task, samples, ready, scheduled, running, failed, estimated
  )
  select
    60, pg_catalog.date_trunc('minute', pg_catalog.now()), named.task, 1, named.ready, named.scheduled,
    named.running, named.failed, $1::pg_catalog.bool
  from named
  {add_to_depths}
  returning 1
)
select pg_catalog.count(*) from written

-- name: sample_all
-- Counts all jobs. $2 is not used: both samples have the same parameters.
with counted as (
  select
    job.task_id,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as ready,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {>} pg_catalog.now()) as scheduled,
    pg_catalog.count(job.locked_at) as running,
    pg_catalog.count(*) filter (where not job.is_available and job.locked_at is null) as failed
  from {schema}._private_jobs as job
  where $2::pg_catalog.float4 is not null and $3::pg_catalog.int8 is not null
  group by job.task_id
) {store_depths};

-- name: available_jobs
-- At most $3 jobs from each of the two indexes that hold the available jobs of a task.
select job.run_at from (
      (
        select job.run_at from {schema}._private_jobs as job
        where job.is_available and job.job_queue_id is null and job.task_id {=} task.id
        limit $3::pg_catalog.int8
      )
      union all
      (
        select job.run_at from {schema}._private_jobs as job
        where job.is_available and job.job_queue_id is not null and job.task_id {=} task.id
        limit $3::pg_catalog.int8
      )
    ) as job

-- name: sample_some
-- For large tables. Reads $2 percent of the pages, and scales what it finds. A task with fewer than $3 available jobs
-- has them counted in the indexes instead.
with sampled as (
  select
    job.task_id,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {<=} pg_catalog.now()) as ready,
    pg_catalog.count(*) filter (where job.is_available and job.run_at {>} pg_catalog.now()) as scheduled,
    pg_catalog.count(job.locked_at) as running,
    pg_catalog.count(*) filter (where not job.is_available and job.locked_at is null) as failed
  from {schema}._private_jobs as job tablesample system ($2::pg_catalog.float4)
  group by job.task_id
), scaled as (
  select
    sampled.task_id,
    ((sampled.ready {*} 100) {/} $2::pg_catalog.float4)::pg_catalog.int8 as ready,
    ((sampled.scheduled {*} 100) {/} $2::pg_catalog.float4)::pg_catalog.int8 as scheduled,
    ((sampled.running {*} 100) {/} $2::pg_catalog.float4)::pg_catalog.int8 as running,
    ((sampled.failed {*} 100) {/} $2::pg_catalog.float4)::pg_catalog.int8 as failed
  from sampled
), available as (
  select task.id as task_id, found.ready, found.scheduled, (found.ready {+} found.scheduled) {<} $3::pg_catalog.int8 as is_exact
  from {schema}._private_tasks as task
  cross join lateral (
    select
      pg_catalog.count(*) filter (where job.run_at {<=} pg_catalog.now()) as ready,
      pg_catalog.count(*) filter (where job.run_at {>} pg_catalog.now()) as scheduled
    from ({available_jobs}) as job
  ) as found
), counted as (
  select
    available.task_id,
    case when available.is_exact then available.ready else coalesce(scaled.ready, available.ready) end as ready,
    case when available.is_exact then available.scheduled else coalesce(scaled.scheduled, available.scheduled) end
      as scheduled,
    coalesce(scaled.running, 0) as running,
    coalesce(scaled.failed, 0) as failed
  from available
  left join scaled on scaled.task_id {=} available.task_id
) {store_depths};

-- name: step_start
pg_catalog.to_timestamp(
      pg_catalog.floor(extract(epoch from stored.at)::pg_catalog.float8 {/} $2::pg_catalog.int4)
        {*} $2::pg_catalog.int4
    )

-- name: read_counts
-- What workers counted since $1, in steps of $2 seconds.
with found as materialized (
  select {step_start} as start, stored.*
  from {schema}._private_python_statistics as stored
  where stored.at {>=} $1::pg_catalog.timestamptz
    and ($3::pg_catalog.text is null or stored.task {=} $3::pg_catalog.text)
), runs as (
  select one.start, one.task, pg_catalog.array_agg(one.jobs order by one.place) as jobs
  from (
    select found.start, found.task, bucket.place, pg_catalog.sum(bucket.jobs)::pg_catalog.int8 as jobs
    from found cross join lateral pg_catalog.unnest(found.runs) with ordinality as bucket (jobs, place)
    group by found.start, found.task, bucket.place
  ) as one
  group by one.start, one.task
), waits as (
  select one.start, one.task, pg_catalog.array_agg(one.jobs order by one.place) as jobs
  from (
    select found.start, found.task, bucket.place, pg_catalog.sum(bucket.jobs)::pg_catalog.int8 as jobs
    from found cross join lateral pg_catalog.unnest(found.waits) with ordinality as bucket (jobs, place)
    group by found.start, found.task, bucket.place
  ) as one
  group by one.start, one.task
), counts as (
  select
    found.start, found.task,
    pg_catalog.sum(found.done)::pg_catalog.int8 as done,
    pg_catalog.sum(found.failed)::pg_catalog.int8 as failed,
    pg_catalog.sum(found.snoozed)::pg_catalog.int8 as snoozed,
    pg_catalog.sum(found.cancelled)::pg_catalog.int8 as cancelled,
    pg_catalog.sum(found.interrupted)::pg_catalog.int8 as interrupted,
    pg_catalog.sum(found.run_seconds) as run_seconds,
    pg_catalog.sum(found.wait_seconds) as wait_seconds
  from found
  group by found.start, found.task
)
select
  counts.start as at, counts.task, counts.done, counts.failed, counts.snoozed, counts.cancelled, counts.interrupted,
  counts.run_seconds, counts.wait_seconds, coalesce(runs.jobs, '{}') as runs, coalesce(waits.jobs, '{}') as waits
from counts
left join runs on runs.start {=} counts.start and runs.task {=} counts.task
left join waits on waits.start {=} counts.start and waits.task {=} counts.task
order by counts.task, counts.start;

-- name: read_depths
-- The sums of the samples since $1, in steps of $2 seconds. The row without a task has the number of samples.
select
  {step_start} as at, stored.task,
  pg_catalog.sum(stored.samples)::pg_catalog.int8 as samples,
  pg_catalog.sum(stored.ready)::pg_catalog.int8 as ready,
  pg_catalog.sum(stored.scheduled)::pg_catalog.int8 as scheduled,
  pg_catalog.sum(stored.running)::pg_catalog.int8 as running,
  pg_catalog.sum(stored.failed)::pg_catalog.int8 as failed,
  pg_catalog.bool_or(stored.estimated) as estimated
from {schema}._private_python_depths as stored
where stored.at {>=} $1::pg_catalog.timestamptz
  and ($3::pg_catalog.text is null or stored.task {=} '' or stored.task {=} $3::pg_catalog.text)
group by 1, stored.task
order by 1, stored.task;
