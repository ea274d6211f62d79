"""Helpers without I/O that every other package may use: durations, log records, messages and payloads.

It also holds the background thread, lazy imports of public names, and calls of user functions. Nothing in
here knows the database or the worker. Of the rest of the library it imports only `errors`.
"""
