-- How statements are wrapped for a SQL_ASCII database. They may run on a caller's connection.

-- name: as_bytes
pg_catalog.convert_to({column}, 'SQL_ASCII')

-- name: wrapped
with found ({names}) as materialized (
{statement}
)
select {columns} from found;

-- name: is_utf8
-- Whether the database has every character. The parameter is ignored.
select (pg_catalog.current_setting('server_encoding') {=} 'UTF8')::pg_catalog.text
where cast({parameter} as pg_catalog.text) is not null;
