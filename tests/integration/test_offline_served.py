"""The offline API and the served path say the same of one request: text, ids, log-probabilities, ends and usage."""

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from quire import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.offline.prompts import put_prompt
from tests.doubles.processes import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = {"dtype": "float32", "max_model_len": 512}
FLAGS = ("--dtype", "float32", "--max-model-len", "512")
COUNTING = "One, two, three,"
REASONS = {sampling_pb2.FINISH_REASON_STOP: "stop", sampling_pb2.FINISH_REASON_LENGTH: "length"}

REQUESTS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11, "temperature": 0.8, "top_p": 0.9},
    "negative seed": {"seed": -3, "top_k": 40},
    "three choices": {"seed": 5, "n": 3},
    "stop string": {"temperature": 0.0, "stop": [" six", "seven"]},
    "stop string kept": {"temperature": 0.0, "stop": "five,", "include_stop_str_in_output": True},
    "stop token": {"temperature": 0.0, "stop_token_ids": [28], "min_tokens": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.1},
    "bans": {"temperature": 0.0, "bad_words": ["four", "five"], "logit_bias": {28: -3.3}},
    "allowed": {"seed": 1, "allowed_token_ids": [28, 216, 1876]},
    "stop string after min_tokens": {"temperature": 0.0, "stop": [","], "min_tokens": 5},
    "schema": {"seed": 2, "structured_outputs": StructuredOutputsParams(json={"enum": ["a", {"b": [1, 2]}]})},
    "choices of a grammar": {
        "seed": 3,
        "n": 2,
        "structured_outputs": StructuredOutputsParams(regex="[a-z]{4}-[0-9]{4}"),
    },
    "log-probabilities": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def served(demo_model):
    """The router of a running stack."""
    stack = Stack(demo_model, *FLAGS)
    try:
        stack.start()
        with grpc.insecure_channel(f"127.0.0.1:{stack.router_port}") as channel:
            yield inference_pb2_grpc.InferenceStub(channel)
    finally:
        stack.close()


@pytest.fixture(scope="module")
def llm(demo_model):
    llm = LLM(demo_model, **SETTINGS)
    yield llm
    llm.llm_engine.close()


def events_of(call):
    return [event for response in call for event in response.events]


@pytest.mark.parametrize("case", REQUESTS)
def test_offline_and_served_agree(llm, served, case):
    params = SamplingParams(**{"max_tokens": 16, **REQUESTS[case]}, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = f"{case}: {COUNTING}"
    request = params.to_request()
    request.model = "model"
    put_prompt(request, prompt)
    events = events_of(served.Generate(request, timeout=120))
    deltas = {event.delta.index: event.delta for event in events if event.HasField("delta")}
    ends = {event.finished.index: event.finished for event in events if event.HasField("finished")}

    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert len(output.outputs) == len(ends) == params.n
    for completion in output.outputs:
        delta, end = deltas[completion.index], ends[completion.index]
        assert completion.text == delta.text
        assert completion.token_ids == list(delta.token_ids)
        assert completion.finish_reason == REASONS[end.reason]
        cause = end.WhichOneof("stop_cause")
        assert completion.stop_reason == (getattr(end, cause) if cause else None)
        assert len(output.prompt_token_ids) == end.usage.prompt_tokens
        assert len(completion.token_ids) == end.usage.completion_tokens
        if params.logprobs is not None:
            ours = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert [one.logprob for one in ours] == pytest.approx(list(delta.logprobs.logprobs), abs=1e-4)
            assert [token for entry in completion.logprobs for token in entry] == list(delta.logprobs.top_token_ids)
    assert output.num_cached_tokens == min(end.usage.cached_tokens for end in ends.values())
    if params.prompt_logprobs is not None:
        [report] = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
        ours = [
            entry[token].logprob
            for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ]
        assert ours == pytest.approx(list(report.logprobs.logprobs[1:]), abs=1e-4)


def test_chats_agree(llm, served):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|> What is this?"}]
    params = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.FINAL_ONLY)
    request = params.to_request()
    request.model = "model"
    request.chat.CopyFrom(inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**each) for each in messages]))
    [delta] = [event.delta for event in events_of(served.Generate(request, timeout=120)) if event.HasField("delta")]
    [output] = llm.chat(messages, params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (delta.text, list(delta.token_ids))
