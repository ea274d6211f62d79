"""Job options that are computed from a job's arguments: by a template, or by a function of the arguments.

`job_key` and `queue_name` may be either. `priority`, `run_at` and `flags` may be functions.
"""

from __future__ import annotations

import inspect
import re
import string
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker.errors import ConfigurationError, InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._tasks.binding import Binding

    Compute: TypeAlias = Callable[..., Any]

_TEMPLATES = frozenset({"job_key", "queue_name"})
_FUNCTIONS = frozenset({*_TEMPLATES, "priority", "run_at", "flags"})


def take_computed(options: dict[str, Any]) -> dict[str, object]:
    """Remove the options that are templates or functions, and return them.

    A job key is always a template. A queue name is one if it has braces.
    """
    taken: dict[str, object] = {}
    for name in _FUNCTIONS & options.keys():
        value = options[name]
        has_braces = isinstance(value, str) and ("{" in value or "}" in value)
        if name == "job_key" or callable(value) or (name in _TEMPLATES and has_braces):
            taken[name] = options.pop(name)
    return taken


def read_computed(name: str, given: object, binding: Binding, identifier: str) -> Compute:
    """Return a function that computes an option from a job's arguments, in the form the worker receives them.

    Raises:
        ConfigurationError: The template is invalid or names an unknown parameter, or the function cannot be
            called with the arguments.
    """
    subject = f"The {name} of the task {identifier!r}"
    if callable(given):
        _check_function(given, binding, subject)
        return partial(_compute, given, subject, name)
    template, about = given, f"{subject}, {given!r},"
    if not isinstance(template, str) or not template:
        raise ConfigurationError(
            f"{about} must be a template such as 'user:{{user_id}}', or a function of the arguments."
        )
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigurationError(f"{about} is not a valid template: {error}.") from None
    roots = {re.split(r"[.\[]", name, maxsplit=1)[0] for name in fields}
    if unknown := roots - set(binding.names):
        raise ConfigurationError(
            f"{about} names an unknown parameter {min(unknown)!r}. "
            f"The task's parameters: {', '.join(binding.names) or 'none'}."
        )

    def fill_in(*args: object, **kwargs: object) -> str:
        return template.format(**binding.template_values(binding.bind(args, kwargs)))

    return partial(_compute, fill_in, about, name)


def _check_function(function: Compute, binding: Binding, subject: str) -> None:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigurationError(f"{subject} is an async def. It must be a plain function of the arguments.")
    args, kwargs = binding.example_call
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(
            f"{subject} is a function that cannot be called with the task's arguments: {error}."
        ) from None
    except ValueError:  # some C functions have no signature
        pass


def _compute(function: Compute, about: str, option: str, /, *args: object, **kwargs: object) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise InvalidJobError(
            f"{about} cannot be computed: {type(error).__name__}: {error}.", argument=option
        ) from error
