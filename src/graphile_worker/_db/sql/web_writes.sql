-- What the dashboard changes, on a connection of its own.

-- name: limits
-- A viewer waits, and a lock that another transaction holds must not hold up other viewers.
set local statement_timeout = {milliseconds};
set local lock_timeout = {lock_milliseconds};
