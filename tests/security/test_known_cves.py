"""What was found in other servers of models, by its number: each is tried here, and must fail.

Where another test shows it already, it is imported under the number; where the number says nothing of how, the
comment does. docs/security.md has the whole list.
"""

import asyncio
import json
import logging
import os
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.config
import quire.config
import quire.plan
import router.config
import worker.config
from protos import sampling_pb2
from router.chat_template import ChatTemplate, Message, TemplateExtras
from router.constraints import check_constraint
from router.errors import InvalidArgument
from tests.doubles.tiny_model import VOCAB, save_tiny
from tests.doubles.tiny_vocabulary import VOCABULARY
from tests.integration.fake_inference import MODEL, FakeInference, Stack, running_stack
from tests.integration.test_request_limits import (
    test_headers_that_never_end_are_cut_off as test_cve_2025_48956_headers_without_end,  # noqa: F401
)
from tests.unit.test_key_limits import (
    test_every_key_is_compared_whichever_it_is as test_cve_2025_59425_time_of_comparing_keys,  # noqa: F401
)
from tests.unit.test_prefix_hash import (
    test_a_name_depends_on_every_token_before_it as test_cve_2025_25183_names_of_other_prompts,  # noqa: F401
)
from tests.unit.test_prefix_hash import (
    test_salts_share_nothing as test_cve_2025_46570_probing_what_others_have_cached,  # noqa: F401
)
from tests.unit.test_tool_parsers import (
    test_long_arguments_take_time_in_proportion as test_cve_2025_48887_tool_calls_that_trap_a_parser,  # noqa: F401
)
from worker.grammar import Constraint, GrammarCompiler, GrammarError
from worker.loader.checkpoint import CheckpointError
from worker.startup import build_engine


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(FakeInference()) as stack:
        yield stack


def ask(stack: Stack, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=20, trust_env=False)


def refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


# ---- what listens where ----


def test_cve_2025_30202_sockets_on_all_interfaces() -> None:
    model = ["--model", "/dev/null"]
    assert worker.config.parse_args(model).host == "127.0.0.1"
    assert router.config.parse_args([*model, "--worker-urls", "a:1"]).host == "127.0.0.1"
    assert gateway.config.parse_args([]).host == "127.0.0.1"
    config = quire.config.parse_args(["--port", "0", "--grpc-port", "0", "--host", "0.0.0.0"])
    (only,) = quire.plan.make_plan(config, Path("/dev/null"), {}).workers
    assert worker.config.parse_args([*only.args]).host == "127.0.0.1", "--host is for what clients call"


# ---- what is executed ----


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._trace,))


