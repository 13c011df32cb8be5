"""The speculator that --speculative-config asks for, with its draft model if it needs one."""

import logging
from dataclasses import dataclass, replace
from itertools import zip_longest

from worker.assembly import capture_graphs, input_builder, replays_graphs, warm_up
from worker.block_pool import BlockPool
from worker.config import ConfigError
from worker.engine import Engine
from worker.kv_cache import KVCache, bytes_per_block
from worker.loader import open_checkpoint
from worker.loader.checkpoint import Checkpoint
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.models import CausalLM
from worker.scheduler import Scheduler
from worker.setup import Setup
from worker.speculation.draft_model import ModelDrafter
from worker.speculation.ngram import NgramDrafter
from worker.speculation.speculator import Drafter, Speculator
from worker.vocabulary import VocabularyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """A draft model with its weights on the leader's device, and the setup under which it runs there, whole."""

    checkpoint: Checkpoint
    model: CausalLM
    setup: Setup

    @property
    def bytes_per_block(self) -> int:
        """Of its keys and values; there is one such block beside each of the target's."""
        return bytes_per_block(self.checkpoint.config, self.setup.config.block_size, self.setup.kv_cache_dtype)


def load_draft(setup: Setup, target: Checkpoint) -> Draft | None:
    """The draft model, if one is wanted. Raises ConfigError when it does not belong to the target."""
    wanted = setup.config.speculative_config
    if wanted is None or wanted.model is None:
        return None
    if not wanted.model.exists():
        raise ConfigError(f"--speculative-config: model {wanted.model} is not there; give a folder or a .gguf file")
    checkpoint = open_checkpoint(wanted.model)
    if difference := _vocabulary_difference(checkpoint, target):
        raise ConfigError(
            f"--speculative-config: {checkpoint.name} and {target.name} do not have the same tokens ({difference}); "
            "take a draft model of the same family"
        )
    max_model_len = min(setup.max_model_len, checkpoint.config.max_position)
    config = replace(setup.config, model=wanted.model, quantization=None, speculative_config=None)
    config = replace(config, tensor_parallel_size=1)
    logger.info("draft model %s (%s)", checkpoint.name, checkpoint.config.architecture)
    model, _ = load_model(config, checkpoint, max_model_len, setup.dtype, setup.device)
    return Draft(checkpoint, model, replace(setup, config=config, max_model_len=max_model_len))


def _vocabulary_difference(draft: Checkpoint, target: Checkpoint) -> str:
    """The first id that stands for different tokens, for people; empty when none does. By size, if no one can tell.

    Models may be padded to different sizes: an id without a token is like one that is not there.
    """
    try:
        tokens, others = draft.vocabulary().tokens, target.vocabulary().tokens
    except VocabularyError:
        size, other_size = draft.config.vocab_size, target.config.vocab_size
        return "" if size == other_size else f"{size} and {other_size} of them"
    for token_id, (token, other) in enumerate(zip_longest(tokens, others, fillvalue=b"")):
        if token != other:
            return f"{token_id} is {_shown(token)} in the first and {_shown(other)} in the second"
    return ""


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")) if token else "no token"


def make_speculator(setup: Setup, draft: Draft | None, num_blocks: int, vocab_size: int) -> Speculator | None:
    """What makes the drafts, if any are wanted; a draft model's engine has ``num_blocks`` blocks of its own."""
    wanted = setup.config.speculative_config
    if wanted is None:
        return None
    drafter: Drafter = NgramDrafter(wanted.prompt_lookup_max, wanted.prompt_lookup_min)
    if draft is not None:
        drafter = ModelDrafter(_draft_engine(draft, num_blocks), draft.setup.max_model_len, vocab_size)
    return Speculator(drafter, wanted.num_speculative_tokens)


def _draft_engine(draft: Draft, num_blocks: int) -> Engine:
    """An engine with as many blocks as the target has: what one has cached, the other then has, by and large."""
    setup, model = draft.setup, draft.checkpoint.config
    block_size, rows = setup.config.block_size, setup.max_num_seqs
    cache = KVCache(model, num_blocks, block_size, setup.kv_cache_dtype, setup.device)
    inputs = input_builder(setup, cache, setup.device)
    graphs = None
    if replays_graphs(setup.config, setup.device):
        graphs = capture_graphs(draft.model, cache, inputs, setup)
    runner = ModelRunner(draft.model, cache, inputs, rows, model.vocab_size, setup.device, graphs)
    engine = Engine(Scheduler(BlockPool(num_blocks), block_size, rows, setup.max_num_batched_tokens), runner)
    warm_up(engine, min(setup.max_num_batched_tokens, setup.max_model_len - 1))
    return engine
