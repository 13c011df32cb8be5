"""The gateway's flags: defaults, refusals, and that importing them is cheap."""

import dataclasses
import subprocess
import sys

import pytest

from gateway.__main__ import main
from gateway.config import ConfigError, GatewayConfig, parse_args
from gateway.request_limits import RequestLimits, flag_of


def test_defaults_of_flags_are_those_of_the_dataclass():
    assert parse_args([]) == GatewayConfig()


def test_every_flag_is_taken():
    flags = {
        "--host": "0.0.0.0", "--port": "0", "--router": "router:50051", "--request-timeout": "5",
        "--max-body-bytes": "10", "--shutdown-timeout": "0", "--log-level": "debug",
    }  # fmt: skip
    origins = ["--allowed-origins", "https://a.example", "https://b.example"]
    config = parse_args([word for pair in flags.items() for word in pair] + origins)
    assert config == GatewayConfig(
        host="0.0.0.0",
        port=0,
        router="router:50051",
        request_timeout=5.0,
        limits=RequestLimits(max_body_bytes=10),
        shutdown_timeout=0.0,
        log_level="debug",
        allowed_origins=("https://a.example", "https://b.example"),
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "http"),
        ("--router", "nowhere"),
        ("--router", ":50051"),
        ("--router", "host:0"),
        ("--request-timeout", "0"),
        ("--request-timeout", "nan"),
        ("--request-timeout", "inf"),
        ("--shutdown-timeout", "-1"),
        ("--max-body-bytes", "0"),
        ("--log-level", "loud"),
        ("--allowed-origins", "a.example"),
        ("--no-such-flag", "1"),
    ],
)
def test_bad_settings_end_the_process_with_one_line_that_names_them(flag, value, capsys):
    with pytest.raises(ConfigError, match=flag):
        parse_args([f"{flag}={value}"])
    assert main([f"{flag}={value}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


@pytest.mark.parametrize("limit", dataclasses.fields(RequestLimits), ids=lambda limit: limit.name)
def test_limits_have_a_flag_a_default_and_a_range(limit):
    flag, most = flag_of(limit.name), limit.metadata["most"]
    assert 1 <= limit.default <= most
    assert getattr(parse_args([flag, "1"]).limits, limit.name) == 1
    assert getattr(parse_args([flag, str(most)]).limits, limit.name) == most
    for bad in (0, -1, most + 1):
        with pytest.raises(ConfigError, match=f"{flag} is {bad}; it must be 1 to {most}"):
            parse_args([f"{flag}={bad}"])


def test_importing_the_flags_imports_no_library():
    code = (
        "import sys, gateway.config; print([m for m in ('grpc', 'fastapi', 'pydantic', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
