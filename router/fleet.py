"""All workers of the model: their links, and what they have in common."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from protos import worker_pb2
from protos.tls import ClientTls
from router.link_listener import LinkListener
from router.recovery import Recovery
from router.validation import MAX_ID_CHARS
from router.worker_link import LinkLost, WorkerLink


@dataclass(frozen=True)
class ModelLimits:
    """What all workers of a fleet agree on.

    Attributes:
        manifest_hash: equal exactly when the models are.
        vocab_size: token ids are below this.
        max_model_len: most tokens of prompt and output together.
        takes_priorities: whether requests may have a priority.
    """

    manifest_hash: str
    vocab_size: int
    max_model_len: int
    takes_priorities: bool


class Fleet:
    """The links to all workers, made and ended as their addresses come and go.

    Args:
        min_vocab_size: a model with fewer tokens does not belong to the tokenizer.
        worker_timeout: seconds without a sign of life after which a worker counts as lost.
        tls: of connections to workers.
    """

    def __init__(self, min_vocab_size: int, worker_timeout: float, tls: ClientTls | None = None) -> None:
        self._min_vocab_size = min_vocab_size
        self._worker_timeout = worker_timeout
        self._tls = tls
        self._make_link: Callable[[str], WorkerLink] | None = None
        self._tasks: dict[asyncio.Task[None], WorkerLink] = {}
        # What each source knows.
        self._addresses: dict[str, Collection[str]] = {}
        self.links: list[WorkerLink] = []

    def start(self, listener: LinkListener, recovery: Recovery) -> None:
        """From here on ``set_addresses`` may be called."""

        def make_link(address: str) -> WorkerLink:
            return WorkerLink(
                address, self._tls, self._worker_timeout, self._check, listener, recovery, self._others_work
            )

        self._make_link = make_link

    async def stop(self) -> None:
        """Ends all links; workers cancel what ran through them."""
        self._make_link = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set_addresses(self, source: str, addresses: Collection[str]) -> None:
        """A source of addresses knows these now.

        What no source knows any more gets no new sequence, and its link ends with the last one. A link that was made is
        kept up, however often it fails, as long as its address is known.
        """
        if self._make_link is None:
            return
        self._addresses[source] = addresses
        wanted = dict.fromkeys(address for known in self._addresses.values() for address in known)
        for link in self.links:
            if link.retired and link.address in wanted:
                link.recall()
            elif not link.retired and link.address not in wanted:
                link.retire()
        known_links = {link.address for link in self.links}
        for address in (address for address in wanted if address not in known_links):
            link = self._make_link(address)
            self.links.append(link)
            task = asyncio.create_task(link.run(), name=f"link {address}")
            self._tasks[task] = link
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        link = self._tasks.pop(task)
        self.links.remove(link)
        # Its address may have come back in the link's last moment.
        if not link.retired:
            self.set_addresses("", ())

    @property
    def ready_count(self) -> int:
        """Workers that take sequences."""
        return sum(link.ready for link in self.links)

    @property
    def limits(self) -> ModelLimits | None:
        """What the connected workers agree on; None while there is none."""
        for link in self.links:
            if link.hello is not None:
                return _limits(link.hello)
        return None

    def _others_work(self, link: WorkerLink) -> bool:
        return any(other.works for other in self.links if other is not link)

    def _check(self, link: WorkerLink, hello: worker_pb2.Hello) -> None:
        """Raises LinkLost when a worker has no proper name, or does not fit this router's tokenizer or the others."""
        for field, name in (("worker_id", hello.worker_id), ("model", hello.model)):
            if len(name) > MAX_ID_CHARS or not name.isprintable():
                raise LinkLost(
                    f"its {field} has {len(name)} characters; it must be at most {MAX_ID_CHARS}, all of them printable"
                )
        if hello.vocab_size < self._min_vocab_size:
            raise LinkLost(
                f"its model {hello.model} has {hello.vocab_size} tokens, the tokenizer {self._min_vocab_size}; "
                "give router and workers the same --model"
            )
        limits = self.limits
        if limits is not None and limits != _limits(hello):
            raise LinkLost(f"its model {hello.model} differs from the other workers': {_limits(hello)}, not {limits}")
        for other in self.links:
            if other is not link and other.hello is not None and other.hello.epoch == hello.epoch:
                raise LinkLost(f"it is the same process as the worker at {other.address}; remove one of the two")


def _limits(hello: worker_pb2.Hello) -> ModelLimits:
    return ModelLimits(hello.manifest_hash, hello.vocab_size, hello.max_model_len, hello.takes_priorities)
