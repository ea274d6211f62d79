-- The rows of a statement as one text, for a caller's connection: any driver can run it.

-- name: rows
-- The statement has no parameters, and this one ignores its own.
select coalesce(pg_catalog.json_agg(pg_catalog.row_to_json(found)), '[]')::pg_catalog.text
from ({statement}) as found
where cast({parameter} as pg_catalog.text) is not null;
