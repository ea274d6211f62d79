"""Conversion between a job's payload and the arguments of its task's function.

A parameter named ``payload`` receives the whole payload. Otherwise each key of the payload is the name of a
parameter. The job's context is passed separately and never comes from the payload.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker._base.payload import RESERVED_KEYS, as_decoded, without_reserved
from graphile_worker._tasks.conversion import (
    MisfitError,
    convert,
    converter,
    field_names,
    is_structured_type,
    unsupported_reason,
)
from graphile_worker._tasks.parameters import read_parameters, type_name
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker._tasks.parameters import Field, Parameters
    from graphile_worker.context import JobContext

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_IMMUTABLE_TYPES = (str, int, float, bool, type(None))


class Binding:
    """Mapping between payloads and calls of one function.

    Args:
        function: The function.
        parameters: The function's parameters.
    """

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        self.function = function
        self._parameters = parameters
        context = parameters.context
        self.takes_context = context is not None
        self._context_keyword = context.name if context and context.kind is context.KEYWORD_ONLY else None
        self._signature = inspect.Signature(
            [
                _allow_keyword(field.parameter)
                for field in [*parameters.fields, *([parameters.extra] if parameters.extra else [])]
            ]
        )

    def arguments(self, payload: Any, context: JobContext | None) -> Arguments:
        """Convert a payload to arguments for the function.

        Raises:
            MisfitError: The payload does not match the function's parameters.
        """
        args, kwargs = self._read(without_reserved(payload))
        if context is not None:
            args, kwargs = self.with_context(args, kwargs, context)
        return args, kwargs

    def with_context(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: JobContext) -> Arguments:
        """Insert the context where the function takes it. May modify `kwargs`."""
        if self._context_keyword is not None:
            kwargs[self._context_keyword] = context
            return args, kwargs
        index = self._parameters.context_index
        return (*args[:index], context, *args[index:]) if index else (context, *args), kwargs

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Arguments]:
        """Return a call's payload as plain JSON values, and the arguments that the worker reads from it.

        Raises:
            TypeError: The arguments do not match the function's signature.
            MisfitError: An argument has the wrong type.
            InvalidJobError: An argument cannot be encoded as JSON.
        """
        encoded = as_decoded(self._write(self.bind(args, kwargs)))
        return encoded, self._read(without_reserved(encoded))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Match the arguments of a call to the function's parameters."""
        if self._parameters.extra is None:
            for name in kwargs.keys() - self._signature.parameters.keys():
                near = difflib.get_close_matches(name, self.names, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise TypeError(f"it has no parameter {name!r}{hint}")
        return self._signature.bind(*args, **kwargs)

    def template_values(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the values by name, including defaults and extra keyword arguments."""
        bound.apply_defaults()
        extra = self._parameters.extra
        values = dict(bound.arguments)
        return values if extra is None else {**values, **values.pop(extra.parameter.name)}

    def call_for(self, payload: Any) -> Arguments:
        """Return the arguments of a call that would produce this payload."""
        if not isinstance(payload, typing.Mapping):
            raise MisfitError("it must be a mapping of the function's parameters", "")
        return (), dict(payload)

    @property
    def example_call(self) -> Arguments:
        """Placeholder arguments in the shape in which a worker passes them."""
        raise NotImplementedError

    def takes(self, name: str) -> bool:
        """Return whether the function accepts an argument with this name."""
        return self._parameters.extra is not None or name in self._signature.parameters

    @property
    def names(self) -> list[str]:
        """Names of the parameters that are read from the payload."""
        return list(self._signature.parameters)

    def _read(self, payload: Any) -> Arguments:
        raise NotImplementedError

    def _write(self, bound: inspect.BoundArguments) -> Any:
        raise NotImplementedError


class KeywordBinding(Binding):
    """Binding for a function whose parameters are the keys of the payload."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        fields = parameters.fields
        self._by_position = sum(field.parameter.kind is not field.parameter.KEYWORD_ONLY for field in fields)
        self._keywords = [field.parameter.name for field in fields[self._by_position :]]
        self._struct = msgspec.defstruct(
            "Payload",
            [_struct_field(field) for field in fields],
            kw_only=True,  # so that fields with and without defaults may come in any order
            forbid_unknown_fields=True,
            gc=False,
        )
        self._convert = converter(self._struct)
        self._fields = frozenset(self._struct.__struct_fields__)
        context = parameters.context
        self._reserved = RESERVED_KEYS | ({context.name} if context is not None else set())

    @property
    def example_call(self) -> Arguments:
        """Placeholder arguments, positional where possible."""
        return (None,) * self._by_position, dict.fromkeys(self._keywords)

    def _read(self, payload: Any) -> Arguments:
        rest = None
        if self._parameters.extra is not None and isinstance(payload, dict):
            rest = {key: value for key, value in payload.items() if key not in self._fields}
            for key in self._reserved & rest.keys():
                raise MisfitError("the task takes no such key", key)
            payload = {key: value for key, value in payload.items() if key in self._fields}
        values = msgspec.structs.astuple(self._convert(payload))
        if not self._keywords and rest is None:
            return values, {}
        kwargs = dict(zip(self._keywords, values[self._by_position :], strict=True))
        if rest is not None and self._parameters.extra is not None:
            for key, value in rest.items():
                kwargs[key] = convert(value, self._parameters.extra.kind, at=key)
        return values[: self._by_position], kwargs

    def _write(self, bound: inspect.BoundArguments) -> Any:
        given = dict(bound.arguments)  # no defaults: the worker applies them when it runs the job
        if self._parameters.extra is not None:
            given |= given.pop(self._parameters.extra.parameter.name, {})
        for key in self._reserved & given.keys():
            raise MisfitError("this key is reserved for the worker", key)
        return given


class PayloadBinding(Binding):
    """Binding for a function with one parameter that receives the whole payload."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        self._convert = converter(parameters.fields[0].kind)

    @property
    def example_call(self) -> Arguments:
        """A placeholder for the payload."""
        return self.arguments_for(None)

    def _read(self, payload: Any) -> Arguments:
        return self.arguments_for(self._convert(payload))

    def arguments_for(self, value: Any) -> Arguments:
        """Return the arguments that pass this value to the function."""
        parameter = self._parameters.fields[0].parameter
        return ((), {parameter.name: value}) if parameter.kind is parameter.KEYWORD_ONLY else ((value,), {})

    def _write(self, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        [value] = bound.arguments.values()
        if value is None:
            raise MisfitError("the payload cannot be None, because a job without a payload has {}", "")
        return value

    def call_for(self, payload: Any) -> Arguments:
        """Return the payload as the only argument."""
        return (payload,), {}


class InstanceBinding(PayloadBinding):
    """Binding for a class: the payload becomes an instance, and its ``run`` method is called."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        self._attributes = sorted(field_names(parameters.fields[0].kind))

    @property
    def names(self) -> list[str]:
        """Names of ``self`` and of the instance's fields."""
        return [*super().names, *self._attributes]

    def template_values(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the instance and the values of its fields, by name."""
        [instance] = bound.arguments.values()
        return {name: getattr(instance, name) for name in self._attributes} | super().template_values(bound)


class BatchBinding(PayloadBinding):
    """Binding for a batch task: one parameter receives a list whose items succeed or fail individually."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters) -> None:
        super().__init__(function, parameters)
        kind = parameters.fields[0].kind
        self.item = next(iter(typing.get_args(kind)), Any)
        """The type of an item."""
        self._make_sequence = tuple if _sequence_type(kind) is tuple else list

    @property
    def example_call(self) -> Arguments:
        """An empty batch."""
        return self.arguments_for(())

    def arguments_for(self, value: Any) -> Arguments:
        """Return the arguments that pass these items to the function."""
        return super().arguments_for(self._make_sequence(value))

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Arguments]:
        """Return the items as plain JSON values. A batch needs at least one item."""
        encoded, arguments = super().payload(args, kwargs)
        if not encoded:
            raise MisfitError("a batch needs at least one item", "")
        return encoded, arguments


def read_function(function: Callable[..., Any], identifier: str, *, batch: bool) -> Binding:
    """Create the binding of a function.

    Raises:
        ConfigurationError: The function cannot be called with a payload.
    """
    about = f"The task {identifier!r} ({_qualified_name(function)})"
    if not callable(function):
        raise ConfigurationError(f"@task takes a function or a class, not {function!r}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{about} is a generator function: calling it would not run its body. Remove yield."
        )
    parameters = read_parameters(function, about)
    if batch:
        _check_batch(parameters, about)
        return BatchBinding(function, parameters)
    if any(field.parameter.name == "payload" for field in parameters.fields):
        if len(parameters.fields) > 1 or parameters.extra:
            raise ConfigurationError(
                f"{about} has other parameters besides payload, which receives the whole payload. The only "
                "other parameter can be a JobContext."
            )
        return PayloadBinding(function, parameters)
    return KeywordBinding(function, parameters)


def read_class(kind: type[Any], identifier: str) -> Binding:
    """Create the binding of a class whose instances are payloads.

    Raises:
        ConfigurationError: The class cannot be a task.
    """
    about = f"The task {identifier!r} (class {kind.__qualname__})"
    if unsupported_reason(kind) is not None and not is_structured_type(kind):
        raise ConfigurationError(
            f"{about} must be a dataclass, a msgspec Struct or a pydantic model. Put @dataclass below "
            "@app.task."
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
        raise ConfigurationError(
            f"{about} has a method run with other parameters. It must take (self) or (self, ctx)."
        )
    return InstanceBinding(run, parameters)


def _sequence_type(kind: Any) -> Any:
    """Return the sequence type without its item type; None unless it allows any number of items."""
    origin, items = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple and items and items[1:] != (...,):
        return None
    return origin if origin in {list, tuple, Sequence, Any} else None


def _check_batch(parameters: Parameters, about: str) -> None:
    if len(parameters.fields) != 1 or parameters.extra:
        raise ConfigurationError(
            f"{about} is a batch task. It must take one list, and optionally the context."
        )
    kind = parameters.fields[0].kind
    if _sequence_type(kind) is None:
        raise ConfigurationError(
            f"{about} is a batch task. Its parameter {parameters.fields[0].parameter.name!r} must be a "
            f"list, such as list[str], not {type_name(kind)}."
        )


def _allow_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    """Let a positional-only parameter be passed by name, because payload keys are names."""
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD)
    return parameter


def _struct_field(field: Field) -> tuple[str, Any] | tuple[str, Any, Any]:
    name, default = field.parameter.name, field.parameter.default
    if default is field.parameter.empty:
        return name, field.kind
    if type(default) in _IMMUTABLE_TYPES:
        return name, field.kind, default
    # Pass the same object as Python would, not a copy.
    return name, field.kind, msgspec.field(default_factory=lambda: default)


def _qualified_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{getattr(function, '__module__', '?')}.{name}"
