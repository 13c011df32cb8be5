"""The files that go beside compose.yaml, checked without an engine: keys, and GPUs."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from protos.api_keys import digest_of
from tests.doubles.images import ROOT, STAGES, arguments

BASE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
KEYS = yaml.safe_load((ROOT / "compose/compose.keys.yaml").read_text())
GPU = yaml.safe_load((ROOT / "compose/compose.gpu.yaml").read_text())


def config_of(process: str, argv: list[str]) -> Any:
    return importlib.import_module(f"{process}.config").parse_args(argv)


@pytest.mark.parametrize("override", [KEYS, GPU], ids=["keys", "gpu"])
def test_only_known_services_are_changed_and_none_gets_rights(override: dict[str, Any]) -> None:
    assert set(override["services"]) <= set(BASE["services"])
    for service in override["services"].values():
        assert not {"user", "privileged", "cap_add", "cap_drop", "security_opt", "read_only", "ports"} & set(service)


def test_keys_are_files_that_the_processes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, router = KEYS["services"]["gateway"], KEYS["services"]["router"]
    assert set(gateway["secrets"]) == set(KEYS["secrets"])
    assert router["secrets"] == ["router_key"]
    assert gateway["command"][:-2] == BASE["services"]["gateway"]["command"]
    for service in (gateway, router):
        ((variable, path),) = service["environment"].items()
        assert path == "/run/secrets/router_key"
        own = tmp_path / "router_key"
        own.write_text("own")
        monkeypatch.setenv(variable, str(own))
    filed = tmp_path / "api_keys"
    filed.write_text(json.dumps({"keys": [{"sha256": digest_of("a").hex()}]}))
    argv = [str(filed) if word == "/run/secrets/api_keys" else word for word in gateway["command"]]
    config = config_of("gateway", argv)
    assert [key.sha256 for key in config.api_keys] == [digest_of("a")]
    assert config.router_api_key == "own"
    model = tmp_path / "model.gguf"
    model.touch()
    argv = ["--model", str(model), *BASE["services"]["router"]["command"][2:]]
    assert config_of("router", argv).own_key == digest_of("own")


def test_gpu_workers_and_their_router_have_the_same_model(tmp_path: Path) -> None:
    worker, router = GPU["services"]["worker"], GPU["services"]["router"]
    given = "${MODEL_FOLDER:?names the folder of a model}:/model:ro"
    assert given in worker["volumes"]
    assert router["volumes"] == [given]
    argv = [word.replace("${TENSOR_PARALLEL_SIZE:-1}", "2") for word in worker["command"]]
    config = config_of("worker", [str(tmp_path) if word == "/model" else word for word in argv])
    assert (config.host, config.tensor_parallel_size) == ("0.0.0.0", 2)
    settings = config_of("router", [str(tmp_path) if word == "/model" else word for word in router["command"]])
    assert settings.model == config.model
    assert settings.worker_urls == (f"dns:///worker:{config.port}",)


def test_gpu_workers_keep_compiled_kernels_where_code_may_run() -> None:
    worker = GPU["services"]["worker"]
    assert worker["build"] == {"target": "worker-cuda"}
    assert arguments("worker-cuda", "ENV") == ["TRITON_CACHE_DIR=/kernels"]  # a tmpfs would not let it be run
    assert "kernels:/kernels" in worker["volumes"]
    assert "install -d -o 10001 -g 10001 /kernels" in arguments("worker-cuda", "RUN")[0]
    assert arguments("worker-cuda", "USER")[-1] == arguments("worker", "USER")[-1]
    assert list(STAGES)[-1] == "worker-cuda"
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
