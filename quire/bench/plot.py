"""Distributions of times as a page of its own, which loads nothing from anywhere, or as a PNG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

FORMATS = (".html", ".png")
_BINS = 48
_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 44, 12, 40
# Where the largest is further from the middle than this, a line that is even in milliseconds shows nothing.
_LONG_TAIL = 12
_SMALLEST_MS = 0.01

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; --ink: #1b1f24; --dim: #6b7280; --bar: #93b7e3; --line: #b4451f; --grid: #d9dde3;
  --back: #fff }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8eb; --dim: #9aa3ad; --bar: #3c618f; --line: #f0854f;
  --grid: #363c44; --back: #14171a }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 700px;
  margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin: 2rem 0 0 }} svg {{ width: 100%; height: auto }}
p {{ color: var(--dim) }} pre {{ overflow-x: auto; font-size: 12px }}
text {{ font-size: 11px; fill: var(--dim) }} .bar {{ fill: var(--bar) }} .grid {{ stroke: var(--grid) }}
.line {{ fill: none; stroke: var(--line); stroke-width: 1.6 }} .mark {{ stroke: var(--ink); stroke-dasharray: 3 3 }}
</style></head><body>
<h1>{title}</h1>
<p>Bars: how many values lie there (left). Line: the share that is no larger (right). Dashed: the median and p99.</p>
{charts}
<pre>{table}</pre>
</body></html>
"""


class PlotError(Exception):
    """A plot cannot be made; the message says what to do."""


def check_plot(path: Path) -> None:
    """Raises PlotError when ``write_plot`` could not write such a file; better before a benchmark than after it."""
    if path.suffix not in FORMATS:
        raise PlotError(f"--plot {path}: a name ends with {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.absolute().parent}")
    if path.suffix == ".png":
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError as error:
            raise PlotError(
                f"--plot {path}: PNG needs matplotlib, which is not installed (pip install matplotlib); .html does not"
            ) from error


def write_plot(path: Path, title: str, times: Mapping[str, Sequence[float]], table: str) -> None:
    """Writes a chart of each distribution that has values.

    Args:
        path: ends with one of ``FORMATS``.
        title: of the whole.
        times: milliseconds, by what they are.
        table: put below the charts as it is; a PNG has none.

    Raises:
        PlotError: PNG without matplotlib.
        OSError: the file cannot be written.
    """
    there = {name: values for name, values in times.items() if values}
    if path.suffix == ".png":
        check_plot(path)
        _write_png(path, title, there)
        return
    charts = "\n".join(f"<h2>{escape(name)}</h2>\n{chart(values)}" for name, values in there.items())
    path.write_text(_PAGE.format(title=escape(title), charts=charts, table=escape(table)), encoding="utf-8")


class _Scale:
    """Milliseconds along the width of a chart: even, or by powers of ten where there is a long tail."""

    def __init__(self, values: Sequence[float]) -> None:
        lowest, middle, highest = min(values), float(np.median(values)), max(values)
        self.logarithmic = highest > _LONG_TAIL * max(middle, _SMALLEST_MS)
        if self.logarithmic:
            # Messages that came together are next to nothing apart: they are in the first bar, however small it is.
            self.low, self.high = max(lowest, middle / _LONG_TAIL**2, _SMALLEST_MS), highest
        else:
            self.low, self.high = 0.0, max(highest, _SMALLEST_MS)

    def edges(self) -> list[float]:
        make = np.geomspace if self.logarithmic else np.linspace
        edges: list[float] = make(self.low, self.high, _BINS + 1).tolist()
        return edges

    def x(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            inside = [mark for mark in marks if self.low <= mark <= self.high]
            return inside if len(inside) <= 9 else [mark for mark in inside if str(f"{mark:e}").startswith("1")]
        rough = self.high / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return [number * step for number in range(int(self.high / step) + 1)]


def chart(values: Sequence[float]) -> str:
    """An SVG of a distribution: a histogram, its cumulative share, its median and p99. ``values``: ms, at least one."""
    scale, ordered = _Scale(values), np.sort(values)
    edges = scale.edges()
    counts, _ = np.histogram(np.clip(ordered, scale.low, scale.high), bins=edges)
    most, floor = int(counts.max()), _HEIGHT - _BOTTOM

    def y(share: float) -> float:
        return floor - share * (floor - _TOP)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for quarter in range(5):
        share, height = quarter / 4, y(quarter / 4)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{share * most:.0f}</text>'
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{height + 4:.1f}">{share:.0%}</text>'
        )
    for place, count in enumerate(counts.tolist()):
        if count:
            left, right, top = scale.x(edges[place]), scale.x(edges[place + 1]), y(count / most)
            parts.append(
                f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 0.5, 0.5):.1f}" '
                f'height="{floor - top:.1f}">'
                f"<title>{edges[place]:.2f} to {edges[place + 1]:.2f} ms: {count}</title></rect>"
            )
    shares = np.searchsorted(ordered, edges, side="right") / len(ordered)
    line = " ".join(f"{scale.x(edge):.1f},{y(share):.1f}" for edge, share in zip(edges, shares.tolist(), strict=True))
    parts.append(f'<polyline class="line" points="{line}"/>')
    for rank in (50, 99):
        value = float(np.percentile(ordered, rank))
        x = scale.x(value)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}">'
            f"<title>p{rank}: {value:.2f} ms</title></line>"
        )
    for tick in scale.ticks():
        parts.append(f'<text x="{scale.x(tick):.1f}" y="{floor + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">ms, {len(ordered):,} values</text>')
    return "".join([*parts, "</svg>"])


def _write_png(path: Path, title: str, times: Mapping[str, Sequence[float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    figure, axes = pyplot.subplots(max(1, len(times)), figsize=(8, 3.2 * max(1, len(times))), squeeze=False)
    for axis, (name, values) in zip(axes[:, 0], times.items(), strict=False):
        scale, ordered = _Scale(values), np.sort(values)
        axis.hist(np.clip(ordered, scale.low, scale.high), bins=scale.edges(), color="#93b7e3")
        axis.set_title(name)
        axis.set_xlabel("ms")
        if scale.logarithmic:
            axis.set_xscale("log")
        shares = axis.twinx()
        shares.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color="#b4451f")
        shares.set_ylim(0, 1.02)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
