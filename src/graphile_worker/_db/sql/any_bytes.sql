-- What is said in a SQL_ASCII database in place of a statement.

-- name: as_bytes
convert_to({column}, 'SQL_ASCII')

-- name: wrapped
with found ({names}) as materialized (
{statement}
)
select {columns} from found;
