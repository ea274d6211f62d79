-- Reading and changing the state of an installation. The catalog is read first, so that a missing schema causes no
-- error in the server's log. Names are qualified: the statements may run on a caller's connection, whose search_path
-- is set only for the change itself.

-- name: inspect_schema
select
  pg_catalog.current_setting('server_version_num')::integer as server_version_num,
  pg_catalog.current_setting('server_version') as server_version,
  namespace.oid is not null as schema_exists,
  case
    when pg_catalog.pg_get_userbyid(namespace.nspowner) {<>} current_user
      and pg_catalog.pg_has_role(namespace.nspowner, 'member')
      then pg_catalog.pg_get_userbyid(namespace.nspowner)
  end as owner_to_act_as,
  coalesce((
    select pg_catalog.array_agg(attribute.attname {||} ' ' {||} pg_catalog.format_type(attribute.atttypid, null))
    from pg_catalog.pg_attribute as attribute
    where attribute.attrelid {=} ledger.oid and attribute.attnum {>} 0 and not attribute.attisdropped
  ), '{}') as ledger_columns,
  exists (
    select from pg_catalog.pg_class as other
    where other.relnamespace {=} namespace.oid and other.relname {<>} all (array['migrations', 'migrations_pkey'])
  ) as holds_other_relations,
  own_ledger.oid is not null as own_ledger_exists,
  workers.oid is not null as workers_exist,
  -- Recognized by the same marker as in prepare_bulk.
  exists (
    select from pg_catalog.pg_proc as function
    where function.pronamespace {=} namespace.oid and function.proname {=} 'add_jobs'
      and pg_catalog.strpos(function.prosrc, 'returned in the order of the specs') {>} 0
  ) as has_own_functions
from (select $1::pg_catalog.name as schema_name) as wanted
left join pg_catalog.pg_namespace as namespace on namespace.nspname {=} wanted.schema_name
left join pg_catalog.pg_class as ledger
  on ledger.relnamespace {=} namespace.oid and ledger.relname {=} 'migrations'
left join pg_catalog.pg_class as own_ledger
  on own_ledger.relnamespace {=} namespace.oid and own_ledger.relname {=} '_private_python_migrations'
left join pg_catalog.pg_class as workers
  on workers.relnamespace {=} namespace.oid and workers.relname {=} '_private_workers';

-- name: read_revisions
select pg_catalog.max(id) as revision, pg_catalog.max(id) filter (where breaking) as breaking_revision,
  coalesce(pg_catalog.bool_or(breaking) filter (where id {=} 19), true) as marks_19_breaking
from {schema}.migrations;

-- name: read_revision_before_breaking_flags
select pg_catalog.max(id) as revision from {schema}.migrations;

-- name: read_own_revisions
select
  coalesce(pg_catalog.max(id), 0) as revision,
  coalesce(pg_catalog.max(id) filter (where breaking), 0) as breaking_revision
from {schema}._private_python_migrations;

-- name: lock_installers
-- Held to the end of the transaction, so that Python installers of one schema run one after the other.
select pg_catalog.pg_advisory_xact_lock(
  pg_catalog.hashtextextended('graphile_worker install ' {||} $1::pg_catalog.text, 0)
);

-- name: wait_for_ledger
-- Conflicts with the insert that begins each npm migration, so none of them runs while this lock is held.
lock table {schema}.migrations in share mode;

-- name: read_session
select pg_catalog.current_setting('role') as role, pg_catalog.current_setting('search_path') as search_path;

-- name: restore_session
select pg_catalog.set_config('role', $1, true), pg_catalog.set_config('search_path', $2, true);

-- name: set_search_path
-- Installed objects must not refer to functions or operators that another role created elsewhere.
set local search_path = pg_catalog, pg_temp;

-- name: act_as
set local role {owner};

-- name: create_schema
create schema {schema};

-- name: create_ledger
create table {schema}.migrations (
  id integer constraint migrations_id_not_null not null
    constraint migrations_pkey primary key,
  ts timestamptz default pg_catalog.now() constraint migrations_ts_not_null not null,
  breaking boolean default false constraint migrations_breaking_not_null not null
);

-- name: add_breaking_flag
alter table {schema}.migrations add column breaking boolean not null default false;

-- name: record_all_revisions
insert into {schema}.migrations (id, breaking)
  select revision, revision {=} any (array[1, 3, 11, 13, 14, 16, 19])
  from pg_catalog.generate_series(1, 20) as revision;

-- name: record_revision_20
insert into {schema}.migrations (id, breaking) values (20, false);

-- name: mark_revision_19
update {schema}.migrations set breaking = true where id {=} 19;

-- name: announce_revision_20
select pg_catalog.pg_notify('worker:migrate', '{"migrationNumber":20,"breaking":false}');

-- name: create_own_ledger
create table {schema}._private_python_migrations (
  id integer primary key,
  name text not null,
  breaking boolean not null default false,
  applied_at timestamptz not null default pg_catalog.now()
);

-- name: record_own_revision
insert into {schema}._private_python_migrations (id, name) values ({id}, '{name}');

-- name: inspect_index
select
  index.indisvalid as is_valid,
  exists (
    select from pg_catalog.pg_stat_progress_create_index as progress
    where progress.index_relid {=} index.indexrelid
  ) as is_being_built
from pg_catalog.pg_index as index
join pg_catalog.pg_class as class on class.oid {=} index.indexrelid
join pg_catalog.pg_namespace as namespace on namespace.oid {=} class.relnamespace
where namespace.nspname {=} $1 and class.relname {=} $2;

-- name: inspect_indexes
select class.relname as name, index.indisvalid as is_valid
from pg_catalog.pg_index as index
join pg_catalog.pg_class as class on class.oid {=} index.indexrelid
join pg_catalog.pg_namespace as namespace on namespace.oid {=} class.relnamespace
where namespace.nspname {=} $1;

-- name: drop_index
drop index concurrently if exists {schema}.{name};
