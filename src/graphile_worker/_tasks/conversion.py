"""The types that a payload can have, and conversion from plain JSON values to those types.

msgspec supports the types of the standard library and its own structs. This module adds pydantic models, if
the program has imported pydantic.
"""

from __future__ import annotations

import re
import sys
import typing
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect as types

from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_VALIDATION_MESSAGE = re.compile(
    r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL
)
_FIELD_MESSAGE = re.compile(r"Object (?:(?P<missing>missing required)|contains unknown) field `(?P<key>.*)`")
_NOT_KEY_TYPES = (
    *(
        types.BoolType,
        types.ListType,
        types.SetType,
        types.FrozenSetType,
        types.VarTupleType,
        types.TupleType,
        types.DictType,
    ),
    *(types.TypedDictType, types.NamedTupleType, types.DataclassType, types.StructType, types.CustomType),
)


class MisfitError(GraphileWorkerError):
    """A value does not match its type.

    Callers turn it into an error that names the task or the job.

    Attributes:
        path: Where in the value, for example ``items[0].price``.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


def unsupported_reason(kind: Any) -> str | None:
    """Return why a type cannot be read from JSON; None if it can."""
    if (constraint := _pydantic_constraint(kind)) is not None:
        return f"{constraint} only works inside a pydantic model; use msgspec.Meta instead"
    try:
        msgspec.json.Decoder(kind, dec_hook=_from_json)
        found = types.type_info(kind)
    except (TypeError, ValueError) as error:
        # The message starts with a sentence. The rest is the type's repr.
        text = str(error).split(" - type ", 1)[0]
        return text.replace("custom type", "custom type, such as a pydantic model,").rstrip(".,")
    except NameError as error:
        return f"it refers to a type that cannot be found: {error}"
    return next(filter(None, map(_unsupported_part, _parts(found, set()))), None)


def _unsupported_part(part: types.Type) -> str | None:
    """Return why one part of a type cannot be read from JSON; None if it can."""
    if isinstance(part, types.CustomType) and not (part.cls is object or is_model(part.cls)):
        return f"JSON cannot carry {getattr(part.cls, '__name__', part.cls)}"
    if isinstance(part, types.ExtType | types.RawType):
        return f"JSON cannot carry {part.__class__.__name__.removesuffix('Type')}"
    if isinstance(part, types.DictType) and isinstance(part.key_type, _NOT_KEY_TYPES):
        return "the keys of a JSON object are strings"
    if isinstance(part, types.SetType | types.FrozenSetType) and not _is_hashable(part.item_type):
        return "a set cannot have such items"
    if isinstance(part, types.DataclassType) and hasattr(part.cls, "__pydantic_validator__"):
        return (
            f"the pydantic dataclass {part.cls.__name__} would not be validated; "
            "make it a pydantic model or a standard dataclass"
        )
    return None


def _is_hashable(part: types.Type) -> bool:
    if isinstance(part, types.ListType | types.SetType | types.DictType | types.TypedDictType):
        return False
    return getattr(getattr(part, "cls", object), "__hash__", None) is not None


def _pydantic_constraint(kind: Any) -> str | None:
    """Return the name of a pydantic constraint outside a model, which msgspec would silently ignore."""
    for constraint in getattr(kind, "__metadata__", ()):
        if type(constraint).__module__.partition(".")[0] in {"pydantic", "annotated_types"}:
            return type(constraint).__name__
    return next(filter(None, map(_pydantic_constraint, typing.get_args(kind))), None)


def is_structured_type(kind: Any) -> bool:
    """Return whether a type has fields: a dataclass, a msgspec struct or a pydantic model."""
    return (
        is_dataclass(kind) or is_model(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    )


def field_names(kind: Any) -> set[str]:
    """Return the names of the fields of a structured type."""
    if is_dataclass(kind):
        return {field.name for field in fields(kind)}
    return {*getattr(kind, "__struct_fields__", ()), *getattr(kind, "model_fields", ())}


def is_model(kind: object) -> bool:
    """Return whether an object is a pydantic model class. Without pydantic imported, there are none."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


class _ModelError(ValueError):
    """The first validation error from a pydantic model."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def _from_json(kind: Any, value: Any) -> Any:
    if kind is object:
        return value
    if not is_model(kind):
        raise NotImplementedError
    try:
        # From JSON, pydantic accepts more than from Python: a strict model takes a string for a date.
        return kind.model_validate_json(msgspec.json.encode(value))
    except sys.modules["pydantic"].ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise _ModelError(first["msg"], path.lstrip(".")) from None


_ALL_TYPES: dict[str, Any] = {"dec_hook": _from_json, "str_keys": True}
"""Arguments of `msgspec.convert` for types with custom parts or dictionaries."""


def converter(kind: Any) -> Callable[[Any], Any]:
    """Return a function that does what `convert` does, faster, for a type that is converted often."""
    # The extra arguments that these types need cost more than the rest of the conversion.
    slow_parts = (types.CustomType, types.DictType)
    if any(isinstance(part, slow_parts) for part in _parts(types.type_info(kind), set())):
        return partial(convert, kind=kind)
    convert_plain = partial(msgspec.convert, type=kind)

    def convert_fast(value: Any) -> Any:
        try:
            return convert_plain(value)
        except Exception:  # noqa: BLE001 - the second conversion raises the right error
            return convert(value, kind, options={})

    return convert_fast


def convert(value: Any, kind: Any, *, at: str = "", options: Mapping[str, Any] = _ALL_TYPES) -> Any:
    """Convert a plain JSON value to a type.

    Args:
        value: The value.
        kind: The type.
        at: The path of the value in the payload, for the error.
        options: Further arguments of `msgspec.convert`.

    Raises:
        MisfitError: The value does not match the type.
    """
    try:
        return msgspec.convert(value, kind, **options)
    except msgspec.ValidationError as error:
        raise _misfit_error(error, at) from None
    except RecursionError:
        raise MisfitError("it is nested too deeply", at) from None
    except Exception as error:  # raised by the type itself, for example by __post_init__
        raise MisfitError(f"{type(error).__name__}: {error}", at) from error


def _misfit_error(error: msgspec.ValidationError, at: str) -> MisfitError:
    """Turn a msgspec error into a `MisfitError`, with the path first."""
    match = _VALIDATION_MESSAGE.match(str(error))
    assert match is not None  # noqa: S101 - it matches everything
    model_path = error.__cause__.path if isinstance(error.__cause__, _ModelError) else ""
    what, key = match["what"], ""
    if field := _FIELD_MESSAGE.fullmatch(what):
        key, what = field["key"], "it is missing" if field["missing"] else "the task takes no such key"
    steps = (at, (match["path"] or "").lstrip("."), model_path, key)
    path = ".".join(step for step in steps if step).replace(".[", "[")
    return MisfitError(what, f"{path} (a key)".lstrip() if match["key"] else path)


def _parts(found: types.Type, seen: set[int]) -> Iterator[types.Type]:
    """Yield a type and every type it consists of."""
    if id(found) in seen:  # a type may contain itself
        return
    seen.add(id(found))
    yield found
    for name in found.__struct_fields__:
        if name in {"cls", "default", "default_factory"}:
            continue
        value = getattr(found, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, types.Field):
                part = part.type  # noqa: PLW2901
            if isinstance(part, types.Type):
                yield from _parts(part, seen)
