-- What `graphile-worker doctor` reads. No statement here writes, and every one of them may fail.

-- name: set_timeouts
-- Examining a database in trouble must not add to its load.
select set_config('statement_timeout', '20000', true), set_config('lock_timeout', '2000', true);

-- name: read_server
select
  current_setting('server_version_num')::integer as version_num,
  current_setting('server_version') as version,
  current_user::text as role,
  pg_is_in_recovery() as is_replica,
  current_setting('default_transaction_read_only')::boolean as is_read_only;

-- name: read_clock
select clock_timestamp();

-- name: read_rights
-- The schema is outer-joined, so that a missing schema gives a row and not an error.
select
  namespace.oid is not null as schema_exists,
  pg_get_userbyid(namespace.nspowner)::text as owner,
  coalesce((select role.rolsuper from pg_catalog.pg_roles as role where role.oid = namespace.nspowner), false)
    as owner_is_superuser,
  coalesce(pg_has_role(namespace.nspowner, 'usage'), false) as acts_as_owner,
  coalesce(pg_has_role(namespace.nspowner, 'member'), false) as is_member,
  coalesce(has_schema_privilege(namespace.oid, 'usage'), false) as may_use_schema,
  has_database_privilege(current_database(), 'create') as may_create_schema,
  (select role.rolbypassrls or role.rolsuper from pg_catalog.pg_roles as role where role.rolname = current_user)
    as passes_row_security,
  array(
    select class.relname::text from pg_catalog.pg_class as class
    where class.relnamespace = namespace.oid and class.relkind = 'r' and row_security_active(class.oid)
    order by 1
  ) as hidden_tables,
  array(
    select privilege || ' on ' || class.relname
    from pg_catalog.pg_class as class
    cross join unnest(array['select', 'insert', 'update', 'delete']) as privilege
    where class.relnamespace = namespace.oid and class.relkind = 'r'
      and not has_table_privilege(class.oid, privilege)
    union all
    select 'execute on ' || function.proname
    from pg_catalog.pg_proc as function
    where function.pronamespace = namespace.oid and not has_function_privilege(function.oid, 'execute')
    order by 1
  ) as missing
from (select $1::name as schema_name) as wanted
left join pg_catalog.pg_namespace as namespace on namespace.nspname = wanted.schema_name;

-- name: set_search_path
-- Then the catalog's descriptions do not contain the name of the schema.
select set_config('search_path', quote_ident($1) || ', pg_catalog', true);

-- name: describe_schema
-- Each object and its definition, in words that do not differ between versions of PostgreSQL. Functions that other
-- installers create too are compared by their signatures; functions of this library also by their text.
select 'table' as kind, class.relname::text as name,
  case when class.relrowsecurity then 'row level security' else '' end as definition
from pg_catalog.pg_class as class
where class.relnamespace = $1::text::regnamespace and class.relkind in ('r', 'p')
union all
select 'view', class.relname, ''
from pg_catalog.pg_class as class
where class.relnamespace = $1::text::regnamespace and class.relkind = 'v'
union all
select 'column', class.relname || '.' || attribute.attname,
  concat_ws(' ', format_type(attribute.atttypid, attribute.atttypmod),
    case when attribute.attnotnull then 'not null' end,
    case when attribute.attidentity <> '' then 'identity' end,
    case when attribute.attgenerated = '' then 'default' else 'generated' end
      || ' ' || pg_get_expr(stored.adbin, stored.adrelid, true))
from pg_catalog.pg_attribute as attribute
join pg_catalog.pg_class as class on class.oid = attribute.attrelid
left join pg_catalog.pg_attrdef as stored
  on stored.adrelid = attribute.attrelid and stored.adnum = attribute.attnum
where class.relnamespace = $1::text::regnamespace and class.relkind in ('r', 'p', 'v', 'c')
  and attribute.attnum > 0 and not attribute.attisdropped
