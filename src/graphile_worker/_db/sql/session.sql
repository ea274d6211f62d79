-- The settings of the library's own sessions, whatever the defaults of the server, the database or the role are.
--
-- search_path: with any other value, a function or operator that another role created in `public` may fit a call better
-- than the one in pg_catalog, and would run with the worker's privileges. The default timeouts are meant for
-- interactive statements; the library's statements set a timeout where they need one.

-- name: set_for_session
-- Behind a pooler it sets nothing and returns no row, because the pooler shares its sessions with other clients. The
-- backend's pid then differs from the one that the connection was given. Every name is qualified, because the
-- search_path is not set yet.
select
  pg_catalog.set_config('statement_timeout', '0', false),
  pg_catalog.set_config('lock_timeout', '0', false),
  pg_catalog.set_config('idle_in_transaction_session_timeout', '0', false),
  pg_catalog.set_config('default_transaction_read_only', 'off', false),
  pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
  pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)
where pg_catalog.pg_backend_pid() operator(pg_catalog.=) {pid};

-- name: set_for_transaction
set local statement_timeout = 0;
set local lock_timeout = 0;
set local idle_in_transaction_session_timeout = 0;
set local search_path = pg_catalog, pg_temp;

-- name: set_for_writing
-- A replica rejects the last statement.
{set_for_transaction};
set transaction read write;
