"""Greedy ids of the demo model in float32 equal transformers' ``generate``, whatever the engine does around them."""

import random
import warnings

import pytest

from tests.doubles.demo_oracle import TieWarning
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.sequence import SamplingParams, Sequence, token_array
from worker.startup import build_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIE = 1e-4
OUTPUT_TOKENS = 16

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Répondez en français: quelle heure est-il?",
    "List three prime numbers above 1,305 and say why 1305 is not one.",
    "Translate to German: the café sold crêpes 🥞 and <b>tea</b>.",
    "def fibonacci(n):\n    # finish this function\n",
    "",
]
RAW = [
    "One, two, three, four,",
    "The quick brown fox",
    "import torch\n\nclass Attention(torch.nn.Module):\n",
    "🚀🌍🚀🌍🚀🌍",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Once upon a time there was a river that",
    '{"name": "Ada", "born":',
]
WORDS = [
    "river",
    "stone",
    "light",
    "engine",
    "paper",
    "choir",
    "block",
    "of",
    "the",
    "and",
    "a",
    "in",
    "under",
    "over",
    "7",
    "42,",
    "while.",
    "not",
    "every\n",
]


@pytest.fixture(scope="module")
def prompts(greedy_oracle):
    """24 prompts of 1 to 3,000 tokens: chats, raw text, long texts, and two that share a long prefix."""
    tokenizer = greedy_oracle.tokenizer
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in CHATS
    ]
    ids += [tokenizer(text)["input_ids"] for text in RAW]
    chance = random.Random(0)
    for length in (63, 64, 65, 200, 511, 900):
        text = " ".join(chance.choice(WORDS) for _ in range(2 * length))
        ids.append(tokenizer(text)["input_ids"][:length])
    long = tokenizer(" ".join(chance.choice(WORDS) for _ in range(6000)))["input_ids"][:3000]
    ids += [long, long[:1500] + ids[0], [5]]
    assert len(ids) == 24
    assert (min(map(len, ids)), max(map(len, ids))) == (1, 3000)
    return ids


@pytest.fixture(scope="module")
def oracle(greedy_oracle, prompts):
    return greedy_oracle.tokenizer.eos_token_id, greedy_oracle(prompts, OUTPUT_TOKENS)


def engine_for(demo_model, **settings) -> Engine:
    """Steps of at most 256 tokens, unless ``settings`` says otherwise: the first step, which is full, is short then."""
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 256, **settings}
    engine, _ = build_engine(WorkerConfig(model=demo_model, dtype="float32", **settings))
    return engine


def generate(engine: Engine, prompts: list[list[int]], eos: int, at_once: int) -> list[list[int]]:
    """Greedy output of every prompt, ``at_once`` of them in the engine at any time."""
    outputs: list[list[int]] = [[] for _ in prompts]
    todo = list(enumerate(prompts))[::-1]
    running: dict[Sequence, int] = {}
    while todo or running:
        while todo and len(running) < at_once:
            index, prompt = todo.pop()
            tokens = token_array()
            tokens.extend(prompt)
            seq = Sequence(
                str(index), tokens, SamplingParams(temperature=0.0), OUTPUT_TOKENS, stop_token_ids=frozenset([eos])
            )
            running[seq] = index
            engine.add(seq)
        output = engine.step()
        engine.scheduler.pool.check()
        for seq, first, ids in output.tokens:
            assert first == len(outputs[running[seq]])
            outputs[running[seq]].extend(ids)
        for seq in output.finished:
            del running[seq]
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks
    return outputs


def assert_equal(outputs, expected) -> None:
    """Every id is the oracle's. At a tie of the oracle's two best logits the rest of that output is excused, aloud."""
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        if got == want.tokens:
            continue
        place = next((i for i, pair in enumerate(zip(got, want.tokens, strict=False)) if pair[0] != pair[1]), None)
        assert place is not None, f"prompt {index}: {len(got)} tokens instead of {len(want.tokens)}"
        margin = want.margins[place]
        assert margin < TIE, f"prompt {index} differs at token {place}, where the best logit leads by {margin}"
        warnings.warn(
            f"prompt {index}: tie at token {place}, the best logit leads by {margin}", TieWarning, stacklevel=2
        )


@pytest.mark.parametrize(
    ("at_once", "longest", "settings"),
    [
        pytest.param(1, 900, {"enable_prefix_caching": False, "max_num_batched_tokens": 900}, id="alone-whole-prompts"),
        pytest.param(16, 900, {"enable_prefix_caching": False}, id="16-at-once"),
        pytest.param(
            16, 3000, {"enable_prefix_caching": True, "async_scheduling": True}, id="16-at-once-cached-overlapped"
        ),
        pytest.param(24, 900, {"max_num_batched_tokens": 100, "max_num_seqs": 24}, id="chunks-of-100"),
        pytest.param(
            8, 3000, {"max_num_batched_tokens": 1000, "long_prefill_token_threshold": 333}, id="chunks-of-333"
        ),
    ],
)
@pytest.mark.filterwarnings("always::tests.doubles.demo_oracle.TieWarning")
def test_equal_to_transformers(demo_model, prompts, oracle, at_once, longest, settings):
    """The two prompts above 900 tokens take as long as all others: they are left to those for which length matters."""
    eos, expected = oracle
    chosen = [index for index, prompt in enumerate(prompts) if len(prompt) <= longest]
    outputs = generate(engine_for(demo_model, **settings), [prompts[index] for index in chosen], eos, at_once)
    assert_equal(outputs, [expected[index] for index in chosen])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_equal_under_forced_preemption(demo_model, prompts, oracle, async_scheduling):
    """The pool holds little more than the longest prompt, so that sequences push each other out."""
    eos, expected = oracle
    short = [index for index, prompt in enumerate(prompts) if len(prompt) < 300]
    engine = engine_for(demo_model, max_model_len=400, num_gpu_blocks_override=26, async_scheduling=async_scheduling)
    outputs = generate(engine, [prompts[index] for index in short], eos, 16)
    assert engine.scheduler.num_preemptions > 0
    assert_equal(outputs, [expected[index] for index in short])


def test_equal_when_everything_is_cached(demo_model, prompts, oracle):
    """The second time, all full blocks of each prompt are found again."""
    eos, expected = oracle
    engine = engine_for(demo_model)
    chosen = [index for index, prompt in enumerate(prompts) if len(prompt) < 600]
    for _ in range(2):
        outputs = generate(engine, [prompts[index] for index in chosen], eos, 8)
        assert_equal(outputs, [expected[index] for index in chosen])
