"""Reads a function's parameters once, when its task is declared. Rejects types that JSON cannot hold."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._base.payload import RESERVED_KEYS
from graphile_worker._tasks.conversion import unsupported_reason
from graphile_worker.context import JobContext
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE = __name__.partition(".")[0]
_WRAPPER_TYPES = (typing.Union, types.UnionType, typing.Annotated)


class Field(NamedTuple):
    """A parameter that is read from the payload."""

    parameter: inspect.Parameter
    kind: Any


class Parameters(NamedTuple):
    """The parameters of a function."""

    fields: list[Field]
    extra: Field | None
    """``**extra``, which receives all other keys of the payload."""
    context: inspect.Parameter | None
    context_index: int
    """The position of the context among the positional arguments."""


def read_parameters(
    function: Callable[..., Any], about: str, *, owner: type[Any] | None = None
) -> Parameters:
    """Read and check the parameters of a function.

    Args:
        function: The function.
        about: The subject of error messages.
        owner: The class, if the function is its ``run`` method.

    Raises:
        ConfigurationError: A payload cannot provide the parameters.
    """
    fields: list[Field] = []
    extra = context = None
    context_index = 0
    for position, parameter in enumerate(_signature(function, about).parameters.values()):
        kind = owner if owner and position == 0 else _annotation(function, parameter, about)
        if owner is None and position == 0 and parameter.name in {"self", "cls"}:
            raise ConfigurationError(
                f"{about} is a method, and the worker has no object to call it on. Make it a function, or "
                "put @task on a class with an identifier and a method run."
            )
        if _is_context(parameter, kind):
            if context is not None:
                raise ConfigurationError(f"{about} takes two contexts. Remove one.")
            context, context_index = parameter, len(fields)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigurationError(
                f"{about} takes *{parameter.name}, but a payload only has named values. Take a list instead: "
                f"{parameter.name}: list."
            )
        else:
            _check_field(parameter, kind, about)
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = Field(parameter, kind)
            else:
                fields.append(Field(parameter, kind))
    return Parameters(fields, extra, context, context_index)


def _signature(function: Callable[..., Any], about: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some C functions have no signature
        raise ConfigurationError(f"{about} has no readable signature. Wrap it in a function.") from None


def _check_field(parameter: inspect.Parameter, kind: Any, about: str) -> None:
    if parameter.name in RESERVED_KEYS:
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r}, but the worker removes that key from the payload. "
            f"Use ctx.{parameter.name.lstrip('_')} instead."
        )
    if (reason := unsupported_reason(kind)) is not None:
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r} of type {type_name(kind)}, which a payload "
            f"cannot hold: {reason}."
        )


def _is_context(parameter: inspect.Parameter, kind: Any) -> bool:
    members = typing.get_args(kind) if typing.get_origin(kind) in _WRAPPER_TYPES else ()
    for part in (kind, *members):
        if part is JobContext or typing.get_origin(part) is JobContext:
            return True
    # An unannotated parameter is the context if it has the usual name.
    return parameter.name == "ctx" and parameter.annotation is parameter.empty


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter, about: str) -> Any:
    """Return the type of a parameter; `Any` without an annotation."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    try:
        return _resolve(function, parameter.name, annotation)
    except UnresolvedTypeError as error:
        # Linters move imports that only annotations use into `if TYPE_CHECKING:`.
        name = annotation.partition("[")[0].rpartition(".")[2] if isinstance(annotation, str) else ""
        if name == JobContext.__name__:
            return JobContext
        raise ConfigurationError(
            f"{about} has a parameter {parameter.name!r} whose annotation {annotation!r} cannot be resolved: "
            f"{error}. The type is needed at run time: import it outside `if TYPE_CHECKING:`, above the task."
        ) from None


class UnresolvedTypeError(Exception):
    """An annotation refers to a name that does not exist at run time."""


def _resolve(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Return the type that an annotation of a function stands for."""
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    function = _unwrap(function)
    try:
        return typing.get_type_hints(
            holder, getattr(function, "__globals__", {}), _enclosing_locals(function), include_extras=True
        )[name]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise UnresolvedTypeError(str(error)) from None


def read_return_type(function: Callable[..., Any]) -> Any:
    """Return the type of a function's result; `Any` without an annotation.

    Raises:
        UnresolvedTypeError: The annotation refers to a name that does not exist at run time.
    """
    annotations = getattr(_unwrap(function), "__annotations__", {})
    if "return" not in annotations:
        return Any
    kind = _resolve(function, "return", annotations["return"])
    if typing.get_origin(kind) in {Awaitable, Coroutine}:
        return typing.get_args(kind)[-1]  # a function without async that returns a coroutine
    return kind


def _unwrap(function: Any) -> Any:
    """Return the function in the source code, without partials and decorators."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):  # a callable object
        function = inspect.unwrap(type(function).__call__)
    return function


def _enclosing_locals(function: Any) -> dict[str, Any]:
    """Return the local names around a function that is declared inside another, for its annotations.

    A caller that declares a function from another module may use the same names for other types. So its
    local names do not count.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    if frame is None or frame.f_globals is not getattr(function, "__globals__", None):
        return {}
    is_inside = function.__qualname__.startswith(f"{frame.f_code.co_qualname}.")
    return dict(frame.f_locals) if is_inside else {}


def type_name(kind: Any) -> str:
    """Return a type as it is written in source code."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
