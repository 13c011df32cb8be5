"""Drafts by a smaller model: the target's output in fewer steps, and models that do not belong together."""

import json

import pytest
import torch

from tests.doubles.tiny_model import VOCAB, save_tiny
from tests.doubles.tiny_vocabulary import save_tokenizer
from worker.config import ConfigError, WorkerConfig, parse_args
from worker.engine import Engine
from worker.sequence import SamplingParams, Sequence, token_array
from worker.speculation.config import SpeculativeConfig
from worker.startup import build_engine

OUTPUT = 40
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=4),
    SamplingParams(temperature=0, frequency_penalty=0.4, logprobs=1),
    SamplingParams(temperature=1.0, seed=5, top_k=4),
]


@pytest.fixture(autouse=True)
def _threads():
    """Ranks share the cores, and so does the leader, which is this process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and one like it but for the last layer's scale: right often, not always."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    save_tiny(target)
    model = save_tiny(draft)
    for parameter in model.model.layers[-1].parameters():
        parameter.data.mul_(0.7)
    model.save_pretrained(draft)
    return target, draft


def engine_for(target, draft, **settings) -> Engine:
    speculative = None if draft is None else SpeculativeConfig("draft_model", 4, model=draft)
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 80, "block_size": 4, "max_num_seqs": 8}
    defaults |= {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 64}
    return build_engine(WorkerConfig(model=target, speculative_config=speculative, **{**defaults, **settings}))[0]


def run(engine: Engine) -> list[list[int]]:
    sequences = []
    for place, params in enumerate(PARAMS):
        tokens = token_array()
        tokens.extend(range(10 + place, 22 + 3 * place))
        sequences.append(Sequence(f"{place}", tokens, params, OUTPUT))
        engine.add(sequences[-1])
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks
    return [seq.tokens.tolist() for seq in sequences]


@pytest.fixture(scope="module")
def plain(folders):
    return run(engine_for(folders[0], None))


@pytest.mark.parametrize(("async_scheduling", "ranks"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("blocks", [200, 36], ids=["roomy", "preempting"])
def test_output_is_the_target_s(folders, plain, async_scheduling, ranks, blocks):
    settings = {"async_scheduling": async_scheduling, "tensor_parallel_size": ranks, "num_gpu_blocks_override": blocks}
    engine = engine_for(*folders, **settings)
    try:
        assert run(engine) == plain
    finally:
        engine.close()
    assert (engine.scheduler.num_preemptions > 0) == (blocks == 36)
    speculator = engine.scheduler.speculator
    assert 0 < speculator.num_accepted_tokens < speculator.num_draft_tokens
    drafting = speculator._drafter._engine.scheduler
    drafting.pool.check()
    assert drafting.pool.num_available == drafting.pool.num_blocks, "the draft model's blocks leak"


def test_a_model_that_drafts_for_itself_is_always_right(folders, plain):
    """So all that the drafts' engine does around it, its cache of earlier drafts above all, is right too."""
    target = folders[0]
    engine = engine_for(target, target)
    before = engine.num_steps
    tokens = token_array()
    tokens.extend(plain[0][:12])
    seq = Sequence("greedy", tokens, PARAMS[0], 41)
    engine.add(seq)
    computed = engine.scheduler.speculator._drafter._engine.scheduler.num_prefill_tokens
    while engine.has_unfinished:
        engine.step()
    assert seq.tokens.tolist()[: len(plain[0])] == plain[0]
    speculator = engine.scheduler.speculator
    assert speculator.num_accepted_tokens == speculator.num_draft_tokens == 32
    assert engine.num_steps - before == 1 + 8
    computed = speculator._drafter._engine.scheduler.num_prefill_tokens - computed
    assert computed < 13 + 8 * (4 + 5), "tokens before the last block are computed again"


def test_beyond_the_draft_model_s_length_there_are_no_drafts(folders, tmp_path):
    save_tiny(tmp_path, max_position_embeddings=32)
    engine = engine_for(folders[0], tmp_path)
    tokens = token_array()
    tokens.extend(range(10, 40))
    engine.add(Sequence("long", tokens, PARAMS[0], OUTPUT))
    longest = 0
    while engine.has_unfinished:
        engine.step()
        longest = max(longest, engine.scheduler.speculator.num_draft_tokens)
    assert longest <= 2


def test_other_tokens_are_refused(folders, tmp_path):
    save_tiny(tmp_path / "wider", vocab_size=VOCAB + 64)
    with pytest.raises(ConfigError, match=r"do not have the same tokens \(192 and 128 of them\)"):
        engine_for(folders[0], tmp_path / "wider")
    for name in ("target", "same", "other"):
        save_tiny(tmp_path / name)
        save_tokenizer(tmp_path / name)
    path = tmp_path / "other" / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(raw))
    engine_for(tmp_path / "target", tmp_path / "same")
    with pytest.raises(ConfigError) as refusal:
        engine_for(tmp_path / "target", tmp_path / "other")
    said = f"other and target do not have the same tokens (40 is {second!r} in the first and {first!r} in the second)"
    assert said in str(refusal.value)
    with pytest.raises(ConfigError, match=r"--speculative-config: model .*absent is not there"):
        engine_for(folders[0], tmp_path / "absent")


def test_the_flag_needs_a_model():
    for given in ({}, {"model": 4}):
        text = json.dumps({"method": "draft_model", "num_speculative_tokens": 4, **given})
        with pytest.raises(ConfigError, match="--speculative-config: model is"):
            parse_args(["--model", "m", "--speculative-config", text])
