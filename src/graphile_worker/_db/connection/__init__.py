"""Connections: connection strings, pools, session settings, transactions and errors.

`connect.Pool` opens connections or uses the caller's pool, and `session.Session` runs operations on it.
`error_mapping` turns driver errors into the library's errors, and `retryable` says which to retry. Nothing in
here knows about jobs, except that `pool_usage` names the job that holds a connection.
"""
