"""Types that JSON can carry: which those are, and from JSON's own values to theirs.

msgspec knows the types of the standard library and its own; pydantic's models are added where pydantic is in
use.
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

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_ABOUT_A_KEY = re.compile(r"Object (?:(?P<missing>missing required)|contains unknown) field `(?P<key>.*)`")
_NO_KEYS = (
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
    """A value is not of its type; `path` is where, in the value. Whoever asked for it says more."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


def why_not_json(kind: Any) -> str | None:
    """Why values of that type cannot be had from JSON, if they cannot."""
    if (foreign := _foreign_rule(kind)) is not None:
        return f"{foreign} is not heeded here; msgspec.Meta is"
    try:
        msgspec.json.Decoder(kind, dec_hook=_from_json)
        found = types.type_info(kind)
    except (TypeError, ValueError) as error:
        # It begins with the sentence; what stands behind shows the type.
        text = str(error).split(" - type ", 1)[0]
        return text.replace("custom type", "custom type, such as a model of pydantic's,").rstrip(".,")
    except NameError as error:
        return f"it refers to a type that cannot be found: {error}"
    return next(filter(None, map(_why_not, _parts(found, set()))), None)


def _why_not(part: types.Type) -> str | None:
    """The same for one part of a type."""
    if isinstance(part, types.CustomType) and not (part.cls is object or is_model(part.cls)):
        return f"JSON cannot carry {getattr(part.cls, '__name__', part.cls)}"
    if isinstance(part, types.ExtType | types.RawType):
        return f"JSON cannot carry {part.__class__.__name__.removesuffix('Type')}"
    if isinstance(part, types.DictType) and isinstance(part.key_type, _NO_KEYS):
        return "the keys of a JSON object are texts"
    if isinstance(part, types.SetType | types.FrozenSetType) and not _is_hashable(part.item_type):
        return "a set cannot have such items"
    if isinstance(part, types.DataclassType) and hasattr(part.cls, "__pydantic_validator__"):
        return f"nobody would check {part.cls.__name__}; make it a model of pydantic's, or a plain dataclass"
    return None


def _is_hashable(part: types.Type) -> bool:
    if isinstance(part, types.ListType | types.SetType | types.DictType | types.TypedDictType):
        return False
    return getattr(getattr(part, "cls", object), "__hash__", None) is not None


def _foreign_rule(kind: Any) -> str | None:
    """A constraint of pydantic's on something that is no model: nobody would check it."""
    for rule in getattr(kind, "__metadata__", ()):
        if type(rule).__module__.partition(".")[0] in {"pydantic", "annotated_types"}:
            return type(rule).__name__
    return next(filter(None, map(_foreign_rule, typing.get_args(kind))), None)


def is_known(kind: Any) -> bool:
    """Whether it is a type whose parts can be looked at: a dataclass, a struct or a model."""
    return (
        is_dataclass(kind) or is_model(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    )


def field_names(kind: Any) -> set[str]:
    """What such a type has."""
    if is_dataclass(kind):
        return {field.name for field in fields(kind)}
    return {*getattr(kind, "__struct_fields__", ()), *getattr(kind, "model_fields", ())}


def is_model(kind: object) -> bool:
    """Whether it is a model of pydantic's. Nobody has one who has not imported pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


class _ModelError(ValueError):
    """What a model of pydantic's has against a value."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def _from_json(kind: Any, value: Any) -> Any:
    if kind is object:
        return value
    if not is_model(kind):
        raise NotImplementedError
    try:
        # As JSON, for of strings and such pydantic accepts more there than from Python.
        return kind.model_validate_json(msgspec.json.encode(value))
    except sys.modules["pydantic"].ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise _ModelError(first["msg"], path.lstrip(".")) from None


_WITH_HELP: dict[str, Any] = {"dec_hook": _from_json, "str_keys": True}


def converter(kind: Any) -> Callable[[Any], Any]:
    """What `convert` does, for a type that is used again and again."""
    needs_help = (types.CustomType, types.DictType)  # which costs more than all the rest
    if any(isinstance(part, needs_help) for part in _parts(types.type_info(kind), set())):
        return partial(convert, kind=kind)
    plainly = partial(msgspec.convert, type=kind)

    def quickly(value: Any) -> Any:
        try:
            return plainly(value)
        except Exception:  # noqa: BLE001 - of whatever kind: that will tell
            return convert(value, kind, how={})

    return quickly


def convert(value: Any, kind: Any, *, at: str = "", how: Mapping[str, Any] = _WITH_HELP) -> Any:
    """JSON's value as one of that type; raises `MisfitError`, whose path begins where the value is."""
    try:
        return msgspec.convert(value, kind, **how)
    except msgspec.ValidationError as error:
        raise misfit(error, at) from None
    except RecursionError:
        raise MisfitError("it is nested too deeply", at) from None
    except Exception as error:  # of the type's own making, as from __post_init__
        raise MisfitError(f"{type(error).__name__}: {error}", at) from error


def misfit(error: msgspec.ValidationError, at: str) -> MisfitError:
    """What msgspec says, with the place in front."""
    match = _PLACE.match(str(error))
    assert match is not None  # noqa: S101 - it matches everything
    deeper = error.__cause__.path if isinstance(error.__cause__, _ModelError) else ""
    what, key = match["what"], ""
    if about := _ABOUT_A_KEY.fullmatch(what):
        key, what = about["key"], "it is missing" if about["missing"] else "the task takes no such key"
    steps = (at, (match["path"] or "").lstrip("."), deeper, key)
    path = ".".join(step for step in steps if step).replace(".[", "[")
    return MisfitError(what, f"{path} (a key)".lstrip() if match["key"] else path)


def _parts(found: types.Type, seen: set[int]) -> Iterator[types.Type]:
    """The type and all that it consists of."""
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
