"""A request's trace through gateway, router and worker: real processes, and a collector that keeps what it is sent."""

from itertools import pairwise

import grpc
import httpx
import pytest

from protos import sampling_pb2
from protos.tracing import TracingError, tracing_to
from router.request_trace import RequestTrace
from tests.doubles.otlp_receiver import otlp_receiver
from tests.doubles.processes import Stack, free_port, wait_until
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import failure, running_router

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
PROMPT = "The word pomegranate is secret."


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def stack(demo_model, receiver, tmp_path_factory):
    traced = ("--otlp-traces-endpoint", receiver.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        running = Stack(
            demo_model, *traced, "--max-model-len", "512",
            router_flags=traced, gateway_flags=(*traced, "--api-key", "secret-key"),
        )  # fmt: skip
        try:
            running.start()
            yield running
        finally:
            running.close()


def chat(stack, trace_id=TRACE_ID, key="secret-key", sampled="01", **fields):
    body = {"model": "model", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, **fields}
    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{sampled}", "authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_one_trace_goes_from_the_client_to_the_worker(stack, receiver):
    assert chat(stack, stream=True, temperature=0, seed=5).text.endswith("data: [DONE]\n\n")
    spans = receiver.until_complete(
        TRACE_ID, "chat model", "Generate", "tokenize", "queue", "route", "prefill", "decode"
    )
    gateway, router = spans["chat model"], spans["Generate"]

    assert len(receiver.trace(TRACE_ID)) == len(spans), "each happens once"
    assert gateway.parent_id == CLIENT_SPAN
    assert router.parent_id == gateway.span_id
    parts = ["tokenize", "queue", "route", "schedule", "prefill", "decode"]
    assert {spans[name].parent_id for name in parts} == {router.span_id}
    assert {span.service for span in spans.values()} == {"quire-gateway", "quire-router", "quire-worker"}
    assert {spans[name].service for name in parts[:3]} == {"quire-router"}
    assert {spans[name].service for name in parts[3:]} == {"quire-worker"}

    assert gateway.start <= router.start < router.end <= gateway.end
    for name in parts:
        assert router.start <= spans[name].start <= spans[name].end <= router.end, name
    # Processes of one machine have one clock; how long a message was under way is between them.
    for before, after in pairwise(parts):
        assert spans[before].end <= spans[after].start, (before, after)


def test_spans_say_what_was_asked_and_what_came_of_it_but_no_text(stack, receiver):
    trace_id = "1" * 32
    usage = chat(stack, trace_id, temperature=0.5, seed=5).json()["usage"]
    spans = receiver.until_complete(trace_id, "chat model", "Generate", "prefill", "decode", "route")
    told = spans["chat model"].attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "model"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.seed"]) == (8, 5)
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["http.response.status_code"], told["http.route"]) == (200, "/v1/chat/completions")
    assert spans["route"].attributes["quire.worker"] == spans["prefill"].attributes["quire.worker"]
    assert spans["prefill"].attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 8
    assert "pomegranate" not in repr(receiver.spans)
    assert "secret-key" not in repr(receiver.spans)


def test_refused_requests_have_spans(stack, receiver):
    assert chat(stack, "2" * 32, key="wrong").status_code == 401
    assert receiver.until_complete("2" * 32, "POST unmatched")["POST unmatched"].attributes[
        "http.response.status_code"
    ] == 401  # fmt: skip
    assert chat(stack, "3" * 32, max_tokens=4096).status_code == 400
    spans = receiver.until_complete("3" * 32, "chat model", "Generate")
    assert spans["Generate"].failed
    assert spans["Generate"].attributes["error.type"] == "context_length_exceeded"
    assert spans["chat model"].attributes["http.response.status_code"] == 400


def test_a_client_that_does_not_sample_is_followed(stack, receiver):
    assert chat(stack, "5" * 32, sampled="00").status_code == 200
    assert chat(stack, "6" * 32).status_code == 200
    receiver.until_complete("6" * 32, "chat model", "Generate", "decode")
    assert not receiver.trace("5" * 32)


