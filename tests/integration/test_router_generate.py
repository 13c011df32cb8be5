"""Generate through a real router and a fake worker: prompts, output, choices, stops, limits."""

import asyncio

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import inference_pb2, sampling_pb2
from tests.integration.fake_worker import LENGTH, STOP, FakeWorker, count_up
from tests.integration.router_stack import failure, running_router

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EOS = 2


def scripted(tokenizer, text: str, *tail: int):
    """A model that says this text, then the tokens of ``tail``, whatever the prompt."""
    ids = [*tokenizer.encode_text(text), *tail]
    return lambda prompt, index: ids[index] if index < len(ids) else 1000


def stopping(**fields):
    return sampling_pb2.StopConditions(**fields)


async def test_streams_text_and_ids_up_to_the_limit(demo_tokenizer):
    prompt = demo_tokenizer.encode_text("Once upon a time")
    expected = [count_up(prompt, index) for index in range(100)]
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        answer = await client.generate(
            request_id="r1", stopping=stopping(max_tokens=100), output=inference_pb2.OutputOptions(token_ids=True)
        )
        (started,) = answer.started
        assert (started.request_id, started.model, started.prompt_tokens) == ("r1", "demo", len(prompt))
        assert answer.ids() == expected
        assert answer.text() == demo_tokenizer.decode(expected)
        assert answer.finished[0].reason == LENGTH
        assert answer.finished[0].usage == sampling_pb2.Usage(
            prompt_tokens=len(prompt), completion_tokens=100, cached_tokens=3
        )
        await client.until_running(0)


async def test_without_max_tokens_the_context_is_filled(demo_tokenizer):
    async with FakeWorker(max_model_len=64) as worker, running_router(demo_tokenizer, worker) as client:
        answer = await client.generate()
        prompt_tokens = answer.started[0].prompt_tokens
        assert answer.finished[0].usage.completion_tokens == 64 - prompt_tokens
        assert answer.finished[0].reason == LENGTH


async def test_everything_is_resolved_for_the_worker(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        await client.generate(stopping=stopping(max_tokens=1))
        submit = worker.submits[0]
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            assert submit.sampling.HasField(name)
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (1, 1, 0)
        assert submit.sampling.seed < 2**63
        assert list(submit.stop_token_ids) == [EOS]
        assert 0 < submit.time_left_ms < 31_000  # gRPC rounds up on its way
        await client.generate(
            timeout=None,
            sampling=sampling_pb2.SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=9),
            stopping=stopping(max_tokens=1, ignore_eos=True, stop_token_ids=[77]),
            cache_salt="salt",
        )
        submit = worker.submits[1]
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
            0,
            0.5,
            7,
            0.25,
            9,
        )
        assert list(submit.stop_token_ids) == [77]
        assert submit.cache_salt == b"salt"
        assert not submit.HasField("time_left_ms")


async def test_a_stop_string_does_not_count_before_min_tokens(demo_tokenizer):
    """The first "stop" is complete within the first min_tokens tokens: the second one ends the output."""
    text = "Go stop go on stop here"
    ids = demo_tokenizer.encode_text(text)
    first = next(count for count in range(len(ids)) if demo_tokenizer.decode(ids[:count]).endswith("stop"))
    script = scripted(demo_tokenizer, text)
    async with FakeWorker(token=script) as worker, running_router(demo_tokenizer, worker) as client:
        for min_tokens, expected in ((first - 1, "Go "), (first, "Go stop go on ")):
            answer = await client.generate(stopping=stopping(max_tokens=50, stop=["stop"], min_tokens=min_tokens))
            assert answer.text() == expected
            assert (answer.finished[0].reason, answer.finished[0].stop_string) == (STOP, "stop")


async def test_choices_have_their_own_seeds_and_streams(demo_tokenizer):
    async with FakeWorker(max_slots=2) as worker, running_router(demo_tokenizer, worker) as client:
        answer = await client.generate(
            n=5,
            sampling=sampling_pb2.SamplingParams(seed=2**64 - 2),
            stopping=stopping(max_tokens=9),
            output=inference_pb2.OutputOptions(token_ids=True),
        )
        assert sorted(submit.sampling.seed for submit in worker.submits) == [0, 1, 2, 2**64 - 2, 2**64 - 1]
        assert set(answer.finished) == set(range(5))
        assert all(len(answer.ids(index)) == 9 for index in range(5))