union all
select 'constraint', class.relname || '.' || held.conname, pg_get_constraintdef(held.oid, true)
from pg_catalog.pg_constraint as held
join pg_catalog.pg_class as class on class.oid = held.conrelid
where class.relnamespace = $1::text::regnamespace and held.contype in ('p', 'u', 'c', 'f', 'x')
union all
select 'index', class.relname || '.' || named.relname,
  regexp_replace(pg_get_indexdef(index.indexrelid, 0, true), '^CREATE (UNIQUE )?INDEX .* USING', '\1using')
    || case when index.indisvalid then '' else ', but invalid' end
from pg_catalog.pg_index as index
join pg_catalog.pg_class as class on class.oid = index.indrelid
join pg_catalog.pg_class as named on named.oid = index.indexrelid
where class.relnamespace = $1::text::regnamespace and class.relkind in ('r', 'p')
union all
select 'trigger', class.relname || '.' || trigger.tgname,
  case when trigger.tgenabled = 'D' then 'disabled' else '' end
from pg_catalog.pg_trigger as trigger
join pg_catalog.pg_class as class on class.oid = trigger.tgrelid
where class.relnamespace = $1::text::regnamespace and not trigger.tgisinternal
union all
select 'function', function.oid::regprocedure::text,
  concat_ws(' ', pg_get_function_result(function.oid),
    case when function.prosecdef then 'security definer' end,
    case when function.proname like '\_private\_python\_%' then md5(replace(function.prosrc, $1, '')) end)
from pg_catalog.pg_proc as function
where function.pronamespace = $1::text::regnamespace
union all
select 'type', type.typname, ''
from pg_catalog.pg_type as type
join pg_catalog.pg_class as class on class.oid = type.typrelid and class.relkind = 'c'
where type.typnamespace = $1::text::regnamespace
order by 1, 2;

-- name: read_exposed_functions
-- Functions that resolve names by the caller's search_path, and whether every role may create objects in `public`.
select
  array(
    select distinct function.proname::text from pg_catalog.pg_proc as function
    where function.pronamespace = $1::text::regnamespace
      and not coalesce(array_to_string(function.proconfig, ' ') like '%search_path=%', false)
    order by 1
  ) as functions,
  exists (
    select from pg_catalog.pg_namespace as namespace
    cross join lateral aclexplode(coalesce(namespace.nspacl, acldefault('n', namespace.nspowner))) as granted
    where namespace.nspname = 'public' and granted.grantee = 0 and granted.privilege_type = 'CREATE'
  ) as all_may_create;

-- name: read_triggers_without_path
-- Triggers whose functions resolve names by the search_path of the library's sessions. Functions in C resolve no names.
select
  class.relname::text as table, trigger.tgname::text as trigger, trigger.tgfoid::regprocedure::text as function
from pg_catalog.pg_trigger as trigger
join pg_catalog.pg_class as class on class.oid = trigger.tgrelid
join pg_catalog.pg_proc as function on function.oid = trigger.tgfoid
join pg_catalog.pg_language as language on language.oid = function.prolang
where class.relnamespace = $1::text::regnamespace and not trigger.tgisinternal and trigger.tgenabled in ('O', 'A')
  and language.lanname not in ('internal', 'c')
  and not exists (select from unnest(function.proconfig) as setting where setting like 'search_path=%')
order by 1, 2;

-- name: read_notification_queue
select pg_notification_queue_usage();

-- name: read_connections
-- A role without the right to read other sessions sees that they exist, and no details.
select
  (
    select count(*)::integer from pg_catalog.pg_stat_activity as session
    where session.backend_type = 'client backend'
      or (session.backend_type is null and session.datid is not null)
  ) as used,
  current_setting('max_connections')::integer
    - current_setting('superuser_reserved_connections')::integer
    - coalesce(current_setting('reserved_connections', true)::integer, 0) as of_server,
  database.datconnlimit as of_database,
  (select count(*)::integer from pg_catalog.pg_stat_activity as session where session.datid = database.oid)
    as used_in_database,
  role.rolconnlimit as of_role,
  (select count(*)::integer from pg_catalog.pg_stat_activity as session where session.usesysid = role.oid)
    as used_by_role
from pg_catalog.pg_database as database
cross join pg_catalog.pg_roles as role
where database.datname = current_database() and role.rolname = current_user;

