"""Plots: pages that are well-formed, load nothing, and show what they are given."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.plot import PlotError, chart, check_plot, write_plot

SVG = "{http://www.w3.org/2000/svg}"


def heights(values: list[float]) -> list[int]:
    """How many values each bar says that it stands for."""
    bars = ET.fromstring(chart(values)).findall(f"{SVG}rect")
    return [int((bar.findtext(f"{SVG}title") or "").rpartition(": ")[2]) for bar in bars]


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=50))
def test_every_chart_is_valid_and_counts_every_value(values: list[float]) -> None:
    root = ET.fromstring(chart(values))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for bar in root.findall(f"{SVG}rect"):
        x, y, wide, high = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height + 0.1
    points = [tuple(map(float, point.split(","))) for point in root.find(f"{SVG}polyline").attrib["points"].split()]  # type: ignore[union-attr]
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True), "a share that falls"
    assert sum(heights(values)) == len(values)


def test_a_long_tail_does_not_hide_the_rest() -> None:
    values = [*np.random.default_rng(0).normal(20, 2, 500).tolist(), 30_000.0]
    assert len(heights(values)) > 5, "all but the longest are in one bar"


def test_a_page_stands_alone_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    write_plot(path, "model <b>&", {"TTFT <ms>": [1.0, 2.0], "ITL": []}, "<script>alert(1)</script>")
    page = path.read_text()
    assert page.count("<svg") == 1, "what has no values has no chart"
    assert "<script" not in page
    assert "<b>" not in page
    assert set(re.findall(r'https?://[^"]*', page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href|@import|url)\b", page)
    ET.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])  # type: ignore[index]


def test_what_cannot_be_drawn_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "plot.html")
    with pytest.raises(PlotError, match=r"plot.pdf: a name ends with .html or .png"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(PlotError, match="there is no folder"):
        check_plot(tmp_path / "none" / "plot.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        check_plot(tmp_path / "plot.png")
