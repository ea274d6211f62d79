"""SVG charts without a library. The same figures give the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.results import Curve, Line, Measurement, Series

_WIDTH = 800
_MARGIN = 24
_LETTER = 6.8
"""The approximate width of a 12-pixel letter, because font metrics are not available."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_INK, _FAINT, _GRID = "#1f2328", "#59636e", "#e3e7eb"
_COLOURS = {"python": "#1f6feb", "python tuned": "#0a3069", "node": "#2da44e", "node tuned": "#116329"}
_MORE_COLOURS = ("#e16f24", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#1b7c83", "#cf222e", "#54aeff")

_BAR, _BAR_GAP, _CASE_GAP, _HEADING = 18, 5, 18, 24
_PLOT_HEIGHT = 320
_MOST_DECADES_DIVIDED = 3.5


def number(value: float) -> str:
    """Format a number with three significant digits and thousands separators."""
    if value == round(value) or abs(value) >= 100:  # noqa: PLR2004
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004
    return f"{value:#.3g}"


def bar_chart(title: str, measurements: Sequence[Measurement]) -> str:
    """Draw a bar for each contender's median, paler up to its best round. Each case has its own scale."""
    names = [one.contender for case in measurements for one in case.series if one.values]
    colours = _colours(names)
    left = _MARGIN + _LETTER * max((len(name) for name in names), default=0) + 10
    body = [_text(_MARGIN, 36, title, size=17, weight=600)]
    caption = "Median of the rounds; paler: the best round. Each case has its own scale."
    body.append(_text(_MARGIN, 56, caption, fill=_FAINT))
    y = 64.0
    for measurement in measurements:
        y += _CASE_GAP
        body.append(_text(_MARGIN, y + 12, measurement.case, size=13, weight=600))
        y += _HEADING
        shown = [one for one in measurement.series if one.values]
        most = max((max(one.values) for one in shown), default=0.0) or 1.0
        # To the right of the bars are the figure and its unit.
        room = _WIDTH - _MARGIN - left - _LETTER * (len(measurement.unit) + 9)
        for one in shown:
            body += _bar(one, measurement, colours[one.contender], left, y, room / most)
            y += _BAR + _BAR_GAP
    return _page(title, y + _MARGIN - _BAR_GAP, body)


def _bar(
    one: Series, measurement: Measurement, colour: str, left: float, y: float, scale: float
) -> list[str]:
    best = one.best(higher_is_better=measurement.higher_is_better) * scale
    median = one.median * scale
    weight = 600 if one.contender.startswith("python") else 400
    return [
        _text(left - 10, y + 13, one.contender, anchor="end", weight=weight),
        _box(left, y, best, _BAR, colour, opacity=0.3),
        _box(left, y, median, _BAR, colour),
        _text(
            left + max(best, median) + 8, y + 13, f"{number(one.median)} {measurement.unit}", weight=weight
        ),
    ]


def line_chart(curve: Curve) -> str:
    """Draw the lines of a curve, with a legend above them."""
    colours = _colours(line.name for line in curve.lines)
    body = [_text(_MARGIN, 36, curve.title, size=17, weight=600)]
    legend, top = _legend(colours, 60)
    bottom = top + _PLOT_HEIGHT
    points = [point for line in curve.lines for point in line.points]
    x_axis = _axis([point.x for point in points], curve.log_x, _MARGIN + 60, _WIDTH - _MARGIN - 12)
    y_axis = _axis([point.y for point in points], curve.log_y, bottom, top)
    body += legend
    body += _grid(x_axis, y_axis)
    middle = (x_axis.start + x_axis.end) / 2
    body.append(_text(middle, bottom + 44, curve.x_label, anchor="middle", fill=_FAINT))
    body.append(_upright(_MARGIN + 6, (top + bottom) / 2, curve.y_label))
    for line in curve.lines:
        body += _line(line, x_axis, y_axis, colours[line.name])
    return _page(curve.title, bottom + 44 + _MARGIN, body)


def _line(line: Line, x_axis: _Axis, y_axis: _Axis, colour: str) -> list[str]:
    points = [
        (x_axis.at(point.x), y_axis.at(point.y)) for point in sorted(line.points, key=lambda point: point.x)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = f'stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"'
    # A white rim keeps points apart where lines cross.
    rim = 'stroke="#fff" stroke-width="1.2"'
    return [
        f'<polyline points="{path}" fill="none" {stroke}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" {rim}/>' for x, y in points),
    ]


def _legend(colours: dict[str, str], y: float) -> tuple[list[str], float]:
    drawn = []
    x = float(_MARGIN)
    for name, colour in colours.items():
        width = 24 + _LETTER * len(name)
        if x > _MARGIN and x + width > _WIDTH - _MARGIN:
            x, y = _MARGIN, y + 20
        drawn.append(_box(x, y - 8, 16, 5, colour))
        drawn.append(_text(x + 22, y, name))
        x += width + 18
    return drawn, y + 24


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    left, right, bottom, top = x_axis.start, x_axis.end, y_axis.start, y_axis.end
    drawn = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        drawn.append(_rule(left, y, right, y, _GRID))
        drawn.append(_text(left - 8, y + 4, _short(tick), anchor="end", fill=_FAINT))
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        drawn.append(_rule(x, top, x, bottom, _GRID))
        drawn.append(_text(x, bottom + 20, _short(tick), anchor="middle", fill=_FAINT))
    return [*drawn, _rule(left, bottom, right, bottom, _FAINT), _rule(left, top, left, bottom, _FAINT)]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool
    start: float
    end: float
    """Pixels of the two ends."""
    ticks: list[float]

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def _axis(values: list[float], log: bool, start: float, end: float) -> _Axis:
    least, most = min(values, default=1.0), max(values, default=1.0)
    # Zero has no logarithm, so a linear axis replaces the logarithmic one.
    if log and least > 0:
        return _log_axis(least, most, start, end)
    step = _step((most - min(least, 0)) / 5)
    low = step * math.floor(min(least, 0) / step)
    high = step * max(math.ceil(most / step), 1)
    count = round((high - low) / step)
    return _Axis(low, high, False, start, end, [low + step * each for each in range(count + 1)])


def _log_axis(least: float, most: float, start: float, end: float) -> _Axis:
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    round_ones = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    low = max(one for one in round_ones if one <= least)
    high = min(one for one in round_ones if one >= most and one > low)
    ticks = [one for one in round_ones if low <= one <= high]
    if math.log10(high / low) > _MOST_DECADES_DIVIDED:
        ticks = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    return _Axis(low, high, True, start, end, ticks)


def _step(about: float) -> float:
    """Return the next round number."""
    if about <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(about))
    return power * next(digit for digit in (1, 2, 5, 10) if digit * power >= about * 0.999)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _colours(names: Iterable[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    others = 0
    for name in names:
        if name in chosen:
            continue
        if name in _COLOURS:
            chosen[name] = _COLOURS[name]
        else:
            chosen[name] = _MORE_COLOURS[others % len(_MORE_COLOURS)]
            others += 1
    return chosen


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
    fill: str = _INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
    )


def _upright(x: float, y: float, text: str) -> str:
    turned = _text(0, 0, text, anchor="middle", fill=_FAINT)
    return f'<g transform="translate({x:.1f} {y:.1f}) rotate(-90)">{turned}</g>'


def _box(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2"'
        f' fill="{fill}" fill-opacity="{opacity:g}"/>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'


def _page(title: str, height: float, body: list[str]) -> str:
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    # The white background keeps the chart readable on dark pages.
    sheet = f'x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1:.0f}" rx="10"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{_FONT}">',
        f"<title>{escape(title)}</title>",
        f'<rect {sheet} fill="#fff" stroke="#d1d9e0"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