async def test_what_is_there_together_comes_in_one_message(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        worker.stream.credit = 0  # so that the worker has the whole answer before it may send any of it
        call = client.call(n=2, stopping=stopping(max_tokens=5))
        await worker.until(lambda: len(worker.stream.finished) == 2)
        worker.stream.credit = 10
        worker.stream.wake.set()
        kinds = [event.WhichOneof("event") async for event in call]
        assert kinds == ["started", "delta", "finished", "delta", "finished"]
        assert call.messages == 1


async def test_final_only_sends_one_delta_a_choice(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        output = inference_pb2.OutputOptions(final_only=True)
        answer = await client.generate(n=2, stopping=stopping(max_tokens=50), output=output)
        assert sorted(delta.index for delta in answer.deltas) == [0, 1]
        assert answer.text(0) == answer.text(1) != ""


async def test_text_can_be_left_out(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        output = inference_pb2.OutputOptions(text=False, token_ids=True)
        answer = await client.generate(stopping=stopping(max_tokens=5), output=output)
        assert answer.text() == ""
        assert len(answer.ids()) == 5


@pytest.mark.parametrize("merge", [1, 3, 100])
@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_ends_text_and_usage(demo_tokenizer, merge, keep):
    text = "The first line.\nThe second one, END and more after it."
    token = scripted(demo_tokenizer, text)
    ids = demo_tokenizer.encode_text(text)
    needed = next(n for n in range(len(ids)) if "END" in demo_tokenizer.decode(ids[:n]))
    async with FakeWorker(token=token, merge=merge) as worker, running_router(demo_tokenizer, worker) as client:
        answer = await client.generate(
            stopping=stopping(stop=["nowhere", "END"], include_stop_str_in_output=keep, max_tokens=300),
            output=inference_pb2.OutputOptions(token_ids=True),
        )
        assert answer.text() == "The first line.\nThe second one, " + ("END" if keep else "")
        finished = answer.finished[0]
        assert (finished.reason, finished.stop_string) == (STOP, "END")
        assert finished.usage.completion_tokens == needed == len(answer.ids())
        await client.until_running(0)
        # The worker was told, unless it had come to the end by itself.
        assert worker.cancels or merge == 100


async def test_stop_string_that_never_comes_hides_nothing(demo_tokenizer):
    token = scripted(demo_tokenizer, "almost EN", EOS)
    async with FakeWorker(token=token) as worker, running_router(demo_tokenizer, worker) as client:
        answer = await client.generate(stopping=stopping(stop=["END"]))
        assert answer.text() == "almost EN"
        assert answer.finished[0].reason == STOP
        assert answer.finished[0].WhichOneof("stop_cause") is None


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abc")])
async def test_stop_token_is_named_and_left_out_of_the_text(demo_tokenizer, keep, text):
    a, b, c = (demo_tokenizer.encode_text(letter)[0] for letter in "abc")
    async with (
        FakeWorker(token=lambda prompt, index: [a, b, c, a][index]) as worker,
        running_router(demo_tokenizer, worker) as client,
    ):
        answer = await client.generate(stopping=stopping(stop_token_ids=[c], include_stop_str_in_output=keep))
        assert answer.text() == text
        assert (answer.finished[0].reason, answer.finished[0].stop_token_id) == (STOP, c)
        assert answer.finished[0].usage.completion_tokens == 3


@pytest.mark.parametrize("final_only", [False, True])
async def test_half_a_character_at_the_end(demo_tokenizer, final_only):
    """What the limit has cut is left out; what the model itself left incomplete is told."""
    ids = demo_tokenizer.encode_text("🥞")
    end = demo_tokenizer.encode_text("b")[0]
    assert len(ids) > 1
    output = inference_pb2.OutputOptions(token_ids=True, final_only=final_only)
    async with (
        FakeWorker(token=lambda prompt, index: ids[index]) as worker,
        running_router(demo_tokenizer, worker) as client,
    ):
        whole = await client.generate(stopping=stopping(max_tokens=len(ids)), output=output)
        assert [delta.text for delta in whole.deltas if delta.text] == ["🥞"]
        half = await client.generate(stopping=stopping(max_tokens=1), output=output)
        assert (half.text(), half.ids(), half.finished[0].usage.completion_tokens) == ("", ids[:1], 1)
    async with (
        FakeWorker(token=lambda prompt, index: [ids[0], end][index]) as worker,
        running_router(demo_tokenizer, worker) as client,
    ):
        left = await client.generate(stopping=stopping(stop_token_ids=[end]), output=output)
        assert (left.text(), left.finished[0].reason) == ("\ufffd", STOP)


async def test_token_id_prompts_go_through_untouched(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        ids = [5, 0, 49151, 70]
        await client.generate(token_ids=inference_pb2.TokenIds(ids=ids), stopping=stopping(max_tokens=1))
        assert worker.submits[0].prompt_token_ids == b"".join(i.to_bytes(4, "little") for i in ids)


async def test_chat_is_templated(demo_tokenizer):
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="Hi <|im_end|>")])
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        await client.generate(chat=chat, stopping=stopping(max_tokens=1))
        tokenized = await client.stub.Tokenize(inference_pb2.TokenizeRequest(model="demo", chat=chat))
        packed = b"".join(i.to_bytes(4, "little") for i in tokenized.token_ids)
        assert worker.submits[0].prompt_token_ids == packed
        assert list(tokenized.token_ids).count(EOS) == 2  # system and user turn, not the client's words
        assert tokenized.max_model_len == 512


NAN = float("nan")
WRONG = [
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"request_id": "r1\n2026-01-01 ERROR router: forged"}, "request_id"),
    ({"request_id": "r1\x00"}, "request_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"sampling": sampling_pb2.SamplingParams(temperature=2.5)}, "sampling.temperature"),
    ({"sampling": sampling_pb2.SamplingParams(temperature=NAN)}, "sampling.temperature"),
    ({"sampling": sampling_pb2.SamplingParams(temperature=-0.5)}, "sampling.temperature"),
    ({"sampling": sampling_pb2.SamplingParams(top_p=0)}, "sampling.top_p"),
    ({"sampling": sampling_pb2.SamplingParams(top_p=float("inf"))}, "sampling.top_p"),
    ({"sampling": sampling_pb2.SamplingParams(min_p=1.5)}, "sampling.min_p"),
    ({"stopping": stopping(max_tokens=0)}, "stopping.max_tokens"),
    ({"stopping": stopping(stop=["a"] * 17)}, "stopping.stop"),
    ({"stopping": stopping(stop=["a", ""])}, "stopping.stop[1]"),
    ({"stopping": stopping(stop=["a" * 257])}, "stopping.stop[0]"),
    ({"stopping": stopping(stop_token_ids=[1, 49152])}, "stopping.stop_token_ids[1]"),
    ({"token_ids": inference_pb2.TokenIds(ids=[1, 2, 3, 49152])}, "token_ids.ids[3]"),
    ({"token_ids": inference_pb2.TokenIds()}, "token_ids"),
    ({"text": ""}, "text"),
    ({"chat": inference_pb2.Chat()}, "chat.messages"),
    ({"chat": inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content="x")])}, "chat.messages[0].role"),
    ({"model": ""}, "model"),
]


