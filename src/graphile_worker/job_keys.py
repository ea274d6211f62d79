"""Keys of jobs, made out of their arguments: by a template, or by a function."""

from __future__ import annotations

import inspect
import re
import string
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from graphile_worker.errors import ConfigurationError, InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.binding import Binding

    MakesKey: TypeAlias = Callable[..., str | None]


def read_job_key(given: object, binding: Binding, identifier: str) -> MakesKey | None:
    """What makes the key out of the arguments, as the worker will have them.

    Raises:
        ConfigurationError: It cannot make one: the template is none, or names what the function does not
            have; or the function for it cannot be called with the arguments.
    """
    if given is None:
        return None
    whose = f"The job_key of the task {identifier!r}"
    if callable(given):
        _check_function(given, binding, whose)
        return partial(_call, given, whose)
    template, about = given, f"{whose} is {given!r}"
    if not isinstance(template, str) or not template:
        raise ConfigurationError(
            f"{about}. It must be a template such as 'user:{{user_id}}', or a function of the arguments."
        )
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigurationError(f"{about}: {error}.") from None
    roots = {re.split(r"[.\[]", name, maxsplit=1)[0] for name in fields}
    if unknown := roots - set(binding.names):
        raise ConfigurationError(
            f"{about}, but it has no parameter {min(unknown)!r}. "
            f"It has: {', '.join(binding.names) or 'none'}."
        )

    def make(*args: object, **kwargs: object) -> str:
        return template.format(**binding.named(binding.bound(args, kwargs)))

    return partial(_call, make, f"{about}, and")


def _check_function(makes: MakesKey, binding: Binding, whose: str) -> None:
    if inspect.iscoroutinefunction(makes) or inspect.iscoroutinefunction(type(makes).__call__):
        raise ConfigurationError(f"{whose} is an async def. It must be a plain function of the arguments.")
    args, kwargs = binding.example
    try:
        inspect.signature(makes).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(
            f"{whose} is a function that cannot be called as the task is: {error}."
        ) from None
    except ValueError:  # some written in C do not tell
        pass


def _call(makes: MakesKey, about: str, /, *args: object, **kwargs: object) -> str | None:
    try:
        return makes(*args, **kwargs)
    except Exception as error:
        raise InvalidJobError(
            f"{about} cannot be made: {type(error).__name__}: {error}.", argument="job_key"
        ) from error