def load(folder: Path) -> None:
    build_engine(worker.config.WorkerConfig(model=folder, dtype="float32", kv_cache_memory_bytes=1 << 20))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_cve_2025_24357_weights_that_are_a_pickle(tmp_path: Path, name: str) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "model"
    folder.mkdir()
    save_tiny(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(CheckpointError, match="safetensors"):
        load(folder)
    assert not trace.exists()


def test_cve_2025_66448_code_that_a_model_brings(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "model"
    folder.mkdir()
    save_tiny(folder)
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        content["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        path.write_text(json.dumps(content))
    load(folder)
    assert not trace.exists()


def test_cve_2025_62164_prompts_as_tensors(stack: Stack) -> None:
    stack.fake.reset()
    body = {"model": MODEL, "prompt": "x", "prompt_embeds": "gASVAAAA"}
    refused(httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False), "prompt_embeds")
    refused(ask(stack, prompt_embeds="gASVAAAA"), "prompt_embeds")
    assert stack.fake.requests == []


# ---- templates ----


def test_cve_2025_61620_a_template_from_a_client(stack: Stack) -> None:
    stack.fake.reset()
    loop = "{% for i in range(10**9) %}{% endfor %}"
    refused(ask(stack, chat_template=loop), "chat_template")
    assert stack.fake.requests == []
    # Among the values for a template it is a value, and no template.
    template = ChatTemplate("{{ messages[0].content }}", {})
    extras = TemplateExtras(kwargs={"chat_template": loop})
    assert template.render([Message("user", "Hi")], add_generation_prompt=True, extras=extras) == "Hi"


def test_cve_2025_62426_tokenizing_through_template_values() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for values in ({"tokenize": True}, {"return_dict": True}, {"padding": "max_length", "max_length": 10**12}):
        extras = TemplateExtras(kwargs=values)
        assert template.render([Message("user", "Hi")], add_generation_prompt=True, extras=extras) == "Hi"


# ---- what an output must be ----


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY, VOCAB)
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "schema",
    [
        # Of tools: a pattern that is no regular expression, a type that is none.
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}},
        {"type": "object", "properties": {"a": {"type": "something"}}},
        {"type": ["object", 7]}, {"properties": []}, {"$ref": "#/nowhere"}, {"minItems": -1, "type": "array"},
    ],
    ids=str,
)  # fmt: skip
async def test_cve_2025_48944_and_48942_schemas_that_crash_an_engine(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        await compiler.automaton(Constraint("json_schema", json.dumps(schema)))
    assert caught.value.field == "sampling.json_schema"
    assert await compiler.automaton(Constraint("regex", "a")), "others are served as ever"


@pytest.mark.parametrize("text", ["[]", "7", "null", "{", '{"a":' * 100_000])
def test_cve_2025_48942_schemas_that_are_no_objects(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_constraint(sampling_pb2.SamplingParams(json_schema=text))
    assert caught.value.field == "sampling.json_schema"


@pytest.mark.parametrize("pattern", ["([", "a{2,1}", "(?P<a", "(?<=a)b", "a" * 20_000, "(" * 5000 + ")" * 5000])
async def test_cve_2025_48943_regular_expressions_that_crash_an_engine(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        await compiler.automaton(Constraint("regex", pattern))
    assert caught.value.field == "sampling.regex"
    assert await compiler.automaton(Constraint("regex", "a"))


async def test_cve_2025_29770_a_cache_of_grammars_that_fills_the_disk(
    compiler: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "OUTLINES_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("worker.grammar._CACHED_GRAMMARS", 8)
    await asyncio.gather(*(compiler.automaton(Constraint("regex", f"a{{{n}}}")) for n in range(1, 40)))
    assert len(compiler._grammars) <= 8
    assert os.listdir(tmp_path) == []


# ---- numbers ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 1e308), ("frequency_penalty", -1e308), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("repetition_penalty", 1e-300), ("logit_bias", {"1": 1e308}),
    ],
)  # fmt: skip
def test_cve_2026_44223_penalties_that_crash_an_engine(stack: Stack, field: str, value: Any) -> None:
    stack.fake.reset()
    refused(ask(stack, **{field: value}), field)
    assert stack.fake.requests == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_cve_2026_44223_penalties_that_are_no_numbers(stack: Stack, value: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "presence_penalty": {value}}}'
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{stack.url}/v1/chat/completions", content=body, headers=headers, trust_env=False)
    assert response.status_code == 400, response.text


# ---- what is fetched ----


class Trap(BaseHTTPRequestHandler):
    """Notes who comes."""

    visits: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.visits.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        logging.getLogger(__name__).debug(format, *args)


@pytest.fixture
def trap() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Trap)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio", "file"])
def test_cve_2025_6242_and_2026_22773_addresses_and_images_in_messages(stack: Stack, trap: str, kind: str) -> None:
    stack.fake.reset()
    for url in (f"{trap}/image.png", "file:///etc/passwd", "data:image/png;base64,AAAA"):
        part = {"type": kind, kind: {"url": url}}
        refused(ask(stack, messages=[{"role": "user", "content": [part]}]), "messages.0.content.0")
    assert stack.fake.requests == []
    assert Trap.visits == []


def test_an_address_in_a_schema_is_not_fetched(trap: str) -> None:
    compiler = GrammarCompiler(VOCABULARY, VOCAB)
    try:
        with pytest.raises(GrammarError):
            asyncio.run(compiler.automaton(Constraint("json_schema", json.dumps({"$ref": f"{trap}/schema"}))))
    finally:
        compiler.close()
    assert Trap.visits == []
