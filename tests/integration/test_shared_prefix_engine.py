"""Whole generations over a shared prefix: ids are the same whether it is read once or by each sequence, and whether
steps are captured or not. On a GPU when there is one, else in Triton's interpreter and without a capture."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.rotary_kv import rotary_kv
from tests.doubles.tiny_model import save_tiny
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.decode_graphs import DecodeGraphs
from worker.engine import Engine
from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.loader import open_checkpoint
from worker.mixed_graphs import MixedGraphs
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.models import CausalLM
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence, token_array
from worker.shared_prefixes import PrefixGroup, PrefixGrouping
from worker.step_graphs import GraphSizes, StepGraphs
from worker.step_plan import StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, ROWS, OUTPUT = 16, 8, 4
PREFIX = [(7 * place) % 100 + 3 for place in range(130)]  # two tiles of keys and some
# Two that have nothing to do with the others, and one that leaves its row to another before the rest ends.
PROMPTS = [
    *([*PREFIX, *range(50, 50 + own)] for own in (1, 30, 3, 17, 2)),
    *(list(range(20, 60)), PREFIX[1:90], [*PREFIX, 99], [*PREFIX, 98]),
]
FAMILIES = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40},  # every other layer has a window
}


class UncapturedDecodes(DecodeGraphs):
    """Graphs whose replay computes the step operation by operation, and leaves the result where a captured one does."""

    @torch.inference_mode()
    def capture(self, *_: object) -> None:
        for size, prefixes in self._kinds:
            self._send(StepPlan(0), size, [] if prefixes else None)
            step, logits = self._compute(size, prefixes)

            def replay(size=size, prefixes=prefixes, step=step, logits=logits) -> None:
                new_step, new_logits = self._compute(size, prefixes)
                step.sample_rows.copy_(new_step.sample_rows)
                logits.copy_(new_logits)

            self._graphs[size, prefixes] = (SimpleNamespace(replay=replay), step, logits)


class UncapturedMixed(MixedGraphs):
    """As ``UncapturedDecodes``. What a place not in use leaves is made as wrong as can be."""

    @torch.inference_mode()
    def capture(self, *_: object) -> None:
        for size in self._sizes:
            self._send(self._inputs.mixed_columns(StepPlan(0), size)[0])
            hidden = torch.full_like(self._compute(size), torch.nan)

            def replay(size=size, hidden=hidden) -> None:
                hidden.copy_(self._compute(size))

            self._graphs[size] = (SimpleNamespace(replay=replay), hidden)


class Uncaptured:
    def __init__(self, model: CausalLM, cache: KVCache, inputs: GpuInputBuilder, sizes: GraphSizes) -> None:
        self.mixed = UncapturedMixed(model, cache, inputs, sizes.mixed)
        self.decode = UncapturedDecodes(model, cache, inputs, sizes.decode, sizes.prefixes)

    def capture(self, *_: object) -> None:
        self.mixed.capture()
        self.decode.capture()


class Watched(PrefixGrouping):
    """Remembers what it found."""

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE, 3, min_tokens_saved=1)
        self.found: list[PrefixGroup] = []

    def find(self, plan: StepPlan) -> list[PrefixGroup]:
        groups = super().find(plan)
        self.found += groups
        return groups


def generate(folder: Path, grouping: PrefixGrouping | None, graphs: bool) -> list[list[int]]:
    """The outputs of all prompts, which begin once the first one's prefix is cached."""
    config = WorkerConfig(folder, device=DEVICE.type, dtype="float32")
    checkpoint = open_checkpoint(folder)
    model, _ = load_model(config, checkpoint, 256, torch.float32, DEVICE)
    cache = KVCache(checkpoint.config, 100, BLOCK_SIZE, torch.float32, DEVICE)
    inputs = GpuInputBuilder(ROWS, 16, BLOCK_SIZE, DEVICE, grouping)
    captured = None
    if graphs:
        sizes = GraphSizes([16, 150], [ROWS] if grouping else [], [ROWS])
        kind = StepGraphs if DEVICE.type == "cuda" else Uncaptured
        captured = kind(model, cache, inputs, sizes)
        captured.capture(lambda *_: None)
    runner = ModelRunner(model, cache, inputs, ROWS, checkpoint.config.vocab_size, DEVICE, captured)
    engine = Engine(Scheduler(BlockPool(100), BLOCK_SIZE, ROWS, 512), runner)
    sequences = []
    for number, prompt in enumerate(PROMPTS):
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence("test", tokens, SamplingParams(temperature=0.0), OUTPUT + number % 3))
        engine.add(sequences[-1])
        if number == 0:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    return [seq.tokens.tolist()[seq.num_prompt_tokens :] for seq in sequences]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_do_not_depend_on_who_reads_a_prefix(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reference, which a CPU would take, knows no places that are not in use.
    monkeypatch.setattr("kernels.rotary_attention.rotary_kv", rotary_kv)
    save_tiny(tmp_path, family, **FAMILIES[family])
    wanted = generate(tmp_path, None, graphs=False)
    assert len({tuple(output[:4]) for output in wanted}) > 3
    # Windows change kernels, graphs how steps are packed: each is tried with one of the families.
    for graphs in (family == "Llama",) if DEVICE.type == "cpu" else (False, True):
        grouping = Watched()
        assert generate(tmp_path, grouping, graphs) == wanted
        assert {group.keys for group in grouping.found} == {128}
        assert max(len(group.members) for group in grouping.found) >= 5
