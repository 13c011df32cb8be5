"""What the records of a run come to: rates, distributions of times, failures. Times are milliseconds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.bench.records import Record

PERCENTILES = (50.0, 90.0, 99.0)
# What a limit of --goodput may be of.
LIMITED = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Distribution:
    """Of one kind of time over all requests: its mean, its largest value, and percentiles by their ranks."""

    mean: float
    largest: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], ranks: Sequence[float]) -> "Distribution | None":
        """Between two values, percentiles lie on the line between them, as numpy has it. None: there are no values."""
        if not values:
            return None
        found = np.percentile(values, ranks).tolist()
        return cls(float(np.mean(values)), max(values), dict(zip(ranks, found, strict=True)))


@dataclass(frozen=True)
class Times:
    """Of one complete request, in ms.

    Attributes:
        ttft: from its begin to the first message with output.
        tpot: time per output token after the first; None: there was only one.
        itl: each time between two messages with output, which hold one token, or several when somebody was slow.
        e2e: to the last of it.
    """

    ttft: float
    tpot: float | None
    itl: list[float]
    e2e: float

    @classmethod
    def of(cls, record: Record) -> "Times":
        """``record`` is complete."""
        after_first = record.times[-1] - record.times[0]
        return cls(
            ttft=1e3 * record.ttft,
            tpot=1e3 * after_first / (record.tokens - 1) if record.tokens > 1 else None,
            itl=[1e3 * interval for interval in record.intervals],
            e2e=1e3 * (record.ended - record.began),
        )

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether all limits of --goodput are kept; of ITL, by the longest."""
        longest = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "itl": max(self.itl, default=0.0), "e2e": self.e2e}
        return all(longest[name] <= limit for name, limit in limits.items())


@dataclass(frozen=True)
class Figures:
    """Of a run. Rates are per second of the whole run, and count complete requests alone.

    Attributes:
        failures: how many of each kind; with ``completed`` they are all requests that were sent.
        examples: what was said of the first of each kind.
        peak_concurrency: most requests under way at one time.
        goodput: complete requests per second that kept all limits; None: there were no limits.
        ttft, tpot, itl, e2e: None where no request has one.
    """

    completed: int
    failures: dict[str, int]
    examples: dict[str, str]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    peak_concurrency: int
    goodput: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None

    @property
    def failed(self) -> int:
        """Requests that did not end as they should."""
        return sum(self.failures.values())

    def per_second(self, count: int) -> float:
        """A count as a rate over the run; 0 for a run that took no time."""
        return count / self.seconds if self.seconds else 0.0


def figures_of(
    records: Sequence[Record], seconds: float, ranks: Sequence[float], limits: Mapping[str, float] | None = None
) -> Figures:
    """What these records come to.

    Args:
        records: of all requests that were sent.
        seconds: that the run took.
        ranks: of percentiles, 0 to 100.
        limits: of --goodput, in ms, by names in ``LIMITED``.
    """
    complete = [record for record in records if not record.error]
    times = [Times.of(record) for record in complete]
    failures = Counter(record.error for record in records if record.error)
    kept = sum(each.keeps(limits) for each in times) if limits else None
    return Figures(
        completed=len(complete),
        failures=dict(failures.most_common()),
        examples={record.error: record.detail for record in reversed(records) if record.error},
        seconds=seconds,
        prompt_tokens=sum(record.prompt_tokens for record in complete),
        cached_tokens=sum(record.cached_tokens for record in complete),
        output_tokens=sum(record.tokens for record in complete),
        peak_concurrency=peak_concurrency(records),
        goodput=None if kept is None else (kept / seconds if seconds else 0.0),
        ttft=Distribution.of([each.ttft for each in times], ranks),
        tpot=Distribution.of([each.tpot for each in times if each.tpot is not None], ranks),
        itl=Distribution.of([interval for each in times for interval in each.itl], ranks),
        e2e=Distribution.of([each.e2e for each in times], ranks),
    )


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests that were under way at one time; one that ends as another begins is not under way with it."""
    changes = [(record.began, 1) for record in records] + [(record.ended, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
