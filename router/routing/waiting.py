"""A request that waits for a worker, as the queue and the policies see it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Waiting:
    """What a request asks of the fleet.

    Attributes:
        names: of its prompt's full blocks.
        prompt_tokens: of its prompt, at least 1; of a sequence that goes on elsewhere, its output so far is part of it.
        arrival: seconds.
        block_size: tokens a block.
        priority: its class; lower ones go first.
        tenant: who shares the fleet with other tenants.
        affinity: what keeps requests together where nothing else does: their session, or how their prompt begins.
        deadline: seconds; None: never.
        places: sequences of it that no worker has yet.
        missing: prompt tokens that the best worker would have to compute, when this was last looked at.
    """

    names: Sequence[bytes]
    prompt_tokens: int
    arrival: float
    block_size: int
    priority: int = 0
    tenant: str = ""
    affinity: bytes = b""
    deadline: float | None = None
    places: int = 1
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.prompt_tokens

    def cached(self, depth: int) -> int:
        """Tokens that a worker with ``depth`` blocks of the prompt need not compute: at least one is left."""
        return min(depth, (self.prompt_tokens - 1) // self.block_size) * self.block_size
