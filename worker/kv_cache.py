"""The tensors that hold paged keys and values, and how many blocks fit into a size."""

import torch

from worker.model_config import ModelConfig
from worker.parallel.shards import ALONE, Parallel


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype, parallel: Parallel = ALONE) -> int:
    """Bytes of one block's keys and values, of this dtype, in all layers, as one rank holds them."""
    heads = len(parallel.kv_heads(config.num_kv_heads))
    return 2 * config.num_layers * block_size * heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of all layers, of a rank's heads: one tensor [layers, 2, blocks, block_size, kv_heads, head_dim].

    The memory starts as zeros: padding may read slots that were never written, and a stray NaN would survive its mask.

    Attributes:
        num_blocks, block_size: blocks, and tokens of each.
        query_heads: of a layer, as the rank has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        heads = len(parallel.kv_heads(config.num_kv_heads))
        self.query_heads = heads * config.num_heads // config.num_kv_heads
        shape = (config.num_layers, 2, num_blocks, block_size, heads, config.head_dim)
        self._layers = [tuple(layer) for layer in torch.zeros(shape, dtype=dtype, device=device)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of one layer, each [blocks, block_size, kv_heads, head_dim]."""
        keys, values = self._layers[index]
        return keys, values
