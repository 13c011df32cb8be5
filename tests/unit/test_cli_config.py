"""quire serve's flags: its own, and those that it hands on."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.config
import router.config
import worker.config
from quire.config import ServeConfig, build_parser, forwarded_flags, parse_args
from quire.models import DEMO_MODEL

PROCESSES = {"worker": worker.config, "router": router.config, "gateway": gateway.config}


def test_without_flags_the_demo_model_is_served_locally() -> None:
    config = parse_args([])
    assert (config.model, config.host, config.port, config.grpc_port) == (DEMO_MODEL, "127.0.0.1", 8000, 50051)
    assert (config.workers, config.worker_port) == (1, 0)
    assert (config.worker_flags, config.router_flags, config.gateway_flags) == ((), (), ())


SPECIFIED = (
    "--model X --tensor-parallel-size 4 --gpu-memory-utilization 0.92 --max-model-len 8192 "
    "--enable-prefix-caching --quantization fp8 --kv-cache-dtype fp8 --dtype float16"
)


def test_the_specified_line_is_understood_and_what_is_not_built_is_refused() -> None:
    args = build_parser().parse_intermixed_args(SPECIFIED.split())
    flags = ServeConfig.from_args(args).worker_flags
    assert "--quantization fp8" in " ".join(flags)
    assert "--kv-cache-dtype fp8" in " ".join(flags)
    assert "--tensor-parallel-size 4" in " ".join(flags)
    assert "--max-model-len 8192" in " ".join(flags)
    assert parse_args(SPECIFIED.split()).worker_flags == flags
    with pytest.raises(ValueError, match="--quantization gptq is not supported; use fp8 or awq"):
        parse_args(["--quantization", "gptq"])


@pytest.mark.parametrize("line", ["M --port 1", "--port 1 M", "--model M --port 1", "--port 1 M --model M"])
def test_the_model_may_stand_anywhere(line: str) -> None:
    config = parse_args(line.split())
    assert (config.model, config.port) == ("M", 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A --model B", "two models"),
        ("--workers 0", "--workers is 0"),
        ("--port 65536", "--port 65536"),
        ("--worker-port 65535 --workers 2", "--worker-port 65535"),
        ("--startup-timeout 0", "--startup-timeout"),
        ("--block-size 7", "--block-size is 7"),
        ("--chat-template /no/such/file", "--chat-template is /no/such/file"),
        ("--max-body-bytes 0", "--max-body-bytes is 0"),
        ("--no-such-flag", "--no-such-flag; see quire serve --help"),
        ("--port many", "--port: invalid int value: 'many'"),
    ],
)
def test_impossible_settings_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_args(line.split())


@pytest.mark.parametrize("flag", ["--worker-urls", "--worker-id", "--router"])
def test_what_the_launcher_sets_itself_is_refused_with_a_way_out(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} is set by quire serve: "):
        parse_args([flag, "x"])


def test_aliases_of_workers() -> None:
    assert parse_args(["-dp", "3"]).workers == parse_args(["--data-parallel-size", "3"]).workers == 3


def test_own_flags_are_not_handed_on() -> None:
    line = "--host 0.0.0.0 --port 1 --shutdown-timeout 3 --log-level debug --served-model-name a b"
    config = parse_args(line.split())
    assert config.worker_flags + config.router_flags + config.gateway_flags == ()
    assert config.served_model_names == ("a", "b")


@pytest.mark.parametrize("package", PROCESSES)
def test_every_flag_of_a_process_is_one_of_serve(package: str) -> None:
    parser = argparse.ArgumentParser()
    PROCESSES[package].add_arguments(parser)
    assert {action.dest for action in parser._actions} <= {action.dest for action in build_parser()._actions}


@given(
    max_model_len=st.none() | st.integers(1, 10**6),
    block_size=st.sampled_from([1, 8, 16, 32]),
    caching=st.booleans(),
    utilization=st.floats(0.01, 1.0),
    dtype=st.sampled_from(["auto", "float16"]),
)
def test_handed_on_flags_mean_the_same_to_the_worker(
    max_model_len: int | None, block_size: int, caching: bool, utilization: float, dtype: str
) -> None:
    line = ["--block-size", str(block_size), "--gpu-memory-utilization", str(utilization), "--dtype", dtype]
    line += ["--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
    line += [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    got = worker.config.parse_args(["--model", "m", *parse_args(line).worker_flags])
    assert got.max_model_len == max_model_len
    assert (got.block_size, got.enable_prefix_caching, got.dtype) == (block_size, caching, dtype)
    assert got.gpu_memory_utilization == utilization


@given(
    several=st.lists(st.text("ab-", min_size=1).filter(lambda s: not s.startswith("-")), min_size=1),
    each=st.lists(st.text("ab", min_size=1)),
    on=st.booleans(),
    off=st.booleans(),
)
def test_every_kind_of_flag_survives_being_handed_on(several: list[str], each: list[str], on: bool, off: bool) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("-s", "--several", nargs="+")
        parser.add_argument("--each", action="append")
        parser.add_argument("--on", action="store_true")
        parser.add_argument("--off", action=argparse.BooleanOptionalAction, default=True)

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given_args = argparse.Namespace(several=several, each=each or None, on=on, off=off)
    assert parser.parse_args(forwarded_flags(add_arguments, given_args)) == given_args
