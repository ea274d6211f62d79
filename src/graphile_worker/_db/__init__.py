"""The database: the only package that contains SQL or uses a database driver.

`connection` opens connections and maps errors, `queries` has a typed function for each statement, `schema`
installs and inspects the schema, and `sql` holds all SQL text. The client, the worker, recovery and the
doctor call `queries`. Nothing in here knows about tasks, slots or the worker's loop.
"""
