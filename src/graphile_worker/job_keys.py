"""Keys of jobs, made out of their arguments: by a template, or by a function."""

from __future__ import annotations

import re
import string
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
    if given is None or callable(given):
        return given
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
        named = binding.named(binding.bound(args, kwargs))
        try:
            return template.format(**named)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise InvalidJobError(
                f"{about}, and cannot be made: {type(error).__name__}: {error}.", argument="job_key"
            ) from error

    return make
