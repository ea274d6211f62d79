"""Plain functions as tasks, called with the payload and, if they take two arguments, the job's context."""

from __future__ import annotations

import inspect

from graphile_worker._base.logs import library_logger as logger
from graphile_worker.errors import ConfigurationError

_PAYLOAD_AND_CONTEXT = 2
_SCALAR_TYPES = {"str", "int", "float", "bool"}


def takes_job_context(identifier: str, function: object) -> bool:
    """Return whether a plain function takes the job's context after the payload.

    Raises:
        ConfigurationError: The function cannot be called with a payload and a context.
    """
    if not callable(function):
        hint = " Pass the function itself, without calling it." if inspect.isawaitable(function) else ""
        raise ConfigurationError(f"Invalid task {identifier!r}: {function!r} is not callable.{hint}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"The task {identifier!r} is a generator function: calling it would not run its body. "
            "Remove yield."
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some C functions have no signature
        return False
    by_position = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [
        p
        for p in parameters
        if p.default is p.empty
        if p.kind is p.KEYWORD_ONLY or p in by_position[_PAYLOAD_AND_CONTEXT:]
    ]
    if required or not (by_position or takes_any):
        raise ConfigurationError(
            f"The task {identifier!r} cannot be called with a payload and a context: its parameters are "
            f"{inspect.signature(function)}. It must take (payload) or (payload, ctx)."
        )
    _warn_about_keys(identifier, by_position[:_PAYLOAD_AND_CONTEXT])
    return takes_any or len(by_position) >= _PAYLOAD_AND_CONTEXT


def _warn_about_keys(identifier: str, parameters: list[inspect.Parameter]) -> None:
    """Warn about a missing ``@task``: the job might succeed with a dictionary where it expects a string."""
    for parameter in parameters:
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        if isinstance(annotation, str) and annotation in _SCALAR_TYPES and parameter.name != "payload":
            logger.warning(
                "The task %r is a plain function, so its parameter %r receives the whole payload. To "
                "receive the payload's keys as parameters, decorate the function with @task from "
                "graphile_worker. If the payload is not an object, name the parameter payload",
                identifier,
                parameter.name,
            )
            return
