-- Adds jobs in a caller's transaction, in one round trip. If the server refuses a job, the function returns an empty text
-- and nothing has happened: its block is a subtransaction, so the caller's transaction goes on, without a savepoint around
-- the call. The library then repeats the statement within a savepoint, for the error as the caller's driver raises it.
--
-- The statement is add_each_job of caller_jobs.sql. It is in a function so that its plan is kept: to plan it takes longer
-- than to run it.
create or replace function {schema}._private_python_add_v1(specs pg_catalog.text)
returns pg_catalog.text
language plpgsql
set search_path = pg_catalog, pg_temp
as $body$
begin
  return (
{add_each_job}
  );
exception
  -- A cancelled statement would abort the caller's transaction; and repeated, it would ignore the cancellation or the time
  -- limit. So the library raises the error of this text.
  when query_canceled or lock_not_available then
    return '!' {||} sqlstate {||} ' ' {||} sqlerrm;
  -- `others` does not include the second one.
  when others or assert_failure then
    if pg_catalog.left(sqlstate, 2) {=} '40' then
      raise;  -- a serialization failure or a deadlock: only repeating the whole transaction helps
    end if;
    return '';
end
$body$;
