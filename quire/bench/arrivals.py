"""When requests arrive that nobody holds back: a Poisson process, or one with more or less even gaps."""

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is sent.

    Gaps are gamma distributed with the mean 1/rate.

    Args:
        rate: requests a second on average.
        burstiness: shape of the distribution. 1: a Poisson process; below, requests come in bursts; above, evenly.
    """
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times
