"""From a payload to the arguments of a function, and back: what is taken, and what is refused and when."""

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
from hypothesis import given
from hypothesis import strategies as some

from graphile_worker import ConfigurationError, InvalidJobError, JobContext, task
from graphile_worker.binding import Binding, read_function
from graphile_worker.conversion import MisfitError

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
class Deep:
    things: list[Deep] = field(default_factory=list)
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


def bound(function: Any, payload: Any, *, context: Any = None) -> Any:
    """What the function is called with."""
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
    (Optional[int], None),  # noqa: UP045 - people write it
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
def test_a_value_of_each_type_arrives_as_it_was_sent(kind: Any, value: Any) -> None:
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
def test_whatever_is_sent_arrives(
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
    def test_keys_are_parameters_and_defaults_apply(self) -> None:
        tags: list[str] = ["fresh"]

        def function(name: str, n: int = 3, tags: list[str] = tags) -> None: ...

        (name, n, found), kwargs = bound(function, {"name": "Ann"})
        assert (name, n, kwargs) == ("Ann", 3, {})
        assert found is tags
        assert bound(function, {"tags": [], "n": 4, "name": "Ann"}) == (("Ann", 4, []), {})

    def test_a_default_need_not_be_of_the_type(self) -> None:
        def function(name: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

        assert bound(function, {}) == ((None,), {})

    def test_keyword_only_and_positional_only_parameters(self) -> None:
        def function(a: int, /, b: int = 2, *, c: int, d: int = 4) -> None: ...

        assert bound(function, {"a": 1, "c": 3}) == ((1, 2), {"c": 3, "d": 4})
        assert binding_of(function).payload((1,), {"c": 3})[0] == {"a": 1, "c": 3}

    def test_extra_takes_the_rest_and_is_checked(self) -> None:
        def function(name: str, **extra: int) -> None: ...

        assert bound(function, {"name": "Ann", "x": 1, "y": 2}) == (("Ann",), {"x": 1, "y": 2})
        assert bound(function, {"name": "Ann"}) == (("Ann",), {})
        with pytest.raises(MisfitError, match="x: Expected `int`, got `str`"):
            bound(function, {"name": "Ann", "x": "1"})
        assert binding_of(function).payload(("Ann",), {"x": 1})[0] == {"name": "Ann", "x": 1}

    def test_unknown_keys_are_refused_but_for_those_of_cron_and_traces(self) -> None:
        def function(name: str) -> None: ...

        with pytest.raises(MisfitError, match="nme: the task takes no such key"):
            bound(function, {"name": "Ann", "nme": 1})
        assert bound(function, {"name": "Ann", "_cron": {"ts": "…"}, "_trace": {}}) == (("Ann",), {})

    def test_a_function_without_parameters_takes_an_empty_payload(self) -> None:
        def function() -> None: ...

        assert bound(function, {}) == ((), {})
        assert bound(function, {"_cron": {"ts": "…"}}) == ((), {})
        wrong: list[Any] = [{"x": 1}, [], None, 3]
        for payload in wrong:
            with pytest.raises(MisfitError):
                bound(function, payload)

    def test_a_parameter_named_payload_takes_it_whole(self) -> None:
        def typed(payload: Point) -> None: ...
        def untyped(payload): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

        assert bound(typed, {"x": 1, "_trace": {}}) == ((Point(1),), {})
        assert bound(untyped, [1, {"a": None}]) == (([1, {"a": None}],), {})
        assert bound(untyped, {"a": 1, "_cron": {}}) == (({"a": 1},), {})
        assert binding_of(typed).payload((Point(1, 2),), {})[0] == {"x": 1, "y": 2, "next": None}

    def test_also_by_keyword_and_with_a_default(self) -> None:
        def keyword(*, payload: Point) -> None: ...
        def default(payload: Point | None = None) -> None: ...

        assert bound(keyword, {"x": 1}) == ((), {"payload": Point(1)})
        assert binding_of(keyword).payload((), {"payload": Point(1)})[0]["x"] == 1
        with pytest.raises(MisfitError, match="a job cannot have nothing as its payload"):
            binding_of(default).payload((), {})

    def test_the_contexts_name_is_nobody_elses(self) -> None:
        def function(ctx: JobContext, **extra: int) -> None: ...

        with pytest.raises(MisfitError, match="ctx: this key is kept for the worker"):
            binding_of(function).payload((), {"ctx": 1})
        with pytest.raises(MisfitError, match="ctx: the task takes no such key"):
            bound(function, {"ctx": 1}, context=CONTEXT)

    def test_the_context_is_injected_wherever_it_stands(self) -> None:
        def first(ctx: JobContext, a: int, b: int = 2) -> None: ...
        def middle(a: int, ctx: JobContext, b: int = 2) -> None: ...
        def last(a: int, b: int = 2, context: JobContext | None = None) -> None: ...
        def keyword(a: int, *, b: int = 2, ctx: JobContext) -> None: ...
        def by_name(payload, ctx): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

        assert bound(first, {"a": 1}, context=CONTEXT) == ((CONTEXT, 1, 2), {})
        assert bound(middle, {"a": 1}, context=CONTEXT) == ((1, CONTEXT, 2), {})
        assert bound(last, {"a": 1}, context=CONTEXT) == ((1, 2, CONTEXT), {})
        assert bound(keyword, {"a": 1}, context=CONTEXT) == ((1,), {"b": 2, "ctx": CONTEXT})
        assert bound(by_name, {"a": 1}, context=CONTEXT) == (({"a": 1}, CONTEXT), {})
        assert binding_of(first).payload((1,), {"b": 3})[0] == {"a": 1, "b": 3}

    def test_a_parameter_called_ctx_of_another_type_is_none(self) -> None:
        def function(ctx: str) -> None: ...

        assert bound(function, {"ctx": "x"}) == (("x",), {})

    def test_a_context_that_only_type_checkers_can_see_is_known(self) -> None:
        def function(ctx: Any, name: str) -> None: ...

        function.__annotations__["ctx"] = "graphile_worker.JobContext"
        function.__annotations__["name"] = "str"
        assert bound(function, {"name": "x"}, context=CONTEXT) == ((CONTEXT, "x"), {})

    def test_partials_and_objects_that_can_be_called(self) -> None:
        def function(greeting: str, point: Point) -> None: ...

        class Callable:
            def __call__(self, point: Point) -> None: ...

        partial = functools.partial(function, "Hello")
        assert task("partial")(partial).binding.arguments({"point": {"x": 1}}, None) == ((Point(1),), {})
        assert task("object")(Callable()).binding.arguments({"point": {"x": 1}}, None) == ((Point(1),), {})

    def test_a_function_of_another_module_means_what_is_there(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever declares it may have something else by the same name."""
        (tmp_path / "models_of_a_shop.py").write_text(
            "from __future__ import annotations\n"
            "from dataclasses import dataclass\n"
            "@dataclass\nclass Point:\n    town: str\n"
            "def ship(to: Point) -> None: ...\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        models = importlib.import_module("models_of_a_shop")

        @dataclass
        class Point:
            x: int

        def here(to: Point) -> None: ...

        there = task(models.ship).binding.arguments({"to": {"town": "Ulm"}}, None)
        assert there == ((models.Point("Ulm"),), {})
        assert task(here).binding.arguments({"to": {"x": 1}}, None) == ((Point(1),), {})


class TestMisfits:
    @pytest.mark.parametrize(
        ("payload", "says"),
        [
            ({"order": 3}, "order: Expected `object`, got `int`"),
            ({"order": {"x": "1"}}, "order.x: Expected `int`, got `str`"),
            (
                {"order": {"x": 1, "next": {"x": 1, "next": {}}}},
                "order.next.next.x: it is missing",
            ),
            ({}, "order: it is missing"),
            ([], "Expected `object`, got `array`"),
            (None, "Expected `object`, got `null`"),
        ],
    )
    def test_the_error_names_the_place(self, payload: Any, says: str) -> None:
        def function(order: Point) -> None: ...

        with pytest.raises(MisfitError) as caught:
            bound(function, payload)
        assert says in str(caught.value)

    def test_what_a_model_of_pydantics_refuses_has_its_whole_path(self) -> None:
        def function(orders: list[Order]) -> None: ...

        payload = {"orders": [{"id": str(uuid4()), "to": {"city": "Ulm", "houseNumber": "x"}}]}
        with pytest.raises(MisfitError) as caught:
            bound(function, payload)
        assert caught.value.path == "orders[0].to.houseNumber"

    def test_a_number_is_no_text_and_a_text_no_number(self) -> None:
        def function(n: int) -> None: ...

        for value in ("1", 1.5, True, None):
            with pytest.raises(MisfitError, match="n: Expected `int`"):
                bound(function, {"n": value})


class TestRefusedAtImport:
    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            (pathlib.Path, "JSON cannot carry"),
            (complex, "JSON cannot carry complex"),
            (list[pathlib.Path], "JSON cannot carry"),
            (dict[str, object] | pathlib.Path, "custom type"),
            (str | datetime, "more than one str-like type"),
            (dict[tuple[int, int], str], "the keys of a JSON object are texts"),
            (type, "JSON cannot carry type"),
            (list[JobContext], "JSON cannot carry JobContext"),
            (Address | int, "containing a custom type, such as a model of pydantic's, may not contain"),
            (Address | Order, "more than one custom type, such as a model of pydantic's."),
            (set[Point], "a set cannot have such items"),
            (frozenset[Address], "a set cannot have such items"),
            (set[dict[str, int]], "a set cannot have such items"),
            (dict[bool, int], "the keys of a JSON object are texts"),
            (Checked, "nobody would check Checked"),
            (Annotated[str, pydantic.Field(max_length=3)], "FieldInfo is not heeded here; msgspec.Meta is"),
            (list[Annotated[str, pydantic.StringConstraints(max_length=3)]], "msgspec.Meta is"),
        ],
        ids=str,
    )
    def test_a_type_that_json_cannot_carry(self, kind: Any, why: str) -> None:
        def send(to: str, attachment: Any) -> None: ...

        send.__annotations__["attachment"] = kind
        with pytest.raises(ConfigurationError) as caught:
            task("mail/send")(send)
        message = str(caught.value)
        assert why in message
        assert "'mail/send'" in message
        assert "test_a_type_that_json_cannot_carry.<locals>.send" in message
        assert "'attachment'" in message

    def test_one_deep_inside_of_a_dataclass(self) -> None:
        def send(payload: list[Deep]) -> None: ...

        with pytest.raises(ConfigurationError, match=r"'payload' of type .*Deep.*JSON cannot carry"):
            task(send)

    def test_an_annotation_that_cannot_be_read(self) -> None:
        def send(to: Unknown) -> None: ...  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(
            ConfigurationError, match=r"'to' whose annotation 'Unknown' cannot be read.*TYPE_CHECKING"
        ):
            task(send)

    def test_the_type_of_what_is_returned_does_not_matter(self) -> None:
        def send(to: str) -> Unknown: ...  # type: ignore[name-defined]  # noqa: F821

        assert task(send).spec("Ann").payload == {"to": "Ann"}

    def test_what_a_payload_cannot_be_bound_to(self) -> None:
        def positions(*names: str) -> None: ...
        def beside(payload: dict[str, Any], name: str) -> None: ...
        def reserved(_cron: Any) -> None: ...
        def two(a: JobContext, b: JobContext) -> None: ...
        def yields() -> Any:
            yield 1

        class Service:
            def method(self, name: str) -> None: ...

        for function, why in [
            (positions, r"takes \*names"),
            (beside, "more parameters beside payload"),
            (reserved, r"it is at ctx\.cron"),
            (two, "takes two contexts"),
            (yields, "yields"),
            (Service.method, "is a method"),
            (3, "is for functions and classes"),
            (print, r"takes \*args"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                task("x")(function)  # type: ignore[call-overload]

    def test_a_batch_takes_one_list(self) -> None:
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
