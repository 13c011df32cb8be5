"""What can drift between compose/ and the processes that it runs, checked without an engine."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from packaging.requirements import Requirement

from protos import inference_pb2, worker_pb2
from quire.cli import main as quire
from quire.models import DEMO_MODEL
from tests.doubles.images import (
    PROCESSES,
    PYPROJECT,
    ROOT,
    STAGES,
    arguments,
    closure,
    extras_of,
    required_by,
    run_script,
)

COMPOSE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MODEL_FILE = f"/models/{DEMO_MODEL}.gguf"
# What the gateway adds to --shutdown-timeout, and some room.
SLACK_S = 7


def copied() -> set[str]:
    """The paths in this repository that any stage copies."""
    return {
        source
        for stage in STAGES
        for rest in arguments(stage, "COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    }


def parsed(process: str, tmp_path: Path) -> Any:
    """The settings that a process makes of its service's command, with a model file that is there."""
    model = tmp_path / Path(MODEL_FILE).name
    model.touch()
    argv = [str(model) if word == MODEL_FILE else word for word in SERVICES[process]["command"]]
    return importlib.import_module(f"{process}.config").parse_args(argv)


# The images


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_has_a_target_that_runs_it(process: str) -> None:
    assert arguments(process, "ENTRYPOINT") == [f'["python", "-m", "{process}"]']
    assert arguments(process, "COPY") == [
        f"--from=requirements /quire/{process}.txt .",
        "--from=package /package /package",
    ]
    assert f"-r {process}.txt" in arguments(process, "RUN")[0]


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_runs_as_a_number_other_than_roots(process: str) -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", arguments(process, "USER")[-1])


def test_every_install_is_held_to_the_constraints() -> None:
    installs = [rest for stage in STAGES for rest in arguments(stage, "RUN") if "pip install" in rest]
    assert len(installs) == len(PROCESSES) + 2
    assert all("-c constraints.txt" in rest or "--no-deps --no-build-isolation" in rest for rest in installs)


def test_the_package_is_copied_whole() -> None:
    project = PYPROJECT["project"]
    packages = {name.split(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]}
    assert packages | {"pyproject.toml", project["readme"], *project["license-files"]} <= copied()


def test_what_is_copied_is_there_and_reaches_the_engine() -> None:
    assert [source for source in copied() if not (ROOT / source).exists()] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {source.split("/")[0] for source in copied()} == {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.parametrize("process", PROCESSES)
def test_the_list_of_requirements_is_pyprojects(process: str) -> None:
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(r for e in extras_of(process) for r in project["optional-dependencies"][e])]
    assert process in extras_of(process)
    assert {str(requirement) for requirement in required_by(process)} == {str(Requirement(line)) for line in wanted}


def test_an_extra_of_extras_is_their_sum_without_the_project_itself() -> None:
    lines = run_script("requirements.py", "serve").stdout.splitlines()
    assert set(lines) == set(
        run_script("requirements.py", "gateway", "router", "worker", "cli", "tracing").stdout.splitlines()
    )
    assert len(lines) == len(set(lines))
    assert not [line for line in lines if line.startswith("quire")]


def test_an_unknown_extra_is_an_error_that_names_it() -> None:
    done = run_script("requirements.py", "gateway", "rooter")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no extra 'rooter'" in done.stderr


@pytest.mark.parametrize("process", ["gateway", "router"])
def test_images_of_gateway_and_router_have_no_torch(process: str) -> None:
    names = closure(required_by(process))
    assert "grpcio" in names
    assert not [name for name in names if name in ("torch", "triton", "transformers") or name.startswith("nvidia")]


def test_the_closure_would_find_torch() -> None:
    assert "torch" in closure(required_by("worker"))


# The services


