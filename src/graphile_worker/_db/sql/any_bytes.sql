-- What a SQL_ASCII database gets instead of a statement. It may run on a caller's connection.

-- name: as_bytes
pg_catalog.convert_to({column}, 'SQL_ASCII')

-- name: wrapped
with found ({names}) as materialized (
{statement}
)
select {columns} from found;
