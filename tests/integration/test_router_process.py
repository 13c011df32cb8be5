"""``python -m router`` as a process, and what it serves beside Generate."""

import asyncio
import copy
import signal
import socket
import sys

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from router.chat_template import ChatTemplate
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import NOT_SERVING, SERVING, Client, failure, running_router


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE)


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """(exit status, what it logged)"""
    _, log = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, log.decode()


async def until_line(process: asyncio.subprocess.Process, words: str) -> str:
    """The first line of its log with these words."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, "the router ended"
    return line


async def test_serves_and_stops_cleanly(demo_model):
    async with FakeWorker() as worker:
        process = await start(
            "--model", str(demo_model), "--port", "0", "--worker-urls", worker.address, "--served-model-name", "demo"
        )
        try:
            port = int((await until_line(process, "listening on")).split("127.0.0.1:")[1].split(",")[0])
            await until_line(process, "is ready")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                client = Client(None, f"127.0.0.1:{port}", channel)
                await client.until_ready()
                worker.gate.clear()
                call = client.call(stopping=sampling_pb2.StopConditions(max_tokens=3))
                assert (await call.read()).WhichOneof("event") == "started"
                process.send_signal(signal.SIGTERM)
                await until_line(process, "shutting down")
                worker.gate.set()
                events = []
                while (event := await call.read()) is not grpc.aio.EOF:
                    events.append(event.WhichOneof("event"))
                assert events[-1] == "finished"
            status, log = await ended(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert status == 0
        assert "Traceback" not in log
        assert "WARNING" not in log


async def test_second_signal_ends_it_at_once(demo_model):
    async with FakeWorker() as worker:
        worker.gate.clear()
        process = await start("--model", str(demo_model), "--port", "0", "--worker-urls", worker.address)
        port = int((await until_line(process, "listening on")).split("127.0.0.1:")[1].split(",")[0])
        await until_line(process, "is ready")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = inference_pb2.GenerateRequest(model=demo_model.stem, text="x")
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            await call.read()
            process.send_signal(signal.SIGTERM)
            await until_line(process, "shutting down")
            process.send_signal(signal.SIGTERM)
            assert (await ended(process))[0] == 130


async def test_bad_settings_end_it_with_one_line(demo_model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--model", str(demo_model)], "--worker-urls"),
            (["--model", str(tmp_path), "--worker-urls", "127.0.0.1:1", "--port", "0"], "tokenizer.json"),
            (["--model", str(demo_model), "--worker-urls", "127.0.0.1:1", "--port", port], "the port is in use"),
            (
                ["--model", str(demo_model), "--worker-urls", "127.0.0.1:1", "--port", "0", "--metrics-port", port],
                f"127.0.0.1:{port} for metrics",
            ),
        ]
        processes = [await start(*flags) for flags, _ in cases]
        for process, (_, words) in zip(processes, cases, strict=True):
            status, log = await ended(process)
            assert status == 1
            # gRPC's own C++ core writes a line of its own when a port is taken.
            lines = [line for line in log.splitlines() if "add_port.cc" not in line]
            assert len(lines) == 1
            assert words in lines[0]


async def test_reflection_lists_the_services(demo_tokenizer):
    async with running_router(demo_tokenizer, "127.0.0.1:1") as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        replies = [reply async for reply in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in replies[0].list_services_response.service}
        assert {"quire.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_without_workers_it_lives_but_is_not_ready(demo_tokenizer):
    async with running_router(demo_tokenizer, "127.0.0.1:1") as client:
        assert await client.health("") == SERVING
        assert await client.health() == NOT_SERVING
        failed = await failure(client.generate())
        assert (failed.code, failed.retry_s) == (grpc.StatusCode.UNAVAILABLE, 1)
        models = (await client.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(model.name, model.max_model_len, model.ready_workers) for model in models] == [
            ("demo", 0, 0),
            ("alias", 0, 0),
        ]
        # Text needs no worker.
        reply = await client.stub.Tokenize(inference_pb2.TokenizeRequest(model="demo", text="Hi <|im_end|>"))
        assert reply.token_ids[-1] == 2
        text = await client.stub.Detokenize(inference_pb2.DetokenizeRequest(model="demo", token_ids=reply.token_ids))
        assert text.text == "Hi <|im_end|>"


async def test_small_calls_check_their_fields(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        assert (await client.model()).max_model_len == 512
        invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        for call, code, field in (
            (client.stub.GetModel(inference_pb2.GetModelRequest(model="x")), missing, ""),
            (client.stub.Tokenize(inference_pb2.TokenizeRequest(model="x", text="a")), missing, ""),
            (client.stub.Tokenize(inference_pb2.TokenizeRequest(model="demo")), invalid, "prompt"),
            (client.stub.Detokenize(inference_pb2.DetokenizeRequest(model="demo", token_ids=[1, 60000])),
             invalid, "token_ids[1]"),
            (client.stub.Explain(inference_pb2.ExplainRequest(model="demo")), invalid, "prompt"),
            (client.stub.Explain(inference_pb2.ExplainRequest(model="x", text="a")), missing, ""),
            (client.stub.Explain(inference_pb2.ExplainRequest(model="demo", text="word " * 600)), invalid, "text"),
        ):  # fmt: skip
            failed = await failure(call)
            assert (failed.code, failed.field) == (code, field)
        explained = await client.explain()
        assert (explained.policy, explained.chosen, explained.queued) == ("prefix", "fake", 0)
        candidate = explained.candidates[0]
        assert (candidate.worker, candidate.ready, candidate.running, candidate.capacity) == ("fake", True, 0, 4)
        assert not worker.submits


async def test_our_own_mistakes_tell_clients_nothing(demo_tokenizer, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("a secret of the implementation")

    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        monkeypatch.setattr("router.server.check_generate", broken)
        failed = await failure(client.generate())
        assert failed.code == grpc.StatusCode.INTERNAL
        assert "secret" not in failed.message
        error_id = failed.message.split()[2].rstrip(".")
        assert any(error_id in message for message in caplog.messages)
        assert "a secret of the implementation" in caplog.text


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{{ 1 / 0 }}"])
async def test_template_refusals_are_the_clients_to_mend(demo_tokenizer, template):
    tokenizer = copy.copy(demo_tokenizer)
    tokenizer._template = ChatTemplate(template, {})
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="system", content="x")])
    async with FakeWorker() as worker, running_router(tokenizer, worker) as client:
        failed = await failure(client.generate(chat=chat))
        assert (failed.code, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "chat")
        assert failed.message in ("no system role", "the model's chat template cannot render these messages")


async def test_the_models_description_tells_what_its_template_takes(demo_tokenizer):
    tokenizer = copy.copy(demo_tokenizer)
    tokenizer._template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "{% endfor %}{% endfor %}{{ enable_thinking }}",
        {},
    )
    async with FakeWorker() as worker, running_router(tokenizer, worker) as client:
        told = (await client.model()).chat_template
        assert (told.takes_tools, told.tool_call_format, list(told.variables)) == (True, "hermes", ["enable_thinking"])
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        model = await client.model()
        assert model.HasField("chat_template")
        assert not model.chat_template.takes_tools
