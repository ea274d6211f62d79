"""Conversion between payloads and the arguments of functions, and what it rejects."""

from __future__ import annotations

import enum
import functools
import importlib
import pathlib
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict, cast
from uuid import UUID, uuid4

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, strategies as some

from graphile_worker import ConfigurationError, InvalidJobError, JobContext, task
from graphile_worker._tasks.binding import Binding, read_function
from graphile_worker._tasks.conversion import MisfitError

CONTEXT = cast("JobContext", object())


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int
    y: int = 0
    next: Point | None = None


@dataclass
class Nested:
    children: list[Nested] = field(default_factory=list)
    file: pathlib.Path | None = None


class Size(TypedDict):
    width: int


class Pair(NamedTuple):
    left: str
    right: int


class Line(msgspec.Struct):
    sku: str
    price: Decimal


class Address(pydantic.BaseModel):
    city: str
    number: int = pydantic.Field(alias="houseNumber")


@pydantic.dataclasses.dataclass
class Checked:
    n: int


class Order(pydantic.BaseModel):
    id: UUID
    lines: list[Line] = []
    to: Address | None = None

    model_config = {"arbitrary_types_allowed": True}


def bind(function: Any, payload: Any, *, context: Any = None) -> Any:
    """Return the arguments with which the function is called."""
    binding = read_function(function, function.__name__, batch=False)
    return binding.arguments(payload, context)


def binding_of(function: Any, *, batch: bool = False) -> Binding:
    return read_function(function, function.__name__, batch=batch)


VALUES: list[tuple[Any, Any]] = [
    (str, "Ann"),
    (int, 2**60),
    (float, 1.5),
    (bool, True),
    (bytes, b"\x00\xff"),
    (type(None), None),
    (Optional[int], None),  # noqa: UP045 - users write it
    (int | str, "x"),
    (int | list[int] | None, [1]),
    (list[int], [1, 2]),
    (dict[str, list[int]], {"a": [1]}),
    (dict[int, str], {1: "a"}),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (set[str], {"a"}),
    (frozenset[int], frozenset({1})),
    (Point, Point(1, 2, Point(3))),
    (list[Point], [Point(1)]),
    (Size, {"width": 1}),
    (Pair, Pair("a", 1)),
    (Colour, Colour.BLUE),
    (Level, Level.LOW),
    (Literal["a", 3], 3),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)),
    (date, date(2026, 1, 2)),
    (time, time(3, 4, 5)),
    (timedelta, timedelta(days=1, seconds=2.5)),
    (UUID, UUID(int=2**100)),
    (Decimal, Decimal("0.10000000000000000001")),
    (Line, Line("a", Decimal("9.90"))),
    (list[Line], [Line("a", Decimal("9.90"))]),
    (Address, Address(city="Ulm", houseNumber=3)),
    (Address | None, None),
    (list[Address], [Address(city="Ulm", houseNumber=3)]),
    (Annotated[int, msgspec.Meta(ge=0)], 3),
    (Any, {"anything": [1, "a", None]}),
    (object, {"anything": [1, "a", None]}),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=lambda part: str(part)[:40])
def test_value_of_each_type_arrives_unchanged(kind: Any, value: Any) -> None:
    def function(value: kind) -> None: ...

    function.__annotations__["value"] = kind
    binding = binding_of(function)
    payload, arguments = binding.payload((value,), {})
    assert binding.arguments(payload, None) == arguments == ((value,), {})


@given(
    some.text(),
    some.integers(-(2**63), 2**64 - 1),
    some.lists(some.dates()),
    some.dictionaries(some.text(), some.floats(allow_nan=False, allow_infinity=False)),
    some.none() | some.uuids(),
)
def test_generated_arguments_arrive_unchanged(
    name: str, n: int, days: list[date], rates: dict[str, float], u: Any
) -> None:
    def function(
        name: str, n: int, *, days: list[date], rates: dict[str, float], u: UUID | None = None
    ) -> None: ...

    binding = binding_of(function)
    try:
        payload, _ = binding.payload((name, n), {"days": days, "rates": rates, "u": u})
    except InvalidJobError:
        assert any("\0" in text for text in (name, *rates))
    else:
        assert binding.arguments(payload, None) == ((name, n), {"days": days, "rates": rates, "u": u})


