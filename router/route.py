"""How a request came to its worker, told to clients in the call's metadata."""

from dataclasses import dataclass

from router.routing.worker_view import Placed

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a request's first choice.

    Attributes:
        worker: its name.
        placed: why it, and what came of it.
    """

    worker: str
    placed: Placed

    def begun(self) -> Metadata:
        """What is known when the request runs: sent before the first message."""
        placed = self.placed
        return (
            ("x-quire-worker", _printable(self.worker)),
            ("x-quire-reason", placed.reason),
            ("x-quire-predicted-cached-tokens", str(placed.predicted_tokens)),
            ("x-quire-cached-tokens", str(placed.cached_tokens or 0)),
            ("x-quire-queue-ms", str(_milliseconds(placed.queued_at, placed.placed_at))),
        )

    def ended(self) -> Metadata:
        """All of it: sent with the status."""
        prefill = _milliseconds(self.placed.placed_at, self.placed.first_token_at)
        return (*self.begun(), ("x-quire-prefill-ms", str(prefill)))


def _milliseconds(start: float, end: float | None) -> int:
    return 0 if end is None else round((end - start) * 1000)


def _printable(name: str) -> str:
    """Metadata and headers take printable ASCII only."""
    return name.encode("ascii", "replace").decode()