async def test_wrong_fields_are_named(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        for fields, field in WRONG:
            failed = await failure(client.generate(**fields))
            assert (failed.code, failed.field) == (INVALID, field), fields
        no_prompt = inference_pb2.GenerateRequest(model="demo")
        failed = await failure(client.stub.Generate(no_prompt).read())
        assert (failed.code, failed.field) == (INVALID, "prompt")
        assert not worker.submits
        assert (await client.explain()).queued == 0


async def test_what_does_not_fit_the_context_is_refused_with_numbers(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        for fields, field in (
            ({"token_ids": inference_pb2.TokenIds(ids=[1] * 512)}, "token_ids"),
            ({"token_ids": inference_pb2.TokenIds(ids=[1] * 500), "stopping": stopping(max_tokens=13)},
             "stopping.max_tokens"),
            ({"text": "word " * 100_000}, "text"),
        ):  # fmt: skip
            failed = await failure(client.generate(**fields))
            assert (failed.code, failed.field, failed.reason) == (INVALID, field, "CONTEXT_LENGTH_EXCEEDED")
            assert "512" in failed.message
        await client.generate(token_ids=inference_pb2.TokenIds(ids=[1] * 500), stopping=stopping(max_tokens=12))


async def test_unknown_models_and_ids_in_use(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        failed = await failure(client.generate(model="other"))
        assert (failed.code, failed.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        worker.gate.clear()
        first = asyncio.create_task(client.generate(model="alias", request_id="same", stopping=stopping(max_tokens=3)))
        await client.until_running(1)
        failed = await failure(client.generate(request_id="same"))
        assert (failed.code, failed.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        worker.gate.set()
        assert (await first).started[0].model == "alias"
        await client.generate(request_id="same", stopping=stopping(max_tokens=3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet=st.sampled_from("abE ND\n🥞é漢"), min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet=st.sampled_from("abEND\n🥞"), min_size=1, max_size=4), max_size=3),
    merge=st.integers(1, 5),
)
def test_any_text_and_stops_end_where_they_should(demo_tokenizer, text, stops, merge):
    """Against the plain definition: the text ends at the match that ends first, and of those at the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, minus_length, stop = min(ends, default=(len(text), 0, ""))

    async def run():
        token = scripted(demo_tokenizer, text, EOS)
        async with FakeWorker(token=token, merge=merge) as worker, running_router(demo_tokenizer, worker) as client:
            return await client.generate(stopping=stopping(stop=stops))

    answer = asyncio.run(run())
    assert answer.text() == text[: end + minus_length]
    assert answer.finished[0].stop_string == stop
    assert answer.finished[0].reason == STOP


async def test_log_probabilities_of_a_prompt_must_fit_into_a_message(demo_tokenizer):
    async with FakeWorker(max_model_len=100_000) as worker, running_router(demo_tokenizer, worker) as client:
        output = inference_pb2.OutputOptions(prompt_logprobs=20)
        prompt = inference_pb2.TokenIds(ids=[100] * 30_000)
        failed = await failure(client.call(token_ids=prompt, output=output).read())
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "of at most 24966" in failed.message
        assert not worker.submits


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_messages_that_cannot_be_parsed_are_the_clients_fault(demo_tokenizer, caplog, method):
    caplog.set_level("INFO")
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        kind = client.channel.unary_stream if method == "Generate" else client.channel.unary_unary
        call = kind(f"/quire.v1.Inference/{method}")(b"\x0a\xff\xff")
        failed = await failure(call.read() if method == "Generate" else call)
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    told = [record for record in caplog.records if "parsed" in record.message]
    assert len(told) == 1
    assert not any(record.exc_info for record in caplog.records)