-- name: read_tables
select
  class.relname::text as name,
  coalesce(pg_stat_get_live_tuples(class.oid), 0) as live,
  coalesce(pg_stat_get_dead_tuples(class.oid), 0) as dead,
  extract(epoch from now() - greatest(
    pg_stat_get_last_vacuum_time(class.oid), pg_stat_get_last_autovacuum_time(class.oid)
  ))::float8 as seconds_since_vacuum,
  -- The option may be written in any form of a boolean, so it is cast.
  coalesce((
    select not option.option_value::boolean
    from pg_options_to_table(class.reloptions) as option where option.option_name = 'autovacuum_enabled'
  ), false) as is_left_out
from pg_catalog.pg_class as class
where class.relnamespace = $1::text::regnamespace and class.relkind = 'r'
order by dead desc, name;

-- name: read_upkeep
-- What keeps the jobs table from being cleaned up. The server's own figures: no table is read.
select
  coalesce(pg_stat_get_dead_tuples(($1::text || '._private_jobs')::regclass), 0)::float8 as dead_tuples,
  coalesce((
    select max(age(held.xmin)) from (
      select session.backend_xmin as xmin from pg_catalog.pg_stat_activity as session
      where session.datname = current_database() and session.pid <> pg_backend_pid()
      union all
      select prepared.transaction from pg_catalog.pg_prepared_xacts as prepared
      where prepared.database = current_database()
      union all
      select slot.xmin from pg_catalog.pg_replication_slots as slot
    ) as held
  ), 0)::float8 as oldest_xmin_age,
  pg_notification_queue_usage() as notification_queue_usage,
  clock_timestamp() as now;

-- name: read_vacuum_settings
select
  current_setting('autovacuum')::boolean as autovacuum,
  current_setting('track_counts')::boolean as track_counts;

-- name: read_transactions
-- Transactions that keep vacuum from removing dead rows of this database, the oldest first.
select
  'session ' || session.pid as name, session.usename::text as role, session.application_name as application,
  session.state, extract(epoch from clock_timestamp() - session.xact_start)::float8 as seconds,
  'select pg_terminate_backend(' || session.pid || ')' as remedy
from pg_catalog.pg_stat_activity as session
where session.datname = current_database() and session.pid <> pg_backend_pid()
  and session.xact_start is not null
  and (session.backend_xmin is not null or session.backend_xid is not null)
union all
select 'prepared transaction ' || held.gid, held.owner::text, '', 'prepared',
  extract(epoch from clock_timestamp() - held.prepared)::float8,
  'rollback prepared ' || quote_literal(held.gid)
from pg_catalog.pg_prepared_xacts as held
where held.database = current_database()
order by seconds desc
limit 20;

-- name: count_hidden_sessions
select count(*)::integer from pg_catalog.pg_stat_activity
where datname = current_database() and query = '<insufficient privilege>';

-- name: read_stuck_queues
-- One pass over the jobs. A worker that locks a job with a queue also locks the queue, and releases both in one
-- statement, so a locked queue without a locked job is stuck.
select
  queue.queue_name, queue.locked_by, extract(epoch from now() - queue.locked_at)::float8 as seconds,
  (
    select count(*)::integer from {schema}._private_jobs as job
    where job.job_queue_id = queue.id and job.is_available and job.run_at <= now()
  ) as waiting
from {schema}._private_job_queues as queue
where queue.locked_at is not null and queue.locked_by <> 'python:paused' and not exists (
  select from {schema}._private_jobs as job
  where job.job_queue_id = queue.id and job.locked_at is not null and job.locked_by = queue.locked_by
)
order by waiting desc, queue.locked_at
limit 100;

-- name: read_locks
select
  locked_by, count(*) filter (where is_job)::integer as jobs, count(*) filter (where not is_job)::integer as queues,
  extract(epoch from now() - min(locked_at))::float8 as seconds
from (
  select locked_by, locked_at, true as is_job from {schema}._private_jobs where locked_at is not null
  union all
  select locked_by, locked_at, false from {schema}._private_job_queues
  where locked_at is not null and locked_by <> 'python:paused'
) as locked
group by locked_by
order by seconds desc;
