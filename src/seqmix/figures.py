"""Curves as SVG files that stand alone: in a README, light or dark, at any width.

Both axes are logarithmic, or y is a percentage from 0 to 100. A line is dotted over x where others have points and its own has
none. A cell without a number is a cross at the edge, with its status: out of memory is a result.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 430
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 84, 92
CAPTION_WIDTH = 112  # characters of a line
# the colours of report/page.css, light and dark: apart in the common kinds of colour blindness
LIGHT = ("#0b64ad", "#d1570b", "#078265", "#a23b8f", "#a67700", "#3b9ccf", "#5b5b5b", "#7c4520")
DARK = ("#62aef2", "#ff9350", "#40c8a2", "#e391d2", "#e5b843", "#a3dcff", "#b9b9b9", "#cf9c78")
MARKS = ("circle", "square", "triangle", "diamond")


def figure(
    title: str,
    x_label: str,
    y_label: str,
    curves: Mapping[str, Mapping[float, float]],
    missing: Mapping[str, Mapping[float, str]],
    caption: Sequence[str],
    intervals: Mapping[str, Mapping[float, tuple[float, float]]] | None = None,
    percent: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """curves: name -> x -> y, all above 0 or, with `percent`, from 0 to 100; missing: name -> x -> why there is no y; caption:
    lines under it; intervals: name -> x -> (low, high), drawn as a bar through the point; mark: an x, and what its line is."""
    xs = sorted({x for curve in (*curves.values(), *missing.values()) for x in curve})
    ys = [y for curve in curves.values() for y in curve.values()]
    if not xs or not ys:
        raise ValueError(f"there is nothing to draw for {title!r}")
    if not percent:
        low, high = math.floor(math.log10(min(ys)) * 3 - 0.3) / 3, math.ceil(math.log10(max(ys)) * 3 + 0.3) / 3
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    lines = [part for line in caption for part in textwrap.wrap(line, CAPTION_WIDTH)]

    def at_x(x: float) -> float:
        if len(xs) == 1:
            return (LEFT + right) / 2
        return LEFT + 14 + (right - LEFT - 28) * math.log(x / xs[0]) / math.log(xs[-1] / xs[0])

    def at_y(y: float) -> float:
        return bottom - (bottom - TOP) * (y / 100 if percent else (math.log10(y) - low) / (high - low))

    parts = [_head(title, len(curves), HEIGHT + 15 * max(0, len(lines) - 2))]
    for y in range(0, 101, 20) if percent else _ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in xs:
        parts.append(f'<line class="grid" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="soft" x="{at_x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:,.0f}</text>')
    if mark is not None and mark[0] in xs:
        parts.append(f'<line class="marked" x1="{at_x(mark[0]):.1f}" x2="{at_x(mark[0]):.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="fine" x="{at_x(mark[0]) + 6:.1f}" y="{bottom - 8}">{_text(mark[1])}</text>')
    parts.append(f'<text class="soft" x="{right}" y="{bottom + 36}" text-anchor="end">{_text(x_label)}</text>')
    parts.append(f'<text class="soft" x="{LEFT - 62}" y="{TOP - 12}">{_text(y_label)}</text>')
    for i, line in enumerate(lines):
        parts.append(f'<text class="fine" x="12" y="{HEIGHT - 28 + 15 * i}">{_text(line)}</text>')

    across = 12.0
    for i, (name, curve) in enumerate(curves.items()):
        if not curve and name not in missing:  # not measured; the next ones keep their colours
            continue
        parts += [_mark(i, across + 6, 48), f'<text x="{across + 17:.0f}" y="52">{_text(name)}</text>']
        across += 34 + 8.2 * len(name)
        points = [(at_x(x), at_y(curve[x])) for x in sorted(curve)]
        for a, b in itertools.pairwise(sorted(curve)):
            over = any(a < x < b for x in xs)  # what lies between is not measured
            ends = f'x1="{at_x(a):.1f}" y1="{at_y(curve[a]):.1f}" x2="{at_x(b):.1f}" y2="{at_y(curve[b]):.1f}"'
            parts.append(f'<line class="line s{i % len(LIGHT)}{" over" if over else ""}" {ends}/>')
        for x, (least, most) in (intervals or {}).get(name, {}).items():
            ends = f'x1="{at_x(x):.1f}" y1="{at_y(least):.1f}" x2="{at_x(x):.1f}" y2="{at_y(most):.1f}"'
            parts.append(f'<line class="line s{i % len(LIGHT)}" {ends}/>')
        parts += [_mark(i, x, y) for x, y in points]
    taken: dict[float, int] = {}
    for i, name in enumerate(curves):
        for x, why in missing.get(name, {}).items():
            row = taken[x] = taken.get(x, -1) + 1
            parts.append(_cross(i, at_x(x), TOP + 10 + 16 * row, name, why))
    return "\n".join([*parts, "</svg>\n"])


def _head(title: str, series: int, height: int) -> str:
    def colours(of: Sequence[str]) -> str:
        return " ".join(f".s{i}{{color:{colour}}}" for i, colour in enumerate(of[: max(series, 1)]))

    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_text(title)}">
<style>
svg {{ background: #fdfdfb; font: 13px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }}
text {{ fill: #1c1e21; }} .soft, .fine {{ fill: #5d626a; }}
.fine {{ font-size: 11px; }} .title {{ font-size: 17px; font-weight: 600; }}
.grid {{ stroke: #ecebe6; }} .marked {{ stroke: #5d626a; stroke-dasharray: 4 4; }}
.line {{ stroke: currentColor; stroke-width: 2; stroke-linecap: round; }}
.over {{ stroke-dasharray: 2 5; }} .mark {{ fill: currentColor; }}
.cross {{ fill: none; stroke: currentColor; stroke-width: 2; }} {colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
svg {{ background: #14161a; }} text {{ fill: #e7e7e4; }} .soft, .fine {{ fill: #a0a5ad; }} .grid {{ stroke: #262a30; }}
{colours(DARK)}
}}
</style>
<text class="title" x="12" y="26">{_text(title)}</text>"""


def _mark(i: int, x: float, y: float) -> str:
    kind, r = MARKS[i % len(MARKS)], 4.2
    attributes = f'class="mark s{i % len(LIGHT)}"'
    if kind == "circle":
        return f'<circle {attributes} cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.3), (1.2, 1), (-1.2, 1)),
        "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    }[kind]
    points = " ".join(f"{x + r * dx * 0.9:.1f},{y + r * dy * 0.9:.1f}" for dx, dy in corners)
    return f'<polygon {attributes} points="{points}"/>'


def _cross(i: int, x: float, y: float, name: str, why: str) -> str:
    path = f"M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8"
    said = f'<text class="fine" x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_text(f"{name}: {why}")}</text>'
    return f'<path class="cross s{i % len(LIGHT)}" d="{path}"/>{said}'


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade where those are few, else 1."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [m * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    return [t for t in ticks if low <= math.log10(t) <= high]


def _number(x: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size and x >= 1e4:
            return f"{x / size:.4g}{unit}"
    return f"{x:.4g}"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
