"""The flags that say what is shown and kept of a benchmark."""

import argparse
from pathlib import Path

from quire.bench.figures import PERCENTILES


def add_result_arguments(parser: argparse.ArgumentParser, *, plotted: str) -> argparse._ArgumentGroup:
    """Adds the flags of what is shown and kept of a benchmark. Returns their group, for more.

    ``plotted``: what --plot draws distributions of.
    """
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentiles", default=PERCENTILES, type=_percentiles, metavar="P,P",
        help=f"of all times (default {','.join(f'{rank:g}' for rank in PERCENTILES)})",
    )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    group.add_argument(
        "--plot", type=Path, metavar="FILE",
        help=f"draw the distributions of {plotted}: .html, a page by itself, or .png, with matplotlib",
    )  # fmt: skip
    return group


def _percentiles(text: str) -> tuple[float, ...]:
    ranks = tuple(float(part) for part in text.split(","))
    if not all(0 <= rank <= 100 for rank in ranks):
        raise argparse.ArgumentTypeError(f"{text}: percentiles lie between 0 and 100")
    return ranks
