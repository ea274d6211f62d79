-- What user code may leave in a session.

-- name: roll_back
rollback;

-- name: reset
-- First the role: another one may not be allowed the rest. RESET ALL leaves the role and the authorization as they are.
set session authorization default;
reset role;
select pg_advisory_unlock_all();
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
  session_user, current_setting('role') as role,
  exists (select from pg_catalog.pg_class where relnamespace = pg_my_temp_schema()) as has_temporary;
