"""Chooses the next token of every sequence from its logits, each by its own parameters.

Random numbers are counter-based: the noise of (seed, output index, token) is a hash of the three and of nothing else,
so that a sequence gets the same ids in any batch, after preemption and on another machine. The choice is the largest
of ``logits / temperature + Gumbel noise`` (the Gumbel-max trick), which needs neither a sum nor a sort over the
vocabulary; only top-k and top-p look at an order.
"""

from dataclasses import dataclass

import torch

_MASK32 = 0xFFFFFFFF
# top-k and top-p rarely reach beyond this many tokens; when they do, the whole vocabulary is sorted.
_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of the rows to sample, one entry a row; every tensor is [rows] on the logits' device.

    ``None`` for a parameter means that no row uses it, and its work is skipped.

    Attributes:
        temperature: float32; 0 is greedy. None: all rows are greedy.
        top_k: int64; 0 is off.
        top_p: float32; 1 is off.
        min_p: float32; 0 is off.
        key_low, key_high: int64 holding uint32: the row's random key, a mix of its seed and output index.
    """

    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    key_low: torch.Tensor | None = None
    key_high: torch.Tensor | None = None


def random_key(seed: int, index: int) -> tuple[int, int]:
    """Mixes a 64-bit seed and an output index into two 32-bit words (SplitMix64: Steele, Lea & Flood, 2014)."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    state ^= state >> 31
    return state & _MASK32, state >> 32


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer of MurmurHash3 (Appleby), on uint32 values held in int64."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def gumbel_noise(key_low: torch.Tensor, key_high: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of each row's key.

    Args:
        key_low, key_high: [rows] int64 holding uint32, from ``random_key``.
        vocab_size: tokens.

    Returns:
        [rows, vocab_size] float32.
    """
    token = torch.arange(vocab_size, device=key_low.device)
    bits = _mix32((token * 0x9E3779B9 + key_low[:, None]) & _MASK32)
    bits = _mix32(bits ^ key_high[:, None])
    # Exponential noise from a uniform that is finest near zero, where the winner's noise lies.
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def keep_likely(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Sets the logits of excluded tokens to minus infinity: first min_p, then top_k, then top_p of what is left.

    Args:
        logits: [rows, vocab] float32, already divided by the temperature.
        top_k, top_p, min_p: see ``SamplingBatch``.

    Returns:
        [rows, vocab] float32. At least the likeliest token of each row is kept; tokens whose logits equal the last
        kept one's are all kept, so that the result does not depend on an order among equals.
    """
    if min_p is not None:
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(min_p)[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_k is None and top_p is None:
        return logits
    rows, vocab_size = logits.shape
    if top_k is None:
        top_k = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    if top_p is None:
        top_p = torch.ones(rows, device=logits.device)
    candidates = logits.topk(min(_CANDIDATES, vocab_size)).values
    threshold, decided = _last_kept(logits, candidates, top_k, top_p)
    if not decided:
        threshold, _ = _last_kept(logits, logits.sort(dim=-1, descending=True).values, top_k, top_p)
    return logits.masked_fill(logits < threshold, -torch.inf)


def _last_kept(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """The logit of the last token that top_k and top_p keep, [rows, 1]; and whether ``ordered``, the rows' largest
    logits in descending order, was enough to judge every row."""
    count = ordered.shape[-1]
    vocab_size = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    inside = torch.arange(count, device=logits.device) < limit
    mass = torch.where(top_k > 0, ordered.masked_fill(~inside, -torch.inf).logsumexp(dim=-1), logits.logsumexp(dim=-1))
    probability = (ordered - mass[:, None]).exp().masked_fill(~inside, 0.0)
    # A token goes when those before it already reach top_p.
    keep = inside & (probability.cumsum(dim=-1) - probability < top_p[:, None])
    keep[:, 0] = True
    last = keep.sum(dim=-1, keepdim=True) - 1
    unlimited = ((top_k == 0) & (top_p >= 1))[:, None]
    decided = bool((unlimited | (last < count - 1)).all()) or count == vocab_size
    return torch.where(unlimited, -torch.inf, ordered.gather(-1, last)), decided


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token id for each row.

    Args:
        logits: [rows, vocab], floating point.
        batch: the rows' parameters.

    Returns:
        [rows] int64.
    """
    if logits.is_cuda:
        from kernels.gpu.sampling import sample as fast

        return fast(logits, batch)
    greedy = logits.argmax(dim=-1)
    if batch.temperature is None:
        return greedy
    assert batch.key_low is not None
    assert batch.key_high is not None
    is_greedy = batch.temperature == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    kept = keep_likely(scaled, batch.top_k, batch.top_p, batch.min_p)
    noisy = kept + gumbel_noise(batch.key_low, batch.key_high, logits.shape[-1])
    return torch.where(is_greedy, greedy, noisy.argmax(dim=-1))