def test_services_are_the_processes_and_the_model() -> None:
    assert set(SERVICES) == {*PROCESSES, "model"}
    for name, service in SERVICES.items():
        build = service["build"]
        assert (ROOT / "compose" / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert build["target"] == ("router" if name == "model" else name)
        assert service["image"] == f"quire-{build['target']}"


@pytest.mark.parametrize("process", PROCESSES)
def test_commands_are_accepted_and_listen_on_the_exposed_port(process: str, tmp_path: Path) -> None:
    config = parsed(process, tmp_path)
    assert config.host == "0.0.0.0"
    assert arguments(process, "EXPOSE") == [str(config.port)]


def test_processes_find_each_other(tmp_path: Path) -> None:
    gateway, router, worker = (parsed(process, tmp_path) for process in PROCESSES)
    assert gateway.router == f"router:{router.port}"
    assert router.worker_urls == (f"dns:///worker:{worker.port}",)
    assert router.model == worker.model
    assert router.model_names == (DEMO_MODEL,)


def test_the_model_is_fetched_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = SERVICES["model"]
    assert fetch["entrypoint"][:3] == ["python", "-m", "quire"]
    monkeypatch.setenv("QUIRE_CACHE", fetch["environment"]["QUIRE_CACHE"])
    monkeypatch.setattr("quire.models._is_whole", lambda target: True)
    assert quire(fetch["entrypoint"][3:]) == 0
    assert capsys.readouterr().out.strip() == MODEL_FILE
    folder = str(Path(MODEL_FILE).parent)
    assert fetch["volumes"] == [f"models:{folder}"]
    assert f"install -d -o 10001 -g 10001 {folder}" in arguments("router", "RUN")[0]
    for reader in ("router", "worker"):
        assert SERVICES[reader]["command"][:2] == ["--model", MODEL_FILE]
        assert SERVICES[reader]["volumes"] == [f"models:{folder}:ro"]
        assert SERVICES[reader]["depends_on"]["model"] == {"condition": "service_completed_successfully"}


def test_only_the_gateway_is_published_and_only_to_this_machine(tmp_path: Path) -> None:
    port = parsed("gateway", tmp_path).port
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": [f"127.0.0.1:${{PORT:-8000}}:{port}"]}


def test_workers_are_reached_by_the_router_alone_and_reach_nobody() -> None:
    inside = {name for name, service in SERVICES.items() if "workers" in service.get("networks", ["default"])}
    assert inside == {"worker", "router"}
    assert SERVICES["worker"]["networks"] == ["workers"]
    assert COMPOSE["networks"]["workers"] == {"internal": True}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_containers_may_do_nothing_but_serve(service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not {"user", "privileged", "cap_add", "network_mode", "pid"} & set(service)


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_get_the_time_they_take_to_end(process: str, tmp_path: Path) -> None:
    service = SERVICES[process]
    (seconds,) = re.findall(r"(\d+)s", service["stop_grace_period"])
    assert int(seconds) >= parsed(process, tmp_path).shutdown_timeout + SLACK_S
    assert service["restart"] == "unless-stopped"


def test_whoever_uses_a_process_ends_before_it() -> None:
    assert SERVICES["gateway"]["depends_on"] == {"router": {"condition": "service_healthy"}}
    assert SERVICES["router"]["depends_on"]["worker"] == {"condition": "service_started"}


# The health checks


@pytest.mark.parametrize(("process", "file"), [("router", inference_pb2), ("worker", worker_pb2)])
def test_router_and_worker_are_asked_about_their_service(process: str, file: Any, tmp_path: Path) -> None:
    (service,) = file.DESCRIPTOR.services_by_name.values()
    address = f"127.0.0.1:{parsed(process, tmp_path).port}"
    check = SERVICES[process]["healthcheck"]["test"]
    assert check == ["CMD", "python", "-m", "grpc_ready", address, service.full_name]


@pytest.fixture
def health_service() -> Iterator[tuple[health.HealthServicer, str]]:
    """A server with nothing but a health service, and its address."""
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_grpc_ready_says_what_the_service_says(health_service: tuple[health.HealthServicer, str]) -> None:
    servicer, address = health_service
    servicer.set("a.Service", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = run_script("grpc_ready.py", address, "a.Service")
    assert (done.returncode, done.stderr) == (1, f"a.Service at {address} is NOT_SERVING\n")
    servicer.set("a.Service", health_pb2.HealthCheckResponse.SERVING)
    assert run_script("grpc_ready.py", address, "a.Service").returncode == 0
    done = run_script("grpc_ready.py", address, "another.Service")
    assert done.returncode == 1
    assert "NOT_FOUND" in done.stderr


def test_grpc_ready_fails_where_nobody_listens() -> None:
    done = run_script("grpc_ready.py", "127.0.0.1:1", "a.Service")
    assert done.returncode == 1
    assert done.stderr.startswith("127.0.0.1:1 gives no answer about a.Service: UNAVAILABLE")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_gateways_check_asks_for_its_health(status: int, code: int, tmp_path: Path) -> None:
    check = SERVICES["gateway"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    assert f"'127.0.0.1', {parsed('gateway', tmp_path).port}" in check[3]
    connection = f"""
import http.client, types
class HTTPConnection:
    def __init__(self, host, port, timeout): pass
    def request(self, method, path): assert (method, path) == ("GET", "/health")
    def getresponse(self): return types.SimpleNamespace(status={status})
http.client.HTTPConnection = HTTPConnection
"""
    done = subprocess.run([sys.executable, "-c", connection + check[3]], check=False, timeout=60)
    assert done.returncode == code
