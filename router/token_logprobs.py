"""Log-probabilities of a request's tokens, from when a worker tells them to when its client was told."""

from protos import sampling_pb2


class OutOfStep(Exception):
    """A worker's message does not fit what it sent before: its stream cannot be trusted any more."""


class TokenLogprobs:
    """Log-probabilities of consecutive tokens, as they come.

    Args:
        first_index: of the first token that has one.
    """

    def __init__(self, first_index: int = 0) -> None:
        self._first = first_index
        self._logprobs: list[float] = []
        self._top_count = 0
        self._top_ids: list[int] = []
        self._top_logprobs: list[float] = []

    @property
    def end(self) -> int:
        """The index after the last token that is known."""
        return self._first + len(self._logprobs)

    def add(self, first_index: int, wire: sampling_pb2.Logprobs) -> None:
        """Takes in the next ones; those that are known are dropped. Raises OutOfStep when some are missing."""
        repeated = self.end - first_index
        if repeated < 0:
            raise OutOfStep(f"log-probabilities from {first_index} on came when {self.end} were expected")
        self._top_count = wire.top_count
        self._logprobs += wire.logprobs[repeated:]
        self._top_ids += wire.top_token_ids[repeated * wire.top_count :]
        self._top_logprobs += wire.top_logprobs[repeated * wire.top_count :]

    def of(self, start: int, end: int) -> sampling_pb2.Logprobs:
        """Those of tokens [start, end)."""
        start, end, count = start - self._first, end - self._first, self._top_count
        return sampling_pb2.Logprobs(
            logprobs=self._logprobs[start:end],
            top_count=count,
            top_token_ids=self._top_ids[start * count : end * count],
            top_logprobs=self._top_logprobs[start * count : end * count],
        )

    def forget(self, end: int) -> None:
        """Those of tokens before ``end`` are wanted no more."""
        gone, count = end - self._first, self._top_count
        self._first = end
        del self._logprobs[:gone], self._top_ids[: gone * count], self._top_logprobs[: gone * count]
