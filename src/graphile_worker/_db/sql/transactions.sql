-- How our transactions begin: in one round trip, with limits. A worker that freezes, or is cut off, in the
-- middle of one would otherwise keep its locks until the server notices: for hours.

-- name: begin
begin

-- name: begin_read_committed
begin isolation level read committed

-- name: roll_back
rollback

-- name: limit_idleness
set local idle_in_transaction_session_timeout = {milliseconds}

-- name: limit_duration
-- From PostgreSQL 17 on. A worker may also freeze after the driver has prepared a statement, and before it executes
-- it. Then the server is in the middle of a statement, not idle, and no other limit counts.
set local transaction_timeout = {milliseconds}
