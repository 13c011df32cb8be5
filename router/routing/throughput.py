"""How fast a worker is, from the counters that it reports."""

from protos import worker_pb2

# Assumed of all workers until one has reported: a guess between a CPU and a GPU that its reports soon replace.
PRIOR_PREFILL_RATE = 10_000.0
PRIOR_STEP_S = 0.02
# What one more report weighs in the averages.
_WEIGHT = 0.2
# A report with fewer prompt tokens than this part of a step's budget tells of the step's fixed costs only.
_LEAST_SHARE = 1 / 8


class Throughput:
    """Averages over the last few reports, each weighted by its tokens or steps.

    Args:
        max_num_batched_tokens: the budget of a step.

    Attributes:
        measured: whether ``prefill_rate`` is more than a guess.
        prefill_rate: prompt tokens a second in steps that compute prompts, whatever else they compute.
        step_s: seconds a step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._least_tokens = max(1, int(max_num_batched_tokens * _LEAST_SHARE))
        self.measured = False
        self.prefill_rate = PRIOR_PREFILL_RATE
        self.step_s = PRIOR_STEP_S
        self._tokens = self._seconds = 0.0
        self._last: tuple[int, int, int] | None = None

    def observe(self, step: int, load: worker_pb2.Load) -> None:
        """Takes in a report that came with engine step ``step``; what was reported before is passed over."""
        tokens, busy_us = load.prefill_tokens, load.busy_us
        last, self._last = self._last, (step, tokens, busy_us)
        if last is None or step <= last[0] or busy_us <= last[2]:
            return
        seconds = (busy_us - last[2]) / 1e6
        self.step_s += _WEIGHT * (seconds / (step - last[0]) - self.step_s)
        if tokens - last[1] >= self._least_tokens:
            self._tokens += _WEIGHT * (tokens - last[1] - self._tokens)
            self._seconds += _WEIGHT * (seconds - self._seconds)
            self.prefill_rate = self._tokens / self._seconds
            self.measured = True
