"""What ``quire serve`` starts: each process's command line and environment. Decides everything, starts nothing."""

import os
import secrets
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protos.api_keys import OWN_KEY_FILE_VARIABLE, OWN_KEY_VARIABLE
from protos.tls import ClientTls
from quire.config import ServeConfig
from quire.models import served_name
from quire.placement import place_workers, usable_cores, visible_gpus
from quire.ports import PortWish, choose_ports, join, local_host

# Workers take requests from anyone who can reach them, so nobody outside this machine can.
_WORKER_HOST = "127.0.0.1"
_HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class ProcessPlan:
    """One process to start: ``python -m package args``."""

    name: str
    package: str
    args: tuple[str, ...]
    # Where the launcher asks whether it is ready.
    address: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """All processes of one ``quire serve``."""

    model_names: tuple[str, ...]
    workers: tuple[ProcessPlan, ...]
    router: ProcessPlan
    gateway: ProcessPlan
    # Whether clients must show a key.
    keys_needed: bool = False
    # What the launcher shows and trusts when it asks the router; None: there is no TLS, nor in HTTP.
    router_tls: ClientTls | None = None

    @property
    def url(self) -> str:
        """Where the gateway is, as clients on this machine say it."""
        return f"{'http' if self.router_tls is None else 'https'}://{self.gateway.address}"


def make_plan(config: ServeConfig, model: Path, environ: Mapping[str, str]) -> Plan:
    """Plans all processes for a model that lies at ``model``.

    Raises:
        PortError: a port is in use.
        PlacementError: the machine has too little for that many workers.
    """
    gpus, gpus_each = visible_gpus(environ), config.tensor_parallel_size
    places = place_workers(config.workers, config.device, environ, usable_cores(), gpus, gpus_each)
    wishes = [PortWish("--port", config.host, config.port), PortWish("--grpc-port", config.host, config.grpc_port)]
    for index in range(config.workers):
        wishes.append(PortWish("--worker-port", _WORKER_HOST, config.worker_port and config.worker_port + index))
    port, grpc_port, *worker_ports = choose_ports(wishes)

    everyone = (
        *("--log-level", config.log_level, "--log-format", config.log_format),
        *("--shutdown-timeout", str(config.shutdown_timeout)),
    )
    environment = child_environment(environ)
    keyed = environment
    if config.keys_needed and not (environment.get(OWN_KEY_VARIABLE) or environment.get(OWN_KEY_FILE_VARIABLE)):
        keyed = {**environment, OWN_KEY_VARIABLE: secrets.token_urlsafe()}
    workers = tuple(
        ProcessPlan(
            name=f"worker {index}",
            package="worker",
            args=(*_listen(model, _WORKER_HOST, worker_port), *everyone, *config.worker_flags),
            address=join(_WORKER_HOST, worker_port),
            environment={**environment, **place},
        )
        for index, (worker_port, place) in enumerate(zip(worker_ports, places, strict=True))
    )
    names = config.served_model_names or (served_name(config.model),)
    urls = ",".join(worker.address for worker in workers)
    grpc_address = join(local_host(config.host), grpc_port)
    router = ProcessPlan(
        name="router",
        package="router",
        args=(
            *(*_listen(model, config.host, grpc_port), *everyone, *config.router_flags),
            *("--worker-urls", urls, "--served-model-name", *names),
        ),
        address=grpc_address,
        environment=keyed,
    )
    gateway = ProcessPlan(
        name="gateway",
        package="gateway",
        args=(
            *("--host", config.host, "--port", str(port), "--router", grpc_address),
            *(*everyone, *config.gateway_flags),
        ),
        address=join(local_host(config.host), port),
        environment=keyed,
    )
    return Plan(names, workers, router, gateway, config.keys_needed, config.router_tls)


def _listen(model: Path, host: str, port: int) -> tuple[str, ...]:
    return ("--model", str(model), "--host", host, "--port", str(port))


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process: it imports the same code as the launcher, wherever that was started."""
    environment = dict(environ)
    # A folder named worker in the current directory must not be taken for ours.
    environment["PYTHONSAFEPATH"] = "1"
    if str(_HERE) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_HERE), environ.get("PYTHONPATH"))))
    # The processes talk to each other on this machine; a proxy for the outside must not come between.
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (environ.get(name), "127.0.0.1", "localhost", "::1")))
    return environment
