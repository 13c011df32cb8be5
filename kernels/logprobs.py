"""Log-probabilities of tokens and of their likeliest alternatives."""

import torch


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, top_count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax at the given tokens and at the largest logits.

    Args:
        logits: [rows, vocab], floating point.
        token_ids: [rows] int64.
        top_count: alternatives, at most vocab.

    Returns:
        (log-probabilities of the tokens [rows] float32, alternatives [rows, top_count] int64, theirs [rows, top_count]
        float32), alternatives likeliest first.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    top = logprobs.topk(top_count, dim=-1)
    return chosen, top.indices, top.values
