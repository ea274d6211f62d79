"""Recognize errors from the user's own functions, which triggers on the library's tables run.

These errors look like errors from the library's statements. If a trigger does not find a table, for example,
it looks as if the schema were not installed. The context of a server error names the functions that were
running.
"""

from __future__ import annotations

import re

import asyncpg

from graphile_worker._db.schema.contract import function_names

_NAME = r'(?:[a-z_][a-z0-9_$]*|"(?:[^"\n]|"")+")'
# The server translates these messages, except for the names.
_RUNNING = re.compile(
    rf'PL/pgSQL[^"\n(]*?(?P<signature>(?:{_NAME}\.)?(?P<called>{_NAME})\([^)\n]*\))'
    r'|(?:SQL|PL/\w+) function "(?P<name>[^"\n]+)"'
)
_NOT_FOUND = frozenset({"3F000", "42704", "42883", "42P01"})
_NO_RIGHTS = "42501"


def running_function(context: str | None) -> str | None:
    """Return the innermost user function that was running, from the context of an error.

    >>> running_function('PL/pgSQL function public.audit() line 3 at SQL statement')
    'public.audit()'
    """
    for found in _RUNNING.finditer(context or ""):
        name = found["name"] or found["called"].strip('"')
        if name not in function_names():
            return found["name"] or found["signature"]
    return None


def function_that_raised(error: BaseException | None) -> str | None:
    """Return the user's function that raised the error; None if no user function did.

    An error that ends the session, such as a shutdown, never counts, whatever was running.
    """
    if not isinstance(error, asyncpg.PostgresError) or error.severity_en in {"FATAL", "PANIC"}:
        return None
    return running_function(error.context)


def explain(message: str, sqlstate: str | None, function: str | None) -> str:
    """Add the user function to the server's message, and what to do, if that is not obvious."""
    if function is None:
        return message
    if sqlstate in _NOT_FOUND:
        signature = function if function.endswith(")") else f"{function}(...)"
        return (
            f"{message}, in the function {function}. Triggers run with the search_path of graphile-worker, "
            f"pg_catalog: qualify the names in the function, or run `alter function {signature} set "
            "search_path = ...`"
        )
    return f"{message}, in the function {function}" if sqlstate == _NO_RIGHTS else message
