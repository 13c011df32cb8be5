"""Prompt lookup with the demo model, offline: the same text in fewer steps, also where stop strings end it."""

import dataclasses
import json

import grpc
import pytest

from protos import inference_pb2_grpc
from quire import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.offline.prompts import put_prompt
from tests.doubles.processes import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SETTINGS = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 8}
LINE = "The harbour master wrote down every ship by name, by cargo and by the hour.\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.3, seed=11, max_tokens=24, ignore_eos=True),
    "penalties": dataclasses.replace(GREEDY, frequency_penalty=0.05, repetition_penalty=1.02),
    "logprobs": dataclasses.replace(GREEDY, logprobs=2),
    # They end in the midst of what one step accepts.
    "stop string": dataclasses.replace(GREEDY, stop=["by name, by c"]),
    "stop string with log-probabilities": dataclasses.replace(GREEDY, stop=["e down ev"], logprobs=1),
    "several": SamplingParams(temperature=0.5, seed=3, max_tokens=16, n=2),
    "grammar": dataclasses.replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="(The ship ){1,9}end")),
}


def generate(demo_model, **settings):
    """Outputs of all requests together, and how many steps and drafts they took."""
    llm = LLM(demo_model, **SETTINGS, **settings)
    engine = llm.llm_engine._engine
    try:
        outputs = llm.generate([LINE * 3] * len(PARAMS), list(PARAMS.values()), use_tqdm=False)
        before = engine.num_steps
        [alone] = llm.generate(LINE * 3, GREEDY, use_tqdm=False)
        steps = engine.num_steps - before
        engine.scheduler.pool.check()
        assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks
    finally:
        llm.llm_engine.close()
    return outputs, alone, steps, engine.scheduler.speculator


@pytest.fixture(scope="module")
def plain(demo_model):
    return generate(demo_model)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_text_that_repeats_is_the_same_in_fewer_steps(demo_model, plain, async_scheduling):
    outputs, alone, steps, speculator = generate(
        demo_model, speculative_config=NGRAM, async_scheduling=async_scheduling
    )
    for name, got, want in zip(PARAMS, outputs, plain[0], strict=True):
        for ours, theirs in zip(got.outputs, want.outputs, strict=True):
            assert (ours.token_ids, ours.text, ours.finish_reason, ours.stop_reason) == (
                *(theirs.token_ids, theirs.text, theirs.finish_reason, theirs.stop_reason),
            ), name
            assert len(ours.logprobs or []) == len(theirs.logprobs or [])
    assert alone.outputs[0].token_ids == plain[1].outputs[0].token_ids
    assert steps < plain[2] / 2
    assert speculator.num_accepted_tokens > speculator.num_draft_tokens / 2
    assert {output.outputs[0].finish_reason for output in outputs} == {"length", "stop"}


def test_served_with_drafts_is_offline_without(demo_model, plain):
    """Through router and worker processes: the flag, steps of several tokens, and a stop string in the midst of one."""
    stack = Stack(demo_model, "--dtype", "float32", "--max-model-len", "512", "--speculative-config", json.dumps(NGRAM))
    try:
        stack.start()
        with grpc.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for (name, params), want in zip(PARAMS.items(), plain[0], strict=True):
                request = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA).to_request()
                request.model = "model"
                put_prompt(request, LINE * 3)
                texts = [""] * params.n
                responses = stub.Generate(request, timeout=120)
                for event in (event for response in responses for event in response.events):
                    if event.HasField("delta"):
                        texts[event.delta.index] += event.delta.text
                assert texts == [completion.text for completion in want.outputs], name
    finally:
        stack.close()