class TestParameters:
    def test_payload_keys_become_parameters_and_defaults_apply(self) -> None:
        tags: list[str] = ["fresh"]

        def function(name: str, n: int = 3, tags: list[str] = tags) -> None: ...

        (name, n, found), kwargs = bind(function, {"name": "Ann"})
        assert (name, n, kwargs) == ("Ann", 3, {})
        assert found is tags
        assert bind(function, {"tags": [], "n": 4, "name": "Ann"}) == (("Ann", 4, []), {})

    def test_default_need_not_have_the_annotated_type(self) -> None:
        def function(name: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

        assert bind(function, {}) == ((None,), {})

    def test_keyword_only_and_positional_only_parameters_are_bound(self) -> None:
        def function(a: int, /, b: int = 2, *, c: int, d: int = 4) -> None: ...

        assert bind(function, {"a": 1, "c": 3}) == ((1, 2), {"c": 3, "d": 4})
        assert binding_of(function).payload((1,), {"c": 3})[0] == {"a": 1, "c": 3}

    def test_extra_receives_validated_unknown_keys(self) -> None:
        def function(name: str, **extra: int) -> None: ...

        assert bind(function, {"name": "Ann", "x": 1, "y": 2}) == (("Ann",), {"x": 1, "y": 2})
        assert bind(function, {"name": "Ann"}) == (("Ann",), {})
        with pytest.raises(MisfitError, match="x: Expected `int`, got `str`"):
            bind(function, {"name": "Ann", "x": "1"})
        assert binding_of(function).payload(("Ann",), {"x": 1})[0] == {"name": "Ann", "x": 1}

    def test_unknown_keys_are_rejected_except_cron_and_trace(self) -> None:
        def function(name: str) -> None: ...

        with pytest.raises(MisfitError, match=r"^nme: "):
            bind(function, {"name": "Ann", "nme": 1})
        assert bind(function, {"name": "Ann", "_cron": {"ts": "…"}, "_trace": {}}) == (("Ann",), {})

    def test_function_without_parameters_takes_an_empty_payload(self) -> None:
        def function() -> None: ...

        assert bind(function, {}) == ((), {})
        assert bind(function, {"_cron": {"ts": "…"}}) == ((), {})
        wrong: list[Any] = [{"x": 1}, [], None, 3]
        for payload in wrong:
            with pytest.raises(MisfitError):
                bind(function, payload)

    def test_parameter_named_payload_receives_the_whole_payload(self) -> None:
        def typed(payload: Point) -> None: ...
        def untyped(payload): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

        assert bind(typed, {"x": 1, "_trace": {}}) == ((Point(1),), {})
        assert bind(untyped, [1, {"a": None}]) == (([1, {"a": None}],), {})
        assert bind(untyped, {"a": 1, "_cron": {}}) == (({"a": 1},), {})
        assert binding_of(typed).payload((Point(1, 2),), {})[0] == {"x": 1, "y": 2, "next": None}

    def test_parameter_named_payload_may_be_keyword_only_or_have_a_default(self) -> None:
        def keyword(*, payload: Point) -> None: ...
        def default(payload: Point | None = None) -> None: ...

        assert bind(keyword, {"x": 1}) == ((), {"payload": Point(1)})
        assert binding_of(keyword).payload((), {"payload": Point(1)})[0]["x"] == 1
        with pytest.raises(MisfitError, match="payload"):
            binding_of(default).payload((), {})

    def test_name_of_the_context_parameter_is_reserved(self) -> None:
        def function(ctx: JobContext, **extra: int) -> None: ...

        with pytest.raises(MisfitError, match=r"^ctx: "):
            binding_of(function).payload((), {"ctx": 1})
        with pytest.raises(MisfitError, match=r"^ctx: "):
            bind(function, {"ctx": 1}, context=CONTEXT)

    def test_context_is_injected_at_any_position(self) -> None:
        def first(ctx: JobContext, a: int, b: int = 2) -> None: ...
        def middle(a: int, ctx: JobContext, b: int = 2) -> None: ...
        def last(a: int, b: int = 2, context: JobContext | None = None) -> None: ...
        def keyword(a: int, *, b: int = 2, ctx: JobContext) -> None: ...
        def by_name(payload, ctx): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

        assert bind(first, {"a": 1}, context=CONTEXT) == ((CONTEXT, 1, 2), {})
        assert bind(middle, {"a": 1}, context=CONTEXT) == ((1, CONTEXT, 2), {})
        assert bind(last, {"a": 1}, context=CONTEXT) == ((1, 2, CONTEXT), {})
        assert bind(keyword, {"a": 1}, context=CONTEXT) == ((1,), {"b": 2, "ctx": CONTEXT})
        assert bind(by_name, {"a": 1}, context=CONTEXT) == (({"a": 1}, CONTEXT), {})
        assert binding_of(first).payload((1,), {"b": 3})[0] == {"a": 1, "b": 3}

    def test_parameter_named_ctx_of_another_type_is_not_the_context(self) -> None:
        def function(ctx: str) -> None: ...

        assert bind(function, {"ctx": "x"}) == (("x",), {})

    def test_context_imported_only_for_type_checking_is_recognized(self) -> None:
        def function(ctx: Any, name: str) -> None: ...

        function.__annotations__["ctx"] = "graphile_worker.JobContext"
        function.__annotations__["name"] = "str"
        assert bind(function, {"name": "x"}, context=CONTEXT) == ((CONTEXT, "x"), {})

    def test_partials_and_callable_objects_are_bound(self) -> None:
        def function(greeting: str, point: Point) -> None: ...

        class Callable:
            def __call__(self, point: Point) -> None: ...

        partial = functools.partial(function, "Hello")
        assert task("partial")(partial).binding.arguments({"point": {"x": 1}}, None) == ((Point(1),), {})
        assert task("object")(Callable()).binding.arguments({"point": {"x": 1}}, None) == ((Point(1),), {})

    def test_annotations_of_an_imported_function_resolve_in_its_module(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The module that declares the task may have another type of the same name."""
        (tmp_path / "shop_models.py").write_text(
            "from __future__ import annotations\n"
            "from dataclasses import dataclass\n"
            "@dataclass\nclass Point:\n    town: str\n"
            "def ship(to: Point) -> None: ...\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        models = importlib.import_module("shop_models")

        @dataclass
        class Point:
            x: int

        def here(to: Point) -> None: ...

        there = task(models.ship).binding.arguments({"to": {"town": "Ulm"}}, None)
        assert there == ((models.Point("Ulm"),), {})
        assert task(here).binding.arguments({"to": {"x": 1}}, None) == ((Point(1),), {})


class TestInvalidPayloads:
    @pytest.mark.parametrize(
        ("payload", "message"),
        [
            ({"order": 3}, "order: Expected `object`, got `int`"),
            ({"order": {"x": "1"}}, "order.x: Expected `int`, got `str`"),
            (
                {"order": {"x": 1, "next": {"x": 1, "next": {}}}},
                "order.next.next.x: ",
            ),
            ({}, "order: "),
            ([], "Expected `object`, got `array`"),
            (None, "Expected `object`, got `null`"),
        ],
    )
    def test_error_names_the_path(self, payload: Any, message: str) -> None:
        def function(order: Point) -> None: ...

        with pytest.raises(MisfitError) as caught:
            bind(function, payload)
        assert message in str(caught.value)

    def test_error_from_a_pydantic_model_has_the_whole_path(self) -> None:
        def function(orders: list[Order]) -> None: ...

        payload = {"orders": [{"id": str(uuid4()), "to": {"city": "Ulm", "houseNumber": "x"}}]}
        with pytest.raises(MisfitError) as caught:
            bind(function, payload)
        assert caught.value.path == "orders[0].to.houseNumber"

    def test_integers_are_not_converted_from_other_types(self) -> None:
        def function(n: int) -> None: ...

        for value in ("1", 1.5, True, None):
            with pytest.raises(MisfitError, match="n: Expected `int`"):
                bind(function, {"n": value})


class TestRejectedDeclarations:
    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            (pathlib.Path, "JSON cannot carry"),
            (complex, "JSON cannot carry complex"),
            (list[pathlib.Path], "JSON cannot carry"),
            (dict[str, object] | pathlib.Path, "custom type"),
            (str | datetime, "more than one str-like type"),
            (dict[tuple[int, int], str], "keys of a JSON object"),
            (type, "JSON cannot carry type"),
            (list[JobContext], "JSON cannot carry JobContext"),
            (Address | int, "containing a custom type, such as a pydantic model, may not contain"),
            (Address | Order, "more than one custom type, such as a pydantic model"),
            (set[Point], "a set cannot have such items"),
            (frozenset[Address], "a set cannot have such items"),
            (set[dict[str, int]], "a set cannot have such items"),
            (dict[bool, int], "keys of a JSON object"),
            (Checked, "dataclass Checked"),
            (Annotated[str, pydantic.Field(max_length=3)], "FieldInfo"),
            (list[Annotated[str, pydantic.StringConstraints(max_length=3)]], "msgspec.Meta"),
        ],
        ids=str,
    )
    def test_type_that_json_cannot_represent_is_rejected(self, kind: Any, why: str) -> None:
        def send(to: str, attachment: Any) -> None: ...

        send.__annotations__["attachment"] = kind
        with pytest.raises(ConfigurationError) as caught:
            task("mail/send")(send)
        message = str(caught.value)
        assert why in message
        assert "'mail/send'" in message
        assert "test_type_that_json_cannot_represent_is_rejected.<locals>.send" in message
        assert "'attachment'" in message

    def test_unsupported_type_nested_in_a_dataclass_is_rejected(self) -> None:
        def send(payload: list[Nested]) -> None: ...

        with pytest.raises(ConfigurationError, match=r"'payload' of type .*Nested.*JSON cannot carry"):
            task(send)

    def test_unresolvable_annotation_is_rejected(self) -> None:
        def send(to: Unknown) -> None: ...  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(ConfigurationError, match=r"'to'.*'Unknown'.*TYPE_CHECKING"):
            task(send)

    def test_unresolvable_return_annotation_is_ignored(self) -> None:
        def send(to: str) -> Unknown: ...  # type: ignore[name-defined]  # noqa: F821

        assert task(send).spec("Ann").payload == {"to": "Ann"}

    def test_functions_that_no_payload_can_be_bound_to_are_rejected(self) -> None:
        def positions(*names: str) -> None: ...
        def payload_and_more(payload: dict[str, Any], name: str) -> None: ...
        def reserved(_cron: Any) -> None: ...
        def two(a: JobContext, b: JobContext) -> None: ...
        def yields() -> Any:
            yield 1

        class Service:
            def method(self, name: str) -> None: ...

        for function, why in [
            (positions, r"\*names"),
            (payload_and_more, "payload"),
            (reserved, r"ctx\.cron"),
            (two, "two contexts"),
            (yields, "yields"),
            (Service.method, "method"),
            (3, "a function or a class, not 3"),
            (print, r"\*args"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                task("x")(function)  # type: ignore[call-overload]

    def test_batch_task_takes_one_list(self) -> None:
        def none() -> None: ...
        def two(a: list[int], b: list[int]) -> None: ...
        def no_list(items: dict[str, int]) -> None: ...

        functions: list[tuple[Any, str]] = [
            (none, "one list"),
            (two, "one list"),
            (no_list, "must be a list"),
        ]
        for function, why in functions:
            with pytest.raises(ConfigurationError, match=why):
                task(batch=True)(function)
