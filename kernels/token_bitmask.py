"""Makes tokens impossible by a bit each: how a grammar on the host tells the device what may come next."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBitmask:
    """Masks of some rows.

    Attributes:
        rows: [n] int64: rows of the logits, each once.
        bits: [n, words] int32: bit i % 32 of word i // 32 is set where token i is possible. Bits beyond the vocabulary
            count for nothing.
    """

    rows: torch.Tensor
    bits: torch.Tensor


def mask_logits(logits: torch.Tensor, mask: TokenBitmask) -> torch.Tensor:
    """Sets the logits of impossible tokens to minus infinity, in place.

    Args:
        logits: [rows, vocab] floating point; at most 32 tokens a word of the mask.
        mask: of some of the rows.

    Returns:
        ``logits``.
    """
    token = torch.arange(logits.shape[-1], device=logits.device)
    # A negative word shifts in ones from the left, which the last bit does not see.
    possible = (mask.bits[:, token >> 5] >> (token & 31)) & 1
    logits[mask.rows] = logits[mask.rows].masked_fill(possible == 0, -torch.inf)
    return logits
