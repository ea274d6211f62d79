-- How a transaction of ours begins: in one round trip, with a limit on how long it may stand still. A worker that
-- freezes, or is cut off, in the middle of one would otherwise keep its locks until the server notices: for hours.

-- name: begin
begin; set local idle_in_transaction_session_timeout = {milliseconds};

-- name: begin_read_committed
begin isolation level read committed; set local idle_in_transaction_session_timeout = {milliseconds};

-- name: limit_idleness
set local idle_in_transaction_session_timeout = {milliseconds};
