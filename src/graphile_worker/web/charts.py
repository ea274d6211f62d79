"""Charts as SVG that the server draws: attributes only, because the page's policy allows no inline style.

A chart has no text inside, so that text keeps its size when the drawing is stretched: the template puts the
scale and the times beside it. Each step has a ``<title>``, which browsers show as a tooltip, and the template
adds the same numbers as a table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

WIDTH = 600
HEIGHT = 150
_MIN_BAR = 1.5


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One row of numbers of a chart: a value for each step; None where nothing is known."""

    name: str
    values: Sequence[float | None]
    colour: str = "blue"
    """``blue`` or ``orange`` for bars, and ``line`` or ``line second`` for lines."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A drawing, and what stands beside it."""

    svg: Markup
    top: float
    """The number at the top of the scale."""
    times: Sequence[datetime]
    lines: Sequence[Line]
    format: Callable[[float], str]
    """Turns a value into text."""
    is_empty: bool

    def rows(self) -> list[tuple[datetime, list[str]]]:
        """Return the table of the same numbers, the latest first, without steps of which nothing is known."""
        found = []
        for index, at in enumerate(self.times):
            values = [line.values[index] for line in self.lines]
            if any(values):
                found.append(
                    (at, ["\N{EN DASH}" if value is None else self.format(value) for value in values])
                )
        return found[::-1]


def round_up(value: float) -> float:
    """Return the next round number, for the top of a scale.

    >>> [round_up(value) for value in (0, 0.03, 7, 23, 101)]
    [1.0, 0.04, 8.0, 40.0, 200.0]
    """
    if value <= 0 or not math.isfinite(value):
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    # Half of each is a round number too. A product of floats may be a little too small: 6 * 0.1 < 0.6.
    step = next(step for step in (1, 2, 4, 6, 8, 10) if step * unit >= value * (1 - 1e-9))
    return round(step * unit, 12)


def bar_chart(
    title: str,
    times: Sequence[datetime],
    lines: Sequence[Line],
    *,
    format_value: Callable[[float], str],
    format_time: Callable[[datetime], str],
    marks: Sequence[tuple[datetime, str]] = (),
) -> Chart:
    """Draw bars that stand on each other, one per step.

    Args:
        title: What the chart shows, for people who do not see it.
        times: The beginning of each step.
        lines: The numbers; the first line stands at the bottom.
        format_value: Turns a value into text.
        format_time: Turns the time of a step into text.
        marks: Moments to mark with a vertical line, and their texts.
    """
    sums = [sum(line.values[index] or 0 for line in lines) for index in range(len(times))]
    top = round_up(max(sums, default=0))
    width = WIDTH / max(len(times), 1)
    gap = min(2.0, width / 4)
    steps = []
    for index, at in enumerate(times):
        bars, base = [], float(HEIGHT)
        for line in lines:
            value = line.values[index] or 0
            if value <= 0:
                continue
            # A single failure among a thousand jobs must be seen.
            height = max(value / top * HEIGHT, _MIN_BAR)
            base -= height
            bars.append(_rect(line.colour, index * width + gap / 2, base, width - gap, height))
        steps.append(_step(index * width, width, bars, _tooltip(format_time(at), lines, index, format_value)))
    drawn = _grid() + Markup("").join(steps) + _marks(times, marks)
    return Chart(
        svg=_svg(title, drawn),
        top=top,
        times=times,
        lines=lines,
        format=format_value,
        is_empty=not any(sums),
    )


def line_chart(
    title: str,
    times: Sequence[datetime],
    lines: Sequence[Line],
    *,
    format_value: Callable[[float], str],
    format_time: Callable[[datetime], str],
) -> Chart:
    """Draw a line for each row of numbers, with a gap where nothing is known.

    The arguments are those of `bar_chart`.
    """
    known = [value for line in lines for value in line.values if value is not None]
    top = round_up(max(known, default=0))
    width = WIDTH / max(len(times), 1)
    drawn = [_grid()]
    for line in lines:
        path = _path([None if value is None else value / top for value in line.values], width)
        if path:
            drawn.append(Markup('<path class="{}" d="{}"/>').format(line.colour, path))
    drawn += [
        _step(index * width, width, [], _tooltip(format_time(at), lines, index, format_value))
        for index, at in enumerate(times)
    ]
    return Chart(
        svg=_svg(title, Markup("").join(drawn)),
        top=top,
        times=times,
        lines=lines,
        format=format_value,
        is_empty=not known,
    )


def _path(parts: Sequence[float | None], width: float) -> str:
    """Return the path of a line. A point whose neighbours are unknown becomes a short stroke."""
    commands = []
    for index, part in enumerate(parts):
        if part is None:
            continue
        x, y = (index + 0.5) * width, HEIGHT - part * HEIGHT
        follows = index > 0 and parts[index - 1] is not None
        commands.append(f"{'L' if follows else 'M'}{_number(x)} {_number(y)}")
        if not follows and (index + 1 == len(parts) or parts[index + 1] is None):
            commands.append(f"h{_number(min(width, 3))}")
    return "".join(commands)


def _svg(title: str, content: Markup) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, title, content)


def _grid() -> Markup:
    return Markup("").join(
        Markup('<line class="gridline" x1="0" x2="{}" y1="{}" y2="{}"/>').format(WIDTH, y, y)
        for y in (0, HEIGHT // 2, HEIGHT)
    )


def _rect(colour: str, x: float, y: float, width: float, height: float) -> Markup:
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        colour, _number(x), _number(y), _number(width), _number(height)
    )


def _step(x: float, width: float, bars: Sequence[Markup], tooltip: str) -> Markup:
    return Markup(
        '<g class="step">{}<rect class="catch" x="{}" y="0" width="{}" height="{}">'
        "<title>{}</title></rect></g>"
    ).format(Markup("").join(bars), _number(x), _number(width), HEIGHT, tooltip)


def _tooltip(at: str, lines: Sequence[Line], index: int, format_value: Callable[[float], str]) -> str:
    known = [(line.name, line.values[index]) for line in lines]
    texts = [f"{name} {format_value(value)}" for name, value in known if value is not None]
    return f"{at} · {', '.join(texts) or 'nothing'}"


def _marks(times: Sequence[datetime], marks: Sequence[tuple[datetime, str]]) -> Markup:
    if len(times) < 2:  # noqa: PLR2004 - one step has no length
        return Markup("")
    first, step = times[0], times[1] - times[0]
    length = step * len(times)
    return Markup("").join(
        Markup('<line class="mark" x1="{0}" x2="{0}" y1="0" y2="{1}"><title>{2}</title></line>').format(
            _number((at - first) / length * WIDTH), HEIGHT, escape(text)
        )
        for at, text in marks
        if first <= at <= first + length
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
