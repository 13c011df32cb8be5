"""Tensor parallelism: one model's weights and KV cache cut over several processes of one machine, its ranks."""
