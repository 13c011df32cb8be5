"""How a request came to its worker, told to clients when it begins and, as metadata, with its status."""

from dataclasses import dataclass, field

from protos import inference_pb2
from router.routing.worker_view import Placed

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Route:
    """The route of a request's first choice.

    Attributes:
        worker: the name of the first worker that ran it.
        placed: why it, and what came of it.
        last_worker: the name of the one that has it now, or had it last.
        moves: how often it went on elsewhere.
    """

    worker: str
    placed: Placed
    last_worker: str = field(init=False)
    moves: int = 0

    def __post_init__(self) -> None:
        self.last_worker = self.worker

    def move(self, worker: str) -> None:
        """It goes on at another worker, or at the same one again."""
        self.last_worker = worker
        self.moves += 1

    def begun(self) -> inference_pb2.Route:
        """What is known when the request runs."""
        placed = self.placed
        return inference_pb2.Route(
            worker=_printable(self.worker),
            reason=placed.reason,
            predicted_cached_tokens=placed.predicted_tokens,
            cached_tokens=placed.cached_tokens or 0,
            queue_ms=_milliseconds(placed.queued_at, placed.placed_at),
        )

    def ended(self) -> Metadata:
        """All of it, sent with the status: the worker is the one that ended it, all else is the first one's."""
        placed = self.placed
        return (
            ("x-quire-worker", _printable(self.last_worker)),
            ("x-quire-reason", placed.reason),
            ("x-quire-predicted-cached-tokens", str(placed.predicted_tokens)),
            ("x-quire-cached-tokens", str(placed.cached_tokens or 0)),
            ("x-quire-queue-ms", str(_milliseconds(placed.queued_at, placed.placed_at))),
            ("x-quire-prefill-ms", str(_milliseconds(placed.placed_at, placed.first_token_at))),
            ("x-quire-moves", str(self.moves)),
        )


def _milliseconds(start: float, end: float | None) -> int:
    return 0 if end is None else round((end - start) * 1000)


def _printable(name: str) -> str:
    """Metadata and headers take printable ASCII only."""
    return name.encode("ascii", "replace").decode()
