-- Resetting a session after user code has used it. It has the user's search_path, so every name is qualified.

-- name: roll_back
rollback;

-- name: reset
-- The role comes first, because another role may lack the privileges for the rest. RESET ALL does not reset the role
-- and the session authorization.
set session authorization default;
reset role;
select pg_catalog.pg_advisory_unlock_all();
close all;
unlisten *;
discard temp;
discard sequences;
reset all;

-- name: reset_identity
set session authorization default;
reset role;
discard temp;
discard sequences;

-- name: read_identity
-- Also reports temporary tables, which the next user of the session would see.
select
  session_user, pg_catalog.current_setting('role') as role,
  exists (select from pg_catalog.pg_class where relnamespace {=} pg_catalog.pg_my_temp_schema()) as has_temporary;
