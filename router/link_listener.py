"""Who wants to know what becomes of the links to workers."""

from typing import TYPE_CHECKING, Protocol

from protos import worker_pb2
from router.request import Choice

if TYPE_CHECKING:
    from router.worker_link import WorkerLink


class LinkListener(Protocol):
    """Is told; called from the event loop."""

    def readiness_changed(self) -> None:
        """A link became ready, or is not any more."""

    def capacity_changed(self) -> None:
        """A link can take a sequence that it could not take before."""

    def put_back(self, choice: Choice) -> None:
        """A worker refused a choice for now, or was lost with it: it is the next one. ``capacity_changed`` follows."""

    def joined(self, link: "WorkerLink") -> None:
        """A link is up; its ``hello`` is known."""

    def left(self, link: "WorkerLink") -> None:
        """A link is down, if it was up."""

    def progressed(self, link: "WorkerLink", batch: worker_pb2.StepBatch) -> None:
        """A StepBatch came, and has changed nothing yet."""

    def heard(self, link: "WorkerLink", pong: worker_pb2.Pong) -> None:
        """A Pong came."""

    def told(self, link: "WorkerLink", events: worker_pb2.KvEvents) -> None:
        """KvEvents came."""

    def rests(self, link: "WorkerLink") -> None:
        """The worker lost its work again and again, and gets nothing for a while."""

    def refused(self, link: "WorkerLink", slot: int, generation: int) -> None:
        """The worker refused what it was given in a slot."""
