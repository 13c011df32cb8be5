"""Workers as the router sees them, without any: what tests of routing decisions start from."""

from protos import worker_pb2
from protos.prefix import block_hashes
from router.request import pack_ids
from router.routing.cache_mirror import CacheMirror
from router.routing.dispatcher import Dispatcher
from router.routing.fair_queue import FairQueue
from router.routing.policies import Policy, Prefix
from router.routing.prefix_index import PrefixIndex
from router.routing.tenant_counters import TenantCounters
from router.routing.throughput import Throughput
from router.routing.waiting import Waiting
from router.routing.worker_view import WorkerView, level_rates

BLOCK = 4


def names(*ids: int, salt: bytes = b"") -> list[bytes]:
    """The names of a prompt's full blocks."""
    return block_hashes(pack_ids(list(ids)), BLOCK, salt)


def events(sequence: int, **fields: object) -> worker_pb2.KvEvents:
    """A message of the worker's cache; names may be given as lists."""
    joined = {key: b"".join(value) if isinstance(value, list) else value for key, value in fields.items()}
    return worker_pb2.KvEvents(**{"epoch": 7, "sequence": sequence, **joined})


def waiting(tokens: int = 100, *, prompt: list[int] | None = None, arrival: float = 0.0, **fields: object) -> Waiting:
    """A request with a prompt that nobody else has, unless its ids are given."""
    chain = names(*prompt) if prompt is not None else []
    count = len(prompt) if prompt is not None else tokens
    return Waiting(chain, count, arrival, BLOCK, **{"affinity": chain[0] if chain else b"", **fields})


class VirtualFleet:
    """Some workers, an index, a queue and a dispatcher.

    Args:
        count: workers.
        policy: prefix, unless another is given.
        hello: fields that differ from the usual ones.
    """

    def __init__(self, count: int = 2, policy: Policy | None = None, **hello: int) -> None:
        self.index = PrefixIndex()
        self.counters = TenantCounters()
        self.queue = FairQueue(self.counters)
        self.dispatcher = Dispatcher(self.index, self.queue, policy or Prefix())
        fields = {"block_size": BLOCK, "num_blocks": 10_000, "max_slots": 8, "max_num_batched_tokens": 1000, **hello}
        for number in range(count):
            cache = CacheMirror(self.index, number, fields["num_blocks"], 7)
            speed = Throughput(fields["max_num_batched_tokens"])
            view = WorkerView(f"w{number}:1", number, worker_pb2.Hello(**fields), cache, speed)
            self.dispatcher.views.append(view)

    @property
    def views(self) -> list[WorkerView]:
        """All workers."""
        return self.dispatcher.views

    def follow(self, number: int, *known: bytes) -> None:
        """A worker says that it has these blocks and no others."""
        self.views[number].cache.apply(events(1, snapshot=True, cleared=True, stored=list(known)), 0.0)

    def ask(self, *entries: Waiting, now: float = 0.0) -> list[int]:
        """Queues requests; returns to which workers sequences went, in order."""
        for entry in entries:
            self.dispatcher.add(entry)
        return [view.number for _, view, _ in self.dispatcher.dispatch(now).placed]

    def measured(self, rate: float) -> None:
        """All workers have reported that they compute so many prompt tokens a second."""
        for view in self.views:
            view.throughput.observe(1, worker_pb2.Load())
            view.throughput.observe(2, worker_pb2.Load(prefill_tokens=1000, busy_us=int(1e9 / rate)))
        level_rates(self.views)
