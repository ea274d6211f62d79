"""Keys of jobs, made out of their arguments: by a template, or by a function."""

from __future__ import annotations

import re
import string
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from graphile_worker.errors import ConfigurationError, InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.binding import Binding

    MakesKey: TypeAlias = Callable[..., str | None]


def read_job_key(given: str | MakesKey | None, binding: Binding, identifier: str) -> MakesKey | None:
    """What makes the key out of the arguments, as the worker will have them.

    Raises:
        ConfigurationError: The template is none, or names what the function does not have.
    """
    if given is None:
        return None
    if callable(given):
        return partial(_call, given, f"The job_key of the task {identifier!r}")
    template, about = given, f"The job_key of the task {identifier!r} is {given!r}"
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


def _call(makes: MakesKey, about: str, /, *args: object, **kwargs: object) -> str | None:
    try:
        return makes(*args, **kwargs)
    except Exception as error:
        raise InvalidJobError(
            f"{about} cannot be made: {type(error).__name__}: {error}.", argument="job_key"
        ) from error
