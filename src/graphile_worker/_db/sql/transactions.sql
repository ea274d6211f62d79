-- The library's own transactions begin in one round trip, with limits. Without limits, a worker that freezes or loses
-- its network in the middle of a transaction would keep its locks until the server notices, which can take hours.
--
-- On a caller's connection there is a savepoint around each operation: if the server refuses a statement, the caller's
-- transaction goes on without it. A rolled back savepoint still has to be released, or it would stay until the end of the
-- transaction. These commands are sent as they are, without comments, because some drivers read the first word.

-- name: begin
begin

-- name: begin_read_committed
begin isolation level read committed

-- name: roll_back
rollback

-- name: limit_idleness
set local idle_in_transaction_session_timeout = {milliseconds}

-- name: limit_duration
-- From PostgreSQL 17 on. A worker may also freeze after the driver has prepared a statement and before it executes it.
-- The session then does not count as idle, so no other limit applies.
set local transaction_timeout = {milliseconds}

-- name: commit
commit

-- name: savepoint
savepoint graphile_worker

-- name: release_savepoint
release savepoint graphile_worker

-- name: roll_back_to_savepoint
rollback to savepoint graphile_worker
