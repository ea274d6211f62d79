-- What our own sessions set, whatever the server, the database or the role has as its default.
--
-- search_path: with any other a function or operator that another role made in `public` may fit a call better than the
-- one in pg_catalog, and would run with the worker's rights. The timeouts are for people's statements: each of our own
-- that must not take long says so itself.

-- name: set_for_session
-- Nothing is set, and no row comes back, behind a pooler: its sessions belong to others too. The process is then
-- not the one that was named when we connected. Every name is qualified, because the path is not set yet.
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
-- A replica refuses the last line.
{set_for_transaction};
set transaction read write;
