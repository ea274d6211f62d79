"""Between a payload and the arguments of a task's function.

Read once, when the task is declared: what the function takes, and whether JSON can carry it. A parameter
named ``payload`` takes the payload whole; otherwise its keys are the parameters' names. The context is
neither.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from graphile_worker.context import JobContext
from graphile_worker.conversion import MisfitError, convert, converter, field_names, is_known, why_not_json
from graphile_worker.errors import ConfigurationError
from graphile_worker.payload import RESERVED_KEYS, decode_payload, encode_payload, without_reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_in_order = msgspec.structs.astuple
_SIMPLE = (str, int, float, bool, type(None))
_PACKAGE = __name__.rpartition(".")[0]


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


class Binding:
    """How one function is called.

    Args:
        function: The function.
        parameters: What it takes.
    """

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        self.function = function
        self._parameters = parameters
        context = parameters.context
        self.takes_context = context is not None
        self._context_keyword = context.name if context and context.kind is context.KEYWORD_ONLY else None
        self._signature = inspect.Signature(
            [
                field.parameter
                for field in [*parameters.fields, *([parameters.extra] if parameters.extra else [])]
            ]
        )

    def arguments(self, payload: Any, context: JobContext | None) -> Arguments:
        """What to call the function with; raises `MisfitError` if the payload does not fit."""
        args, kwargs = self._read(without_reserved(payload))
        if context is not None:
            args, kwargs = self.with_context(args, kwargs, context)
        return args, kwargs

    def with_context(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: JobContext) -> Arguments:
        """The arguments, which were just made, with the context where the function has it."""
        if self._context_keyword is not None:
            kwargs[self._context_keyword] = context
            return args, kwargs
        place = self._parameters.place
        return (*args[:place], context, *args[place:]) if place else (context, *args), kwargs

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Arguments]:
        """The payload for a call, as JSON's own values, and the arguments that the worker makes of it.

        Raises:
            TypeError: The function cannot be called like that.
            MisfitError: An argument is not of its type.
            InvalidJobError: An argument cannot be written as JSON.
        """
        written = decode_payload(encode_payload(self._write(self.bound(args, kwargs))))
        return written, self._read(without_reserved(written))

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments by the names of their parameters."""
        if self._parameters.extra is None:
            for name in kwargs.keys() - self._signature.parameters.keys():
                near = difflib.get_close_matches(name, self.names, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise TypeError(f"it has no parameter {name!r}{hint}")
        return self._signature.bind(*args, **kwargs)

    def named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """The same, with defaults, and with what else there is."""
        bound.apply_defaults()
        extra = self._parameters.extra
        found = dict(bound.arguments)
        return found if extra is None else {**found, **found.pop(extra.parameter.name)}

    def call_for(self, payload: Any) -> Arguments:
        """The arguments of a call that would make this payload."""
        if not isinstance(payload, typing.Mapping):
            raise MisfitError("it must be a mapping of the function's parameters", "")
        return (), dict(payload)

    def takes(self, name: str) -> bool:
        """Whether an argument may be called that."""
        return self._parameters.extra is not None or name in self._signature.parameters

    @property
    def names(self) -> list[str]:
        """Of the parameters that come out of the payload."""
        return list(self._signature.parameters)

    def _read(self, payload: Any) -> Arguments:
        raise NotImplementedError

    def _write(self, bound: inspect.BoundArguments) -> Any:
        raise NotImplementedError


class ByKeys(Binding):
    """The keys of the payload are parameters."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        fields = parameters.fields
        self._by_position = sum(field.parameter.kind is not field.parameter.KEYWORD_ONLY for field in fields)
        self._keywords = [field.parameter.name for field in fields[self._by_position :]]
        self._struct = msgspec.defstruct(
            "Payload",
            [_struct_field(field) for field in fields],
            kw_only=True,  # as then those with and without defaults may come in any order
            forbid_unknown_fields=True,
            gc=False,
        )
        self._convert = converter(self._struct)
        self._fields = frozenset(self._struct.__struct_fields__)
        context = parameters.context
        self._reserved = RESERVED_KEYS | ({context.name} if context is not None else set())

    def _read(self, payload: Any) -> Arguments:
        rest = None
        if self._parameters.extra is not None and isinstance(payload, dict):
            rest = {key: value for key, value in payload.items() if key not in self._fields}
            for key in self._reserved & rest.keys():
                raise MisfitError("the task takes no such key", key)
            payload = {key: value for key, value in payload.items() if key in self._fields}
        values = _in_order(self._convert(payload))
        if not self._keywords and rest is None:
            return values, {}
        kwargs = dict(zip(self._keywords, values[self._by_position :], strict=True))
        if rest is not None and self._parameters.extra is not None:
            for key, value in rest.items():
                kwargs[key] = convert(value, self._parameters.extra.kind, at=key)
        return values[: self._by_position], kwargs

    def _write(self, bound: inspect.BoundArguments) -> Any:
        given = dict(bound.arguments)  # only what was passed: the worker knows the defaults
        if self._parameters.extra is not None:
            given |= given.pop(self._parameters.extra.parameter.name, {})
        for key in self._reserved & given.keys():
            raise MisfitError("this key is kept for the worker", key)
        return given


class Whole(Binding):
    """One parameter takes the payload as it is."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        self._convert = converter(parameters.fields[0].kind)

    def _read(self, payload: Any) -> Arguments:
        return self.passing(self._convert(payload))

    def passing(self, value: Any) -> Arguments:
        """The value as the function takes it."""
        parameter = self._parameters.fields[0].parameter
        return ((), {parameter.name: value}) if parameter.kind is parameter.KEYWORD_ONLY else ((value,), {})

    def _write(self, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        [value] = bound.arguments.values()
        if value is None:
            raise MisfitError("a job cannot have nothing as its payload: None stands for {} there", "")
        return value

    def call_for(self, payload: Any) -> Arguments:
        """The payload is the one argument."""
        return (payload,), {}


class Items(Whole):
    """One parameter takes a list, and each of its items is something to be done by itself."""

    @property
    def item(self) -> Any:
        """The type of an item."""
        kinds = typing.get_args(self._parameters.fields[0].kind)
        return kinds[0] if kinds else Any

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Arguments]:
        """The items as JSON's own values; there must be one."""
        written, arguments = super().payload(args, kwargs)
        if not written:
            raise MisfitError("a batch needs at least one item", "")
        return written, arguments


def read_function(function: Callable[..., Any], identifier: str, *, batch: bool) -> Binding:
    """How that function is to be called; refuses what cannot be called with a payload."""
    about = f"The task {identifier!r}, which is {_shown(function)},"
    if not callable(function):
        raise ConfigurationError(f"@task is for functions and classes, not for {function!r}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{about} yields, so calling it would run nothing of it.")
    parameters = _read_parameters(function, about)
    if batch:
        _check_batch(parameters, about)
        return Items(function, parameters)
    if any(field.parameter.name == "payload" for field in parameters.fields):
        if len(parameters.fields) > 1 or parameters.extra:
            raise ConfigurationError(
                f"{about} has more parameters beside payload, which takes the payload whole: one of them "
                "may be a JobContext, and others there cannot be."
            )
        return Whole(function, parameters)
    return ByKeys(function, parameters)


def read_class(kind: type[Any], identifier: str) -> Binding:
    """The same for a class whose instances are payloads: its method ``run`` is called."""
    about = f"The task {identifier!r}, which is the class {kind.__qualname__},"
    if why_not_json(kind) is not None and not is_known(kind):
        raise ConfigurationError(
            f"{about} is neither a dataclass, nor a Struct of msgspec's, nor a model of pydantic's. Make it "
            "one; @dataclass stands below @app.task."
        )
    if "identifier" in field_names(kind):
        raise ConfigurationError(
            f"{about} has its identifier as a field, so it would be part of each payload. Make it a "
            "ClassVar[str]."
        )
    run = inspect.getattr_static(kind, "run", None)
    if not inspect.isfunction(run):
        raise ConfigurationError(f"{about} has no method run(self, ctx).")
    parameters = _read_parameters(run, about, owner=kind)
    if len(parameters.fields) != 1 or parameters.extra:
        raise ConfigurationError(f"{about} has a method run that takes something else than (self, ctx).")
    return Whole(run, parameters)


def _check_batch(parameters: Parameters, about: str) -> None:
    sequences = (list, typing.Sequence, tuple, typing.Any)
    if len(parameters.fields) != 1 or parameters.extra:
        raise ConfigurationError(f"{about} is for batches, and must take one list beside the context.")
    kind = parameters.fields[0].kind
    if kind not in sequences and typing.get_origin(kind) not in {
        list,
        typing.get_origin(typing.Sequence[Any]),
    }:
        raise ConfigurationError(
            f"{about} is for batches: its parameter {parameters.fields[0].parameter.name!r} must be a list, "
            f"such as list[str], not {_type_name(kind)}."
        )


def _read_parameters(
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
            f"{about} has a parameter {parameter.name!r} of type {_type_name(kind)}, which a payload "
            f"cannot have: {why}."
        )


def _is_context(parameter: inspect.Parameter, kind: Any) -> bool:
    for part in (kind, *typing.get_args(kind)):  # it may be optional
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
    names = _globals_of(function)
    try:
        return typing.get_type_hints(holder, names, _locals_of_caller(), include_extras=True)[parameter.name]
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


def _globals_of(function: Any) -> dict[str, Any]:
    """Names of the module that the function was written in."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):  # an object that can be called
        function = inspect.unwrap(type(function).__call__)
    return getattr(function, "__globals__", {})


def _locals_of_caller() -> dict[str, Any]:
    """Names of the function in which the task is declared, if it is in one: annotations may be about them."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _struct_field(field: Field) -> tuple[str, Any] | tuple[str, Any, Any]:
    name, default = field.parameter.name, field.parameter.default
    if default is field.parameter.empty:
        return name, field.kind
    if type(default) in _SIMPLE:
        return name, field.kind, default
    # The very object that the function itself would take.
    return name, field.kind, msgspec.field(default_factory=lambda: default)


def _shown(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{getattr(function, '__module__', '?')}.{name}"


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
