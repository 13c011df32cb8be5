"""Changes logits before sampling, by rules of each sequence: allowed and banned tokens, grammars, biases, penalties."""

from dataclasses import dataclass

import torch

from kernels.token_bitmask import TokenBitmask, mask_logits


@dataclass(frozen=True)
class Entries:
    """Single logits to change: parallel columns.

    Attributes:
        rows, tokens: [n] int64.
        values: [n] float32, or None where the rule needs none.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class Penalties:
    """Penalties of some rows for tokens that were there before.

    Attributes:
        rows: [n] int64: rows of the logits.
        prompt_seen: [n, vocab] bool: tokens of the prompt.
        output_counts: [n, vocab] int32: how often each token is in the output so far.
        presence, frequency, repetition: [n] float32; 0, 0 and 1 are off.
    """

    rows: torch.Tensor
    prompt_seen: torch.Tensor
    output_counts: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True)
class LogitAdjustments:
    """All rules of one step; None where no row has such a rule.

    Attributes:
        bias: added to logits.
        allowed: rows that appear here keep these tokens only.
        banned: impossible tokens.
        grammar: tokens that the rows' grammars leave possible.
        penalties: for tokens that were there before.
    """

    bias: Entries | None = None
    allowed: Entries | None = None
    banned: Entries | None = None
    grammar: TokenBitmask | None = None
    penalties: Penalties | None = None


def adjust_logits(logits: torch.Tensor, rules: LogitAdjustments) -> torch.Tensor:
    """Applies the rules: bias, allowed, banned, grammar, then penalties.

    Args:
        logits: [rows, vocab], floating point; not changed.
        rules: entries are distinct within a rule.

    Returns:
        [rows, vocab] float32; impossible tokens are minus infinity.
    """
    logits = logits.to(torch.float32, copy=True)
    if rules.bias is not None and rules.bias.values is not None:
        logits[rules.bias.rows, rules.bias.tokens] += rules.bias.values
    if rules.allowed is not None:
        rows, tokens = rules.allowed.rows, rules.allowed.tokens
        kept = logits[rows, tokens]
        logits[rows.unique()] = -torch.inf
        logits[rows, tokens] = kept
    if rules.banned is not None:
        logits[rules.banned.rows, rules.banned.tokens] = -torch.inf
    if rules.grammar is not None:
        mask_logits(logits, rules.grammar)
    if rules.penalties is not None:
        rows = rules.penalties.rows
        logits[rows] = penalize(logits[rows], rules.penalties)
    return logits


def penalize(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Repetition penalty (Keskar et al., 2019), then frequency and presence penalties as the OpenAI API defines them.

    Args:
        logits: [n, vocab] float32, the rows of ``penalties``.

    Returns:
        [n, vocab] float32.
    """
    counts = penalties.output_counts
    in_output = counts > 0
    repetition = penalties.repetition[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output | penalties.prompt_seen, scaled, logits)
    return logits - penalties.frequency[:, None] * counts - penalties.presence[:, None] * in_output