def test_what_names_no_trace_begins_one(stack, receiver):
    before = {span.trace_id for span in receiver.spans}
    reply = httpx.get(f"{stack.url}/v1/models", headers={"authorization": "Bearer secret-key", "traceparent": "00-x"})
    assert reply.status_code == 200
    wait_until(lambda: any(span.name == "GET /v1/models" for span in receiver.spans))
    span = next(span for span in receiver.spans if span.name == "GET /v1/models")
    assert span.trace_id not in before
    assert not span.parent_id
    httpx.get(f"{stack.url}/health")
    assert not any("health" in span.name for span in receiver.spans), "probes would bury everything else"


async def test_a_move_to_another_worker_is_seen(demo_tokenizer, receiver):
    tracing = tracing_to(receiver.url, "quire-router")
    first = FakeWorker(worker_id="a")
    first.dies_at = 3
    async with (
        first,
        FakeWorker(worker_id="b") as second,
        running_router(demo_tokenizer, first, tracing=tracing) as client,
    ):
        call = client.call(
            stopping=sampling_pb2.StopConditions(max_tokens=5),
            metadata=(("traceparent", f"00-{'7' * 32}-{CLIENT_SPAN}-01"),),
        )
        await first.until(lambda: bool(first.submits))
        client.router._fleet.set_addresses("test", [second.address])
        events = [event async for event in call]
        assert events[-1].WhichOneof("event") == "finished"
        assert second.submits[0].traceparent == first.submits[0].traceparent
    await tracing.close()
    spans = receiver.trace("7" * 32)
    assert [span.name for span in spans if span.name in ("queue", "route", "migrate")] == [
        *("queue", "route", "migrate", "route")
    ]
    migrate = next(span for span in spans if span.name == "migrate")
    assert migrate.attributes["quire.lost_worker"] == "a"
    assert migrate.attributes["quire.output_tokens"] == 3


async def test_what_waits_in_vain_shows_where_it_waited(demo_tokenizer, receiver):
    tracing = tracing_to(receiver.url, "quire-router")
    worker = FakeWorker(max_slots=1)
    worker.gate.clear()
    async with worker, running_router(demo_tokenizer, worker, max_queue_wait=0.2, tracing=tracing) as client:
        running = client.call(text="One")
        await worker.until(lambda: bool(worker.submits))
        metadata = (("traceparent", f"00-{'8' * 32}-{CLIENT_SPAN}-01"),)
        assert (
            await failure(client.generate(text="Two", metadata=metadata))
        ).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
    await tracing.close()
    spans = {span.name: span for span in receiver.trace("8" * 32)}
    assert spans["queue"].failed
    assert spans["Generate"].attributes["error.type"] == spans["queue"].attributes["error.type"]
    assert spans["queue"].end - spans["queue"].start > 0.15e9


async def test_a_collector_that_is_away_costs_a_count_and_comes_back(caplog):
    port = free_port()
    dropped = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
        tracing = tracing_to(f"http://127.0.0.1:{port}", "quire-test", dropped.append)
    for _ in range(3):
        tracing.start("lost").end()
    wait_until(lambda: sum(dropped) == 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with otlp_receiver(port) as back:

        def arrives() -> bool:
            tracing.start("found").end()
            return any(span.name == "found" for span in back.spans)

        wait_until(arrives)
    await tracing.close()


async def test_more_spans_than_can_wait_are_dropped_and_counted():
    from protos.otlp import MAX_WAITING

    dropped = []
    tracing = tracing_to(f"http://127.0.0.1:{free_port()}", "quire-test", dropped.append)
    for _ in range(3 * MAX_WAITING):
        tracing.start("many").end()
    assert sum(dropped) >= MAX_WAITING
    await tracing.close()


def test_without_opentelemetry_the_flag_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "protos.otlp", None)
    with pytest.raises(TracingError, match=r"pip install 'quire\[tracing\]'"):
        tracing_to("http://127.0.0.1:1", "quire-test")
    assert not tracing_to(None, "quire-test").enabled


def test_who_does_not_trace_tells_workers_of_no_trace():
    assert RequestTrace().traceparent == ""
