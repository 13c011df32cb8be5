"""The Kubernetes manifests: valid by the schemas of an older and the newest version, and true to the processes."""

import importlib
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from protos import inference_pb2, worker_pb2
from tests.doubles.images import ROOT, STAGES, arguments

FOLDER = ROOT / "compose/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())
]
SERVICES = {"router": inference_pb2.DESCRIPTOR, "worker": worker_pb2.DESCRIPTOR}
VERSIONS = ("1.29", "1.37")


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The specifications of pods by the process that they run."""
    found = {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")}
    return {name: each["spec"]["template"]["spec"] for name, each in found.items()}


def parsed(process: str, tmp_path: Path) -> Any:
    """The settings that a process makes of its container's arguments."""
    keys = tmp_path / "api-keys"
    keys.write_text('{"keys": [{"sha256": "' + "0" * 64 + '"}]}')
    places = {"/model": str(tmp_path), "/keys/api-keys": str(keys)}
    (container,) = pods()[process]["containers"]
    argv = [places.get(word, word) for word in container["args"]]
    return importlib.import_module(f"{process}.config").parse_args(argv)


def test_every_file_is_applied() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*KUSTOMIZATION["resources"], "kustomization.yaml"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_are_valid(each: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_field_would_be_noticed() -> None:
    wrong = {**named("Service", "router"), "spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("process", ["gateway", "router", "worker"])
def test_containers_are_the_images_and_may_do_nothing_but_serve(process: str, tmp_path: Path) -> None:
    pod = pods()[process]
    (container,) = pod["containers"]
    stage = container["image"].removeprefix("quire-")
    assert stage in STAGES
    assert container["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
    number = int(arguments(stage, "USER")[-1].split(":")[0])
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (number, True)
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    config = parsed(process, tmp_path)
    assert config.host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [config.port]
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout


@pytest.mark.parametrize("process", ["router", "worker"])
def test_probes_ask_about_the_service_or_the_process(process: str) -> None:
    (container,) = pods()[process]["containers"]
    (service,) = SERVICES[process].services_by_name.values()
    port = container["ports"][0]["containerPort"]
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": service.full_name}
    # A worker that loads, and a router without workers, are to be waited for and not to be started again.
    assert container["livenessProbe"]["grpc"] == {"port": port}


def test_processes_find_each_other(tmp_path: Path) -> None:
    gateway, router, worker = (parsed(process, tmp_path) for process in ("gateway", "router", "worker"))
    assert gateway.router == f"router:{named('Service', 'router')['spec']['ports'][0]['port']}"
    assert router.worker_urls == (f"dns:///worker:{worker.port}",)
    headless = named("Service", "worker")["spec"]
    assert (headless["clusterIP"], named("StatefulSet", "worker")["spec"]["serviceName"]) == ("None", "worker")
    assert headless["publishNotReadyAddresses"] is True  # the router asks each for its health itself


@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_selectors_select_a_process(each: dict[str, Any]) -> None:
    labels = {f"quire-{process}" for process in pods()}
    assert set(re.findall(r"'app': '([\w-]+)'", str(each))) <= labels
    target = each["spec"].get("scaleTargetRef")
    assert target is None or named(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]


def test_workers_are_reached_by_the_router_alone(tmp_path: Path) -> None:
    (rule,) = named("NetworkPolicy", "worker")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "quire-router"}}}]
    assert rule["ports"] == [{"port": parsed("worker", tmp_path).port}]


def test_gpu_workers_have_as_many_gpus_as_ranks(tmp_path: Path) -> None:
    (container,) = pods()["worker"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert parsed("worker", tmp_path).tensor_parallel_size == gpus
    assert {"name": "kernels", "mountPath": "/kernels"} in container["volumeMounts"]
    assert arguments("worker-cuda", "ENV") == ["TRITON_CACHE_DIR=/kernels"]
