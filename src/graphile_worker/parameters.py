"""What a function takes, read once, when its task is declared; refuses what a payload cannot have."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.context import JobContext
from graphile_worker.conversion import why_not_json
from graphile_worker.errors import ConfigurationError
from graphile_worker.payload import RESERVED_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE = __name__.rpartition(".")[0]
_ONE_OF_ITS_ARGUMENTS = (typing.Union, types.UnionType, typing.Annotated)


class Field(NamedTuple):
    """A parameter that comes out of the payload."""

    parameter: inspect.Parameter
    kind: Any


class Parameters(NamedTuple):
    """What a function takes."""

    fields: list[Field]
    extra: Field | None
    """``**extra``: what else is in the payload."""
    context: inspect.Parameter | None
    place: int
    """The context's, among those that are passed by position."""


def read_parameters(
    function: Callable[..., Any], about: str, *, owner: type[Any] | None = None
) -> Parameters:
    fields: list[Field] = []
    extra = context = None
    place = 0
    for position, parameter in enumerate(_signature(function, about).parameters.values()):
        kind = owner if owner and position == 0 else _annotation(function, parameter, about)
        if owner is None and position == 0 and parameter.name in {"self", "cls"}:
            raise ConfigurationError(
                f"{about} is a method, and nobody would know of which object. Make it a function, or give "
                "@task a whole class with an identifier and a method run."
            )
        if _is_context(parameter, kind):
            if context is not None:
                raise ConfigurationError(f"{about} takes two contexts.")
            context, place = parameter, len(fields)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigurationError(
                f"{about} takes *{parameter.name}, but what a payload has, has names. Take a list by a name."
            )
        else:
            _check_field(parameter, kind, about)
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = Field(parameter, kind)
            else:
                fields.append(Field(parameter, kind))
    return Parameters(fields, extra, context, place)


def _signature(function: Callable[..., Any], about: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        raise ConfigurationError(
            f"{about} does not tell its parameters. Write a function around it."
        ) from None


def _check_field(parameter: inspect.Parameter, kind: Any, about: str) -> None:
    if parameter.name in RESERVED_KEYS:
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r}, which is taken out of the payload: it is at "
            f"ctx.{parameter.name.lstrip('_')}."
        )
    if (why := why_not_json(kind)) is not None:
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r} of type {type_name(kind)}, which a payload "
            f"cannot have: {why}."
        )


def _is_context(parameter: inspect.Parameter, kind: Any) -> bool:
    may_be = typing.get_args(kind) if typing.get_origin(kind) in _ONE_OF_ITS_ARGUMENTS else ()
    for part in (kind, *may_be):
        if part is JobContext or typing.get_origin(part) is JobContext:
            return True
    # Without an annotation it is known by its usual name.
    return parameter.name == "ctx" and parameter.annotation is parameter.empty


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter, about: str) -> Any:
    """The type of a parameter; without an annotation it may be anything."""
    written = parameter.annotation
    if written is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={parameter.name: written})
    function = _written(function)
    try:
        return typing.get_type_hints(
            holder, getattr(function, "__globals__", {}), _locals_around(function), include_extras=True
        )[parameter.name]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        # Linters move imports that only annotations need to where only type checkers see them.
        name = written.partition("[")[0].rpartition(".")[2] if isinstance(written, str) else ""
        if name == JobContext.__name__:
            return JobContext
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r} whose annotation {written!r} cannot be read: "
            f"{error}. It is needed when the program runs: import it outside of `if TYPE_CHECKING:`, and "
            "before the task."
        ) from None


def _written(function: Any) -> Any:
    """The function as it stands in somebody's code, whatever was put around it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):  # an object that can be called
        function = inspect.unwrap(type(function).__call__)
    return function


def _locals_around(function: Any) -> dict[str, Any]:
    """Names of the function in which that one is written, if it is declared there: it may be about them.

    Whoever declares a function of another module may have other things by the same names.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    if frame is None or frame.f_globals is not getattr(function, "__globals__", None):
        return {}
    is_inside = function.__qualname__.startswith(f"{frame.f_code.co_qualname}.")
    return dict(frame.f_locals) if is_inside else {}


def type_name(kind: Any) -> str:
    """As people write it."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
