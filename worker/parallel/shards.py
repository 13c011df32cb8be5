"""Which share of each layer a rank holds, and how the ranks' partial results become whole ones.

Knows no processes and no layers. A ``Parallel`` of size 1 cuts nothing and costs nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from worker.config import ConfigError
from worker.model_config import ModelConfig


@dataclass(frozen=True)
class Parallel:
    """A rank's place among the ranks of a worker.

    Attributes:
        rank: 0 is the leader.
        size: how many ranks.
        group: does the collective operations; None when ``size`` is 1, or when nothing is computed.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, width: int) -> range:
        """This rank's consecutive part of ``width`` things; parts differ by one at most."""
        return range(width * self.rank // self.size, width * (self.rank + 1) // self.size)

    def padded_share(self, width: int) -> range:
        """The same in parts of equal size, of which the last may reach beyond ``width``."""
        each = -(-width // self.size)
        return range(each * self.rank, each * (self.rank + 1))

    def kv_heads(self, num_kv_heads: int) -> range:
        """This rank's key-value heads; where there are more ranks than heads, neighbours share one."""
        if num_kv_heads >= self.size:
            return self.share(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on each of them; the argument is overwritten."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' [rows, columns] side by side on the leader; the others get their own back."""
        if self.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0, group=self.group)
        return part if parts is None else torch.cat(parts, dim=-1)


ALONE = Parallel()


def check_degree(config: ModelConfig, size: int) -> None:
    """Raises ConfigError when the model's heads cannot be divided among ``size`` ranks."""
    flag = f"--tensor-parallel-size is {size}"
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"{flag}, which does not divide the model's {heads} attention heads and {kv_heads} key-value heads evenly; "
            f"possible: {', '.join(map(str, possible))}"
        )
