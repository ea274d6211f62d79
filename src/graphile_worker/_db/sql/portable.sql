-- Installing the schema on a connection of another library, or as a script for a database whose state is not known.
-- {tag} and {inner} are tags that quote; {statements} is a script, as one statement for any driver.

-- name: save_session
-- The rest of the caller's transaction must not run with the role and the search_path of the installation.
select
  pg_catalog.set_config('graphile_worker.role', pg_catalog.current_setting('role'), true),
  pg_catalog.set_config('graphile_worker.search_path', pg_catalog.current_setting('search_path'), true);

-- name: restore_saved_session
select
  pg_catalog.set_config('role', pg_catalog.current_setting('graphile_worker.role'), true),
  pg_catalog.set_config('search_path', pg_catalog.current_setting('graphile_worker.search_path'), true);

-- name: run_script
do {tag} begin
execute {inner}
{statements}
{inner};
end {tag};

-- name: run_script_if
do {tag} begin
if {condition} then
execute {inner}
{statements}
{inner};
end if;
end {tag};

-- name: refuse_other_revisions
-- A script cannot find out what an upgrade needs; graphile-worker migrate can.
do {tag} begin
if pg_catalog.to_regclass({ledger}) is not null then
  if (select pg_catalog.max(id) is distinct from 20 from {schema}.migrations) then
    raise exception 'The schema % is not at revision 20 of Graphile Worker. Upgrade it with: graphile-worker migrate',
      {name};
  end if;
end if;
end {tag};

-- name: schema_is_missing
pg_catalog.to_regnamespace({quoted_name}) is null;

-- name: ledger_is_missing
pg_catalog.to_regclass({ledger}) is null;

-- name: own_ledger_is_missing
pg_catalog.to_regclass({own_ledger}) is null;

-- name: workers_are_missing
pg_catalog.to_regclass({workers}) is null;

-- name: own_revision_is_missing
coalesce((select pg_catalog.max(id) from {schema}._private_python_migrations), 0) {<} {id};

-- name: drop_schema
drop schema if exists {schema} cascade;
