"""docs/security.md's checklist: every test that it names is there, and every test of this folder is named; and rows
that no other test shows."""

import ast
import asyncio
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.config
import router.config
import worker.config
from protos import sampling_pb2
from protos.api_keys import OWN_KEY_VARIABLE
from tests.integration.fake_inference import MODEL, FakeInference, running_stack
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import failure, running_router

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "kernels", "protos", "quire", "router", "worker")
LISTED = re.compile(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`")


def named() -> list[tuple[str, str]]:
    """(file, test or nothing) of all that the checklist names."""
    return LISTED.findall((ROOT / "docs/security.md").read_text())


def names_of_tests(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if name.startswith("test_")}


def test_the_checklist_names_tests_that_exist() -> None:
    assert len(named()) > 20
    for file, test in named():
        assert (ROOT / file).is_file(), file
        assert not test or test in names_of_tests(ROOT / file), f"{file} has no {test}"


def test_every_test_of_this_folder_is_on_it() -> None:
    whole_files = {file for file, test in named() if not test}
    tests = {test for _, test in named()}
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name != Path(__file__).name and str(path.relative_to(ROOT)) not in whole_files:
            assert names_of_tests(path) <= tests, path.name


# ---- serialization, and code from elsewhere ----

# CVE-2024-50050, CVE-2025-32444 and CVE-2025-29783 were sockets that unpickle what comes.
EXECUTING_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "zmq"}
EXECUTING_CALLS = {
    *("eval", "exec", "compile", "__import__", "broadcast_object_list", "all_gather_object", "gather_object"),
    *("send_object_list", "recv_object_list", "scatter_object_list", "from_pretrained", "recv_pyobj"),
}
METHODS_OF_OTHERS = {"compile"}  # re.compile
FORBIDDEN_NAMES = {"trust_remote_code", "allow_pickle", "weights_only"}


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield str(path.relative_to(ROOT)), node


def faults_of(node: ast.AST) -> Iterator[str]:
    """What a piece of source does that could execute what it is sent."""
    if isinstance(node, ast.Import):
        yield from {alias.name.split(".")[0] for alias in node.names} & EXECUTING_MODULES
    elif isinstance(node, ast.ImportFrom):
        yield from {(node.module or "").split(".")[0]} & EXECUTING_MODULES
    elif isinstance(node, ast.keyword):
        yield from {node.arg} & FORBIDDEN_NAMES
    elif isinstance(node, ast.Call):
        match node.func:
            case ast.Name(id=name):
                yield from {name} & EXECUTING_CALLS
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield "torch.load"
            case ast.Attribute(attr=name):
                yield from {name} & (EXECUTING_CALLS - METHODS_OF_OTHERS)


def test_nothing_that_is_read_or_received_is_executed() -> None:
    assert [f"{path} has {fault}" for path, node in sources() for fault in faults_of(node)] == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(f)", "eval(x)", "f(trust_remote_code=True)"],
)
def test_the_search_would_find_it(source: str) -> None:
    assert [fault for node in ast.walk(ast.parse(source)) for fault in faults_of(node)]


def test_the_linter_refuses_it_too() -> None:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    assert {"S301", "S307"} <= set(rules)


# ---- logs and secrets ----

SECRET = "zanzibar-4711"


async def test_a_routers_log_has_no_prompts(demo_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with FakeWorker() as fake, running_router(demo_tokenizer, fake) as client:
        await client.generate(text=SECRET)
        for wrong in ({"n": 99}, {"session_id": SECRET * 99}, {"sampling": sampling_pb2.SamplingParams(regex="")}):
            await failure(client.call(text=SECRET, **wrong).read())
        await fake.kill()
        async with asyncio.timeout(20):
            while "fake" not in caplog.text:
                await asyncio.sleep(0.05)
    assert SECRET not in caplog.text


def test_a_gateways_log_has_no_prompts_and_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running_stack(FakeInference()) as stack:
        headers = {"authorization": f"Bearer {SECRET}"}
        for fields in ({}, {"n": 99}, {"stream": True}, {"temperature": SECRET}):
            body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "user": SECRET, **fields}
            httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, trust_env=False)
        assert len(stack.fake.requests) == 2
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert ours
    assert SECRET not in "\n".join(ours)


def test_settings_that_are_printed_show_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", SECRET)
    monkeypatch.setenv(OWN_KEY_VARIABLE, SECRET)
    model = ["--model", "/dev/null"]
    settings = [
        gateway.config.parse_args([]),
        router.config.parse_args([*model, "--worker-urls", "a:1"]),
        worker.config.parse_args(model),
    ]
    assert SECRET not in repr(settings)


# ---- supply chain ----


def test_every_dependency_is_pinned_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[\[<>=!~ ]", line)[0].lower().replace("_", "-") for line in wanted} - {"quire"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert names <= {line.split("==")[0].lower().replace("_", "-") for line in lines}
