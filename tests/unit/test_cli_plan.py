"""What quire serve decides before it starts anything: ports, processors, command lines."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worker.config
from quire.config import parse_args
from quire.placement import PlacementError, place_workers, visible_gpus
from quire.plan import child_environment, make_plan
from quire.ports import PortError, PortWish, choose_ports, join, local_host
from quire.serve import ready_message

ANY_PORTS = ["--port", "0", "--grpc-port", "0", "--worker-port", "0"]


def test_a_busy_port_is_named_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} .*--grpc-port"):
            choose_ports([PortWish("--port", "127.0.0.1", 0), PortWish("--grpc-port", "127.0.0.1", port)])


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1"):
        choose_ports([PortWish("--port", "192.0.2.1", 0)])
    with pytest.raises(PortError, match="--host"):
        choose_ports([PortWish("--port", "no host at all", 0)])


def test_the_same_port_twice_is_refused() -> None:
    (free,) = choose_ports([PortWish("--port", "127.0.0.1", 0)])
    with pytest.raises(PortError, match="--grpc-port"):
        choose_ports([PortWish("--port", "127.0.0.1", free), PortWish("--grpc-port", "127.0.0.1", free)])


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = choose_ports([PortWish("--port", "127.0.0.1", 0)] * 8)
    assert len(set(ports)) == 8
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_addresses_to_reach_a_server_at() -> None:
    assert [local_host(host) for host in ("0.0.0.0", "::", "10.1.2.3")] == ["127.0.0.1", "::1", "10.1.2.3"]
    assert (join("::1", 80), join("127.0.0.1", 80)) == ("[::1]:80", "127.0.0.1:80")


@given(workers=st.integers(2, 64), cores=st.integers(1, 256))
def test_workers_share_the_cores(workers: int, cores: int) -> None:
    threads = [int(place["OMP_NUM_THREADS"]) for place in place_workers(workers, "auto", {}, cores, ())]
    assert len(threads) == workers
    assert min(threads) >= 1
    assert sum(threads) <= max(cores, workers)


def test_what_the_person_set_stays() -> None:
    assert place_workers(2, "cpu", {"OMP_NUM_THREADS": "7"}, 8, ()) == [{}, {}]
    assert place_workers(1, "auto", {}, 8, ("0", "1")) == [{}]
    assert place_workers(2, "cuda:1", {"OMP_NUM_THREADS": "7"}, 8, ("0", "1")) == [{}, {}]


def test_each_worker_gets_a_gpu_of_its_own() -> None:
    places = place_workers(2, "auto", {}, 8, ("3", "5", "7"))
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["3", "5"]
    with pytest.raises(PlacementError, match="--workers is 3, but 2 GPU"):
        place_workers(3, "auto", {}, 8, ("0", "1"))
    assert "CUDA_VISIBLE_DEVICES" not in place_workers(3, "cpu", {}, 8, ("0", "1"))[0]


def test_each_rank_of_each_worker_gets_a_gpu_of_its_own() -> None:
    places = place_workers(2, "auto", {}, 8, ("0", "1", "2", "3", "4"), gpus_each=2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1", "2,3"]
    with pytest.raises(PlacementError, match=r"--workers is 2, but 3 GPU.* each worker fills 2"):
        place_workers(2, "auto", {}, 8, ("0", "1", "2"), gpus_each=2)


def test_gpus_that_the_environment_shows() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}) == ("2", "GPU-ab")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def test_the_processes_are_told_of_each_other() -> None:
    config = parse_args([*ANY_PORTS, "--workers", "2", "--block-size", "32", "--host", "0.0.0.0", "org/name"])
    plan = make_plan(config, Path("/models/m"), {"PATH": "/bin"})
    assert plan.model_names == ("org/name",)
    assert [process.name for process in plan.workers] == ["worker 0", "worker 1"]
    for process in plan.workers:
        settings = worker.config.parse_args(list(process.args))
        assert (settings.model, settings.block_size) == (Path("/models/m"), 32)
        assert settings.host == "127.0.0.1", "workers must not be reachable from outside"
        assert process.address == f"127.0.0.1:{settings.port}"
        assert process.environment["PATH"] == "/bin"
    router = plan.router.args
    assert router[router.index("--worker-urls") + 1].split(",") == [process.address for process in plan.workers]
    assert router[router.index("--served-model-name") + 1] == "org/name"
    assert router[router.index("--host") + 1] == "0.0.0.0"
    gateway = plan.gateway.args
    assert gateway[gateway.index("--router") + 1] == plan.router.address
    assert plan.router.address.startswith("127.0.0.1:")
    assert len({plan.gateway.address, plan.router.address, *(process.address for process in plan.workers)}) == 4


def test_no_proxy_stands_between_the_processes() -> None:
    environment = child_environment({"NO_PROXY": "example.org", "PYTHONPATH": "/extra"})
    assert environment["NO_PROXY"].split(",") == ["example.org", "127.0.0.1", "localhost", "::1"]
    assert "127.0.0.1" in environment["no_proxy"].split(",")
    assert environment["PYTHONPATH"].split(":")[-1] == "/extra"


@pytest.mark.parametrize("flags", [["--api-key", "secret"], []])
def test_where_clients_need_keys_both_ports_ask_for_them(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not flags:
        monkeypatch.setenv("QUIRE_API_KEY", "secret")
    plan = make_plan(parse_args([*ANY_PORTS, "--host", "0.0.0.0", *flags]), Path("m.gguf"), {"PATH": "/bin"})
    hosts = [process.args[process.args.index("--host") + 1] for process in (plan.router, plan.gateway)]
    assert hosts == ["0.0.0.0", "0.0.0.0"]
    for process in (plan.router, plan.gateway):
        assert ("--api-key" in process.args) == bool(flags)
    # What is printed to be pasted works, and shows no secret.
    assert "Bearer $QUIRE_API_KEY" in ready_message(plan, 1.0)
    assert "secret" not in ready_message(plan, 1.0)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    plan = make_plan(parse_args([*ANY_PORTS, "--host", "0.0.0.0"]), Path("m.gguf"), {"PATH": "/bin"})
    assert plan.router.args[plan.router.args.index("--host") + 1] == "0.0.0.0"
    assert "Bearer" not in ready_message(plan, 1.0)
