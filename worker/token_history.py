"""Which tokens each row's sequence has had, kept on the device for penalties."""

from collections.abc import Container

import torch

from kernels.logit_adjustments import Penalties
from worker.sequence import SamplingParams
from worker.step_plan import History


class TokenHistory:
    """Per row: the prompt's tokens, and how often each token is in the output.

    The memory, five bytes a row and token of the vocabulary, is taken when the first sequence with penalties comes.

    Args:
        max_num_seqs: rows.
        vocab_size: tokens.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._prompt_seen: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def begin(self, histories: list[History]) -> None:
        """Fills the rows of sequences that begin or come back."""
        for history in histories:
            prompt_seen, output_counts = self._buffers()
            prompt_seen[history.row] = False
            prompt_seen[history.row, self._tensor(history.prompt.tolist())] = True
            output = self._tensor(history.output.tolist())
            output_counts[history.row] = torch.bincount(output, minlength=self._shape[1])

    def count_known(self, outputs: list[tuple[int, list[int]]]) -> None:
        """Counts output tokens that the host knows: (row, ids)."""
        if outputs:
            _, output_counts = self._buffers()
            rows = self._tensor([row for row, ids in outputs for _ in ids])
            _count(output_counts, rows, self._tensor([token for _, ids in outputs for token in ids]))

    def penalties(
        self, sampling: list[SamplingParams], row_numbers: list[int], assumed: dict[int, list[int]]
    ) -> Penalties | None:
        """The penalties of a step's samples; None when no sample has any.

        Args:
            sampling: how each sample is sampled.
            row_numbers: their rows.
            assumed: tokens to count for one of them alone, by sample: drafts before it.
        """
        places = [place for place, params in enumerate(sampling) if params.has_penalties]
        if not places:
            return None
        prompt_seen, output_counts = self._buffers()
        held = self._tensor([row_numbers[place] for place in places])

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        counts = output_counts[held]
        extra = [(index, token) for index, place in enumerate(places) for token in assumed.get(place, ())]
        if extra:
            _count(counts, *self._tensor_columns(extra))
        return Penalties(
            rows=self._tensor(places),
            prompt_seen=prompt_seen[held],
            output_counts=counts,
            presence=column([sampling[place].presence_penalty for place in places]),
            frequency=column([sampling[place].frequency_penalty for place in places]),
            repetition=column([sampling[place].repetition_penalty for place in places]),
        )

    def count(
        self, sampling: list[SamplingParams], row_numbers: list[int], ids: torch.Tensor, uncertain: Container[int] = ()
    ) -> None:
        """Counts the sampled ids, [samples] int64, of samples with penalties. The host need not know the ids.

        Those of ``uncertain`` samples are left out: ``count_known`` counts what comes of them.
        """
        places = [place for place, params in enumerate(sampling) if params.has_penalties and place not in uncertain]
        if places:
            _, output_counts = self._buffers()
            held = self._tensor([row_numbers[place] for place in places])
            output_counts[held, ids[self._tensor(places)]] += 1

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prompt_seen is None or self._output_counts is None:
            self._prompt_seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._prompt_seen, self._output_counts

    def _tensor_columns(self, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = zip(*pairs, strict=True)
        return self._tensor(list(first)), self._tensor(list(second))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _count(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds one to ``counts``, [rows, vocab] int32, for each (row, token); a pair may stand there more than once."""
    counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
