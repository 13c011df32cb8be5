"""Results as people read them, and as programs do."""

import json
import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quire.bench.figures import Distribution, Figures

_WIDTH = 34


def titled(title: str, rows: Mapping[str, str]) -> str:
    """A block of lines: a title, and a name and a value each."""
    return "\n".join([title, *(f"  {name:<{_WIDTH}}{value:>14}" for name, value in rows.items())]) + "\n"


def distributions(rows: Mapping[str, Distribution | None]) -> str:
    """A table of times in ms: mean, percentiles and the largest of each; those without a value are left out."""
    there = {name: row for name, row in rows.items() if row is not None}
    if not there:
        return ""
    ranks = list(next(iter(there.values())).percentiles)
    heads = ["mean", *(f"p{rank:g}" for rank in ranks), "max"]
    lines = [f"{'milliseconds':<{_WIDTH}}" + "".join(f"{head:>11}" for head in heads)]
    for name, row in there.items():
        values = [row.mean, *row.percentiles.values(), row.largest]
        lines.append(f"  {name:<{_WIDTH - 2}}" + "".join(f"{value:>11.2f}" for value in values))
    return "\n".join(lines) + "\n"


def serving_table(figures: Figures, unsent: int) -> str:
    """All figures of a load."""
    rate = figures.per_second
    rows = {"requests, complete": f"{figures.completed:,}", "requests, failed": f"{figures.failed:,}"}
    if unsent:
        rows["requests, not sent"] = f"{unsent:,}"
    rows |= {
        "seconds": f"{figures.seconds:,.2f}",
        "peak concurrency": f"{figures.peak_concurrency:,}",
        "prompt tokens": f"{figures.prompt_tokens:,}",
        "  of these from a cache": f"{figures.cached_tokens:,}",
        "output tokens": f"{figures.output_tokens:,}",
        "requests/s": f"{rate(figures.completed):,.2f}",
        "output tokens/s": f"{rate(figures.output_tokens):,.1f}",
        "total tokens/s": f"{rate(figures.prompt_tokens + figures.output_tokens):,.1f}",
    }
    if figures.goodput is not None:
        rows["goodput, requests/s"] = f"{figures.goodput:,.2f}"
    times = {
        "TTFT: time to first token": figures.ttft, "TPOT: time per output token": figures.tpot,
        "ITL: between two messages": figures.itl, "E2E: whole request": figures.e2e,
    }  # fmt: skip
    text = titled("load", rows) + distributions(times)
    if figures.failures:
        text += "failures\n"
        for kind, count in figures.failures.items():
            text += f"  {kind:<{_WIDTH}}{count:>14,}  {figures.examples[kind]}\n"
    return text


def serving_json(figures: Figures, unsent: int) -> dict[str, Any]:
    """The same for programs; times in ms."""
    rate = figures.per_second
    return {
        "completed": figures.completed,
        "failed": figures.failed,
        "failures": figures.failures,
        "not_sent": unsent,
        "duration_s": figures.seconds,
        "peak_concurrency": figures.peak_concurrency,
        "prompt_tokens": figures.prompt_tokens,
        "cached_prompt_tokens": figures.cached_tokens,
        "output_tokens": figures.output_tokens,
        "request_throughput": rate(figures.completed),
        "output_throughput": rate(figures.output_tokens),
        "total_token_throughput": rate(figures.prompt_tokens + figures.output_tokens),
        "request_goodput": figures.goodput,
        **{f"{name}_ms": as_json(getattr(figures, name)) for name in ("ttft", "tpot", "itl", "e2e")},
    }


def as_json(distribution: Distribution | None) -> dict[str, float] | None:
    """A distribution by names: mean, p50 and so on, max."""
    if distribution is None:
        return None
    percentiles = {f"p{rank:g}": value for rank, value in distribution.percentiles.items()}
    return {"mean": distribution.mean, **percentiles, "max": distribution.largest}


def write_json(path: Path, benchmark: str, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Writes a result with what it was measured by. Raises OSError."""
    try:
        own = version("quire")
    except PackageNotFoundError:  # run from a tree that is not installed
        own = "unknown"
    whole = {
        "benchmark": benchmark,
        "quire_version": own,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.node()} {platform.machine()}, Python {platform.python_version()}",
        "settings": {name: _plain(value) for name, value in settings.items() if value is not None},
        **result,
    }
    path.write_text(json.dumps(whole, indent=1, default=str, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """A setting as JSON has it, which knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
