"""All workers of one model: their links, which of them are ready, and whether they agree."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from protos import worker_pb2
from router.request import Choice
from router.worker_link import WorkerLink

logger = logging.getLogger(__name__)


class Fleet:
    """The workers that the router was told of.

    Args:
        addresses: host:port of each.
        vocab_size: of the router's tokenizer; a worker's must be at least that.
        silence: seconds without an answer after which a worker counts as lost.
    """

    def __init__(self, addresses: Sequence[str], vocab_size: int, silence: float) -> None:
        self._vocab_size = vocab_size
        self._manifest: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.requeue: Callable[[Choice], None] = lambda choice: None
        self.links = [
            WorkerLink(address, self._accepts, self._changed, lambda choice: self.requeue(choice), silence)
            for address in addresses
        ]

    @property
    def ready(self) -> list[WorkerLink]:
        """Links that can be given sequences."""
        return [link for link in self.links if link.ready]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together that every ready worker takes; 0 while there is none."""
        return min((link.hello.max_model_len for link in self.ready if link.hello), default=0)

    @property
    def model_vocab_size(self) -> int:
        """Token ids that every ready worker knows; the tokenizer's while there is none."""
        return min((link.hello.vocab_size for link in self.ready if link.hello), default=self._vocab_size)

    async def run(self) -> None:
        """Keeps all links connected, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(link.run(), name=f"link to {link.address}")

    def _changed(self) -> None:
        if not self.ready:
            self._manifest = None  # the next worker may bring another model
        self.on_change()

    def _accepts(self, hello: worker_pb2.Hello) -> str | None:
        if hello.vocab_size < self._vocab_size:
            return f"its model has {hello.vocab_size} tokens, the tokenizer {self._vocab_size}: not the same model"
        if self._manifest is not None and hello.manifest_hash != self._manifest:
            return f"its model {hello.model} is not that of the other workers"
        self._manifest = hello.manifest_hash
        return None
