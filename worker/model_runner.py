"""Runs planned steps on the device: forward pass, logits, sampling. Decides nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.logit_adjustments import adjust_logits
from kernels.logprobs import token_logprobs
from kernels.sampling import sample
from kernels.token_bitmask import TokenBitmask
from worker.engine import LaunchedStep
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.sequence import TokenLogprobs
from worker.step_input import InputBuilder, build_adjustments, build_bitmask, build_sampling
from worker.step_plan import PromptRow, Sampled, StepPlan, assumed_tokens, prompt_logit_pieces
from worker.token_history import TokenHistory

if TYPE_CHECKING:
    from worker.step_graphs import StepGraphs


class ModelRunner:
    """The model, its KV cache and the per-row buffers on one device.

    Args:
        model: with its weights.
        cache: the paged keys and values.
        inputs: builds the steps' tensors, and keeps the sampled ids on the device, so that no step waits for the host
            to learn them.
        max_num_seqs: rows of the buffers.
        vocab_size: tokens.
        device: where everything lives.
        graphs: captured steps; None computes all steps operation by operation.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        inputs: InputBuilder,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        graphs: "StepGraphs | None" = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.inputs = inputs
        self.device = device
        self.graphs = graphs
        self.history = TokenHistory(max_num_seqs, vocab_size, device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step: at once on a GPU, to its end, or to its sampling, on a CPU."""
        result = StepResult()
        replayed = self.graphs.decode.replay(plan) if self.graphs is not None else None
        if replayed is not None:
            logits, rows = replayed
        else:
            hidden, sample_tokens, rows = self._compute(plan)
            result.prompt_logprobs = [self._prompt_logprobs(plan, row, hidden) for row in plan.prompt_logprobs]
            if plan.samples:
                logits = self.model.logits(hidden.index_select(0, sample_tokens))
        self.history.count_known(plan.verified)
        self.history.begin(plan.histories)
        if plan.constrained:
            result.go_on = lambda bitmask: self._finish(
                plan, logits, rows, build_bitmask(plan.constrained, bitmask, self.device), result
            )
        elif plan.samples:
            self._finish(plan, logits, rows, None, result)
        else:
            self._record(result)
        return result

    def _compute(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last layer's output, [tokens or more, hidden]; what of it is sampled, and for which rows, [samples]."""
        replayed = self.graphs.mixed.replay(plan) if self.graphs is not None else None
        if replayed is not None:
            return replayed
        step = self.inputs.build(plan)
        hidden = self.model(step.token_ids, step.positions, self.cache, step.attention)
        return hidden, step.sample_tokens, step.sample_rows

    @torch.inference_mode()
    def _finish(
        self, plan: StepPlan, logits: torch.Tensor, rows: torch.Tensor, mask: TokenBitmask | None, result: "StepResult"
    ) -> None:
        """Samples, and keeps the ids for the next step.

        Of a row with drafts, any of its ids is kept: which one counts the host says, and its next step begins with
        a token that the host knows.
        """
        ids = self._sample(plan, logits, mask, result)
        self.inputs.last_tokens.index_copy_(0, rows, ids)
        self._record(result)

    def _record(self, result: "StepResult") -> None:
        if self.device.type == "cuda":
            result.copied = torch.cuda.Event()
            result.copied.record()

    def _sample(
        self, plan: StepPlan, logits: torch.Tensor, mask: TokenBitmask | None, result: "StepResult"
    ) -> torch.Tensor:
        """Samples an id for each row, [samples] int64, and sends what the host is to know on its way."""
        rows = [plan.rows[index] for index in plan.samples]
        drafted = assumed_tokens(plan)
        penalties = self.history.penalties(plan.sampling, rows, drafted)
        rules = build_adjustments(plan.sampling, plan.banned, penalties, mask, self.device)
        adjusted = logits if rules is None else adjust_logits(logits, rules)
        ids = sample(adjusted, build_sampling(plan.sampling, plan.output_indices, self.device))
        self.history.count(plan.sampling, rows, ids, drafted)
        result.ids = _to_host(ids)
        top_counts = {
            place: params.logprobs for place, params in enumerate(plan.sampling) if params.logprobs is not None
        }
        if top_counts:
            places = torch.tensor(list(top_counts), device=self.device)
            columns = token_logprobs(logits[places], ids[places], max(top_counts.values()))
            result.logprobs = LogprobColumns(*map(_to_host, columns))
            result.top_counts = top_counts
        return ids

    def _prompt_logprobs(self, plan: StepPlan, row: PromptRow, hidden: torch.Tensor) -> list["LogprobColumns"]:
        """Log-probabilities of a chunk's targets, a few tokens at a time."""
        targets = torch.tensor(row.targets.tolist(), dtype=torch.int64, device=self.device)
        columns = []
        done = 0
        for piece in prompt_logit_pieces(plan, row):
            logits = self.model.logits(hidden[piece.start : piece.stop])
            wanted = targets[done : done + len(piece)]
            columns.append(LogprobColumns(*map(_to_host, token_logprobs(logits, wanted, row.top_count))))
            done += len(piece)
        return columns

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Nothing is lost between steps that are computed here."""

    def close(self) -> None:
        """Nothing to end."""


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete once the device's work so far is; the tensor itself on a CPU."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class LogprobColumns:
    """On the host: log-probabilities [n], alternatives' ids [n, k] and log-probabilities [n, k]."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def rows(self) -> list[TokenLogprobs]:
        """One value for each token."""
        columns = zip(self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [TokenLogprobs(*row) for row in columns]


class StepResult:
    """What a step computes for the host; valid once the copies' event has passed."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None
        self.logprobs: LogprobColumns | None = None
        self.top_counts: dict[int, int] = {}  # of the samples with log-probabilities
        self.prompt_logprobs: list[list[LogprobColumns]] = []
        self.copied: torch.cuda.Event | None = None
        self.go_on: Callable[[NDArray[np.int32]], None] | None = None  # what is left of a step that waits for masks

    def sample(self, bitmask: NDArray[np.int32]) -> None:
        """Goes on with a step that waits for the masks of its grammars, [constrained, words]."""
        assert self.go_on is not None
        self.go_on(bitmask)
        self.go_on = None

    def sampled(self) -> Sampled:
        """Waits for the copies and returns the values."""
        if self.copied is not None:
            self.copied.synchronize()
        ids = [] if self.ids is None else self.ids.tolist()
        logprobs: list[TokenLogprobs | None] = []
        if self.logprobs is not None:
            logprobs = [None] * len(ids)
            for (place, count), row in zip(self.top_counts.items(), self.logprobs.rows(), strict=True):
                logprobs[place] = TokenLogprobs(row.logprob, row.top_ids[:count], row.top_logprobs[:count])
        prompts = [[row for piece in pieces for row in piece.rows()] for pieces in self.prompt_logprobs]
        return Sampled(ids, logprobs, prompts)
