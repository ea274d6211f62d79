-- Creating and dropping databases, for tests.

-- name: create_database
create database {database} template {template};

-- name: create_database_by_files
create database {database} template {template} strategy file_copy;

-- name: drop_database
drop database {database};

-- name: list_sessions
select pid, application_name, state, pg_catalog.left(query, 200) as query
from pg_catalog.pg_stat_activity
where datname {=} $1 and backend_type {=} 'client backend';

-- name: end_sessions
select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity where datname {=} $1;
