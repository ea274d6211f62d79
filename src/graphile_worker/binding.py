"""Between a payload and the arguments of a task's function.

A parameter named ``payload`` takes the payload whole; otherwise its keys are the parameters' names. The
context is neither.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.conversion import MisfitError, convert, converter, field_names, is_known, why_not_json
from graphile_worker.errors import ConfigurationError
from graphile_worker.parameters import read_parameters, type_name
from graphile_worker.payload import RESERVED_KEYS, as_decoded, without_reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker.context import JobContext
    from graphile_worker.parameters import Field, Parameters

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_in_order = msgspec.structs.astuple
_SIMPLE = (str, int, float, bool, type(None))


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
                _by_name(field.parameter)
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
        written = as_decoded(self._write(self.bound(args, kwargs)))
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

    @property
    def example(self) -> Arguments:
        """A call as a worker makes it, without values in it."""
        raise NotImplementedError

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

    @property
    def example(self) -> Arguments:
        """By position where that is possible."""
        return (None,) * self._by_position, dict.fromkeys(self._keywords)

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

    @property
    def example(self) -> Arguments:
        """The payload."""
        return self.passing(None)

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


class Instance(Whole):
    """The payload is an instance of a class, whose method is called."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        self._attributes = sorted(field_names(parameters.fields[0].kind))

    @property
    def names(self) -> list[str]:
        """Of the instance, and of what it has."""
        return [*super().names, *self._attributes]

    def named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """The same, by these names."""
        [instance] = bound.arguments.values()
        return {name: getattr(instance, name) for name in self._attributes} | super().named(bound)


class Items(Whole):
    """One parameter takes a list, and each of its items is something to be done by itself."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        kind = parameters.fields[0].kind
        self.item = next(iter(typing.get_args(kind)), Any)
        """The type of an item."""
        self._make = tuple if _sequence_of(kind) is tuple else list

    @property
    def example(self) -> Arguments:
        """No items."""
        return self.passing(())

    def passing(self, value: Any) -> Arguments:
        """The items as the function takes them."""
        return super().passing(self._make(value))

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
    parameters = read_parameters(function, about)
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
    parameters = read_parameters(run, about, owner=kind)
    if len(parameters.fields) != 1 or parameters.extra:
        raise ConfigurationError(f"{about} has a method run that takes something else than (self, ctx).")
    return Instance(run, parameters)


def _sequence_of(kind: Any) -> Any:
    """What its items are in; None if it is no sequence of any length."""
    origin, of = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple and of and of[1:] != (...,):
        return None
    return origin if origin in {list, tuple, Sequence, Any} else None


def _check_batch(parameters: Parameters, about: str) -> None:
    if len(parameters.fields) != 1 or parameters.extra:
        raise ConfigurationError(f"{about} is for batches, and must take one list beside the context.")
    kind = parameters.fields[0].kind
    if _sequence_of(kind) is None:
        raise ConfigurationError(
            f"{about} is for batches: its parameter {parameters.fields[0].parameter.name!r} must be a list, "
            f"such as list[str], not {type_name(kind)}."
        )


def _by_name(parameter: inspect.Parameter) -> inspect.Parameter:
    """In a payload each has its name, also one that the function takes by position alone."""
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD)
    return parameter


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
