-- What user code may leave in a session. It has the user's search_path, so every name is qualified.

-- name: roll_back
rollback;

-- name: reset
-- First the role: another one may not be allowed the rest. RESET ALL leaves the role and the authorization as they are.
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
-- Also temporary tables, which another session's code would see.
select
  session_user, pg_catalog.current_setting('role') as role,
  exists (select from pg_catalog.pg_class where relnamespace {=} pg_catalog.pg_my_temp_schema()) as has_temporary;
