"""The router's flags."""

from pathlib import Path

import pytest

from router.config import POLICIES, ConfigError, RouterConfig, parse_args
from router.routing.policies import POLICIES as RULES

GOOD = ["--model", "/dev/null", "--worker-urls", "127.0.0.1:50061"]


def test_workers_are_separated_by_spaces_commas_and_flags():
    argv = ["--model", "/dev/null", "--worker-urls", "a:1,b:2", "c:3", "--worker-urls", "[::1]:4,a:1"]
    assert parse_args(argv).worker_urls == ("a:1", "b:2", "c:3", "[::1]:4")


def test_names_default_to_the_models_own(tmp_path):
    folder = tmp_path / "Model-3.1-8B"
    folder.mkdir()
    assert RouterConfig(folder, ("a:1",)).model_names == ("Model-3.1-8B",)
    assert RouterConfig(Path("x/smol.gguf"), ("a:1",)).model_names == ("smol",)
    assert parse_args([*GOOD, "--served-model-name", "a", "b", "a"]).model_names == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--model"),
        (["--model", "/dev/null", "--worker-urls", ","], "names no worker"),
        (["--model", "/dev/null", "--worker-urls", "localhost"], "'localhost'; a worker is HOST:PORT"),
        (["--model", "/dev/null", "--worker-urls", "h:70000"], "HOST:PORT"),
        (["--model", "/no/such/folder", "--worker-urls", "h:1"], "--model is /no/such/folder: no such file"),
        ([*GOOD, "--chat-template", "/no/such/file"], "--chat-template"),
        ([*GOOD, "--tokenizer", "/no/such/file"], "--tokenizer"),
        ([*GOOD, "--port", "70000"], "--port is 70000"),
        ([*GOOD, "--max-unsent-bytes", "1000"], "--max-unsent-bytes is 1000"),
        ([*GOOD, "--metrics-port", "0"], "--metrics-port is 0"),
        ([*GOOD, "--max-num-queued-reqs", "0"], "--max-num-queued-reqs is 0"),
        ([*GOOD, "--max-num-queued-tokens", "0"], "--max-num-queued-tokens is 0"),
        ([*GOOD, "--tokenizer-threads", "0"], "--tokenizer-threads is 0"),
        ([*GOOD, "--max-queue-wait", "nan"], "--max-queue-wait is nan"),
        ([*GOOD, "--worker-timeout", "0"], "--worker-timeout is 0.0"),
        ([*GOOD, "--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        ([*GOOD, "--policy", "best"], "--policy"),
        ([*GOOD, "--served-model-name", ""], "--served-model-name has an empty name"),
        ([*GOOD, "--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_are_explained(argv, words):
    with pytest.raises(ConfigError) as raised:
        parse_args(argv)
    assert words in str(raised.value)


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    made_of_others = {
        "api_keys": ("--api-key", "--api-keys-file"), "own_key": (), "tls": ("--ssl-certfile", "--ssl-client-names"),
        "worker_tls": ("--worker-ssl-ca-certs",),
    }  # fmt: skip
    for name in RouterConfig.__dataclass_fields__:
        for flag in made_of_others.get(name, (f"--{name.replace('_', '-')}",)):
            assert flag in shown


def test_every_policy_that_can_be_asked_for_exists():
    assert set(POLICIES) == set(RULES)
    assert all(rule.name == name for name, rule in RULES.items())
