"""A worker in virtual time: what the router's decisions cost, without a model.

A step takes ``step_s``, and for each prompt token 1 / ``prefill_rate``, and for each decoding sequence ``decode_s``.
Prompts are computed in order of arrival, in chunks within the step's budget; blocks are shared by name and evicted
least recently used first; a sequence is admitted when blocks for its prompt and its whole output can be had.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Speed:
    """How fast a worker is, and how much it holds."""

    prefill_rate: float = 10_000.0
    step_s: float = 0.015
    decode_s: float = 0.000_15
    budget: int = 2048
    cache_tokens: int = 1_000_000


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        names: of its prompt's full blocks.
        first_s: when its first token came; None: it never did.
        route: the router's own record.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    names: list[bytes]
    tenant: str = ""
    first_s: float | None = None
    end_s: float | None = None
    worker: int = -1
    cached_tokens: int = 0
    rest: int = 0
    admitted: bool = False
    extra_blocks: int = 0
    route: Any = field(default=None, repr=False)


class VirtualWorker:
    """One worker.

    Args:
        number: its place in the fleet.
        speed: what it can do.
        block_size: tokens a block.
        schedule: has ``on_event`` called at a time, with the number that it was scheduled with.
    """

    def __init__(
        self, number: int, speed: Speed, block_size: int, schedule: Callable[[float, "VirtualWorker", int], None]
    ) -> None:
        self.number = number
        self.speed = speed
        self.block_size = block_size
        self.num_blocks = speed.cache_tokens // block_size
        self.alive = True
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.decoding: list[tuple[int, int, Job]] = []
        self.step = 0
        self.busy_s = 0.0
        self.prefill_tokens = 0
        self.stored: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}
        self._schedule = schedule
        self._references: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._plain = 0
        self._event = 0
        # The steps under way: when they began, how long each takes, how many, and whether they compute prompts.
        self._began = 0.0
        self._each = 0.0
        self._count = 0
        self._chunks: list[tuple[Job, int]] = []

    @property
    def used_blocks(self) -> int:
        """Blocks that running sequences hold."""
        return len(self._references) + self._plain

    @property
    def load(self) -> int:
        """Sequences on the worker."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens yet to be computed."""
        return sum(job.rest for job in self.prefilling) + sum(job.prompt_tokens for job in self.waiting)

    @property
    def available_blocks(self) -> int:
        """Free and cached ones."""
        return self.num_blocks - self.used_blocks

    def names(self) -> list[bytes]:
        """All blocks that are cached or in use, by name."""
        return [*self._cached, *self._references]

    def submit(self, job: Job, now: float) -> None:
        """A job arrives."""
        job.worker = self.number
        self.waiting.append(job)
        if not self._count:
            self._begin(now)
        elif not self._chunks:  # only decodes are under way: they are broken off after the running step
            done = max(1, math.ceil((now - self._began) / self._each - 1e-9))
            if done < self._count:
                self._count = done
                self._plan_event()

    def on_event(self, number: int, now: float) -> tuple[list[Job], list[Job], list[Job]] | None:
        """Steps ended. Returns who was admitted meanwhile, got a first token and ended; None: the event is void."""
        if number != self._event or not self.alive:
            return None
        self.step += self._count
        self.busy_s += self._count * self._each
        first: list[Job] = []
        ended: list[Job] = []
        for job, tokens in self._chunks:
            job.rest -= tokens
            self.prefill_tokens += tokens
            if not job.rest:
                self.prefilling.remove(job)
                job.first_s = now if job.first_s is None else job.first_s
                first.append(job)
                heapq.heappush(self.decoding, (self.step + job.output_tokens - 1, id(job), job))
        while self.decoding and self.decoding[0][0] <= self.step:
            job = heapq.heappop(self.decoding)[2]
            job.end_s = now
            ended.append(job)
            self._release(job)
        admitted = [job for job in (*self.prefilling, *first) if not job.admitted]
        for job in admitted:
            job.admitted = True
        self._count = 0
        self._begin(now)
        return admitted, first, ended

    def die(self) -> list[Job]:
        """Ends at once. Returns what ran and waited; the cache is empty from then on."""
        lost = [*self.waiting, *self.prefilling, *(job for _, _, job in self.decoding)]
        for job in lost:
            job.rest, job.admitted = 0, False
        self.waiting.clear()
        self.prefilling.clear()
        self.decoding.clear()
        self._references.clear()
        self._cached.clear()
        self.stored.clear()
        self.removed.clear()
        self._plain = self._count = 0
        self._chunks = []
        self._event += 1
        self.alive = False
        return lost

    def depth(self, names: list[bytes]) -> int:
        """Blocks of a prompt that are cached."""
        for depth, name in enumerate(names):
            if name not in self._references and name not in self._cached:
                return depth
        return len(names)

    def _begin(self, now: float) -> None:
        while self.waiting and self._admit(self.waiting[0]):
            self.prefilling.append(self.waiting.popleft())
        budget = self.speed.budget
        self._chunks = []
        for job in self.prefilling:
            tokens = min(budget, job.rest)
            self._chunks.append((job, tokens))
            budget -= tokens
            if not budget:
                break
        if not self._chunks and not self.decoding:
            return
        self._count = 1 if self._chunks else max(1, self.decoding[0][0] - self.step)
        computed = self.speed.budget - budget
        self._each = self.speed.step_s + computed / self.speed.prefill_rate + self.speed.decode_s * len(self.decoding)
        self._began = now
        self._plan_event()

    def _plan_event(self) -> None:
        self._event += 1
        self._schedule(self._began + self._count * self._each, self, self._event)

    def _admit(self, job: Job) -> bool:
        depth = min(self.depth(job.names), (job.prompt_tokens - 1) // self.block_size)
        shared, fresh = job.names[:depth], job.names[depth:]
        plain = -(-(job.prompt_tokens + job.output_tokens) // self.block_size) - len(job.names)
        # A block that is in use under the same name further on takes no room of its own.
        fresh_new = [name for name in fresh if name not in self._references]
        unreferenced = sum(name not in self._references for name in shared)
        if self.used_blocks and self.used_blocks + unreferenced + len(fresh_new) + plain > self.num_blocks:
            return False
        for name in job.names:
            if name in self._cached:
                del self._cached[name]
            elif name not in self._references:
                self._change(name, self.stored, self.removed)
            self._references[name] = self._references.get(name, 0) + 1
        self._plain += plain
        while self.used_blocks + len(self._cached) > self.num_blocks and self._cached:
            self._change(self._cached.popitem(last=False)[0], self.removed, self.stored)
        job.extra_blocks = plain
        job.cached_tokens = depth * self.block_size
        job.rest = job.prompt_tokens - job.cached_tokens
        return True

    def _release(self, job: Job) -> None:
        self._plain -= job.extra_blocks
        for name in reversed(job.names):
            self._references[name] -= 1
            if not self._references[name]:
                del self._references[name]
                self._cached[name] = None

    def _change(self, name: bytes, into: dict[bytes, None], out_of: dict[bytes, None]) -> None:
        if name in out_of:
            del out_of[name]
        else:
            into[name] = None
