"""Settings of TLS that cannot work are refused at start, with the flag, the file and what is wrong."""

import re
import subprocess
from pathlib import Path

import pytest

import gateway.config
import quire.config
import quire.plan
import router.config
import worker.config
from tests.doubles.certificates import Authority

MODEL = ["--model", "/dev/null"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def pair(authority: Authority) -> list[str]:
    return served(*authority.issue("server"))


def served(certfile: Path, keyfile: Path) -> list[str]:
    return ["--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile)]


def refusal(*flags: str) -> str:
    with pytest.raises(worker.config.ConfigError) as caught:
        worker.config.parse_args([*MODEL, *flags])
    return str(caught.value)


def test_right_settings_are_taken(authority: Authority, pair: list[str]) -> None:
    ca = str(authority.certfile)
    flags = [*pair, "--ssl-ca-certs", ca, "--ssl-client-names", "router.quire"]
    settings = worker.config.parse_args([*MODEL, *flags])
    assert settings.tls is not None
    assert settings.tls.client_names == ("router.quire",)
    calls = ["--worker-ssl-ca-certs", ca, "--worker-ssl-certfile", pair[1], "--worker-ssl-keyfile", pair[3]]
    asked = router.config.parse_args([*MODEL, "--worker-urls", "a:1", *flags, *calls, "--worker-ssl-name", "w"])
    assert asked.worker_tls is not None
    assert asked.worker_tls.name == "w"
    assert gateway.config.parse_args([*pair, "--router-ssl-ca-certs", ca]).router_tls is not None


def test_missing_halves_and_files(authority: Authority, pair: list[str], folder: Path) -> None:
    ca = str(authority.certfile)
    assert "--ssl-keyfile" in refusal(*pair[:2])
    assert "--ssl-certfile" in refusal("--ssl-ca-certs", ca)
    assert "--ssl-ca-certs" in refusal(*pair, "--ssl-client-names", "a")
    assert "--register" in refusal("--router-ssl-ca-certs", ca)
    assert "--router-ssl-ca-certs is missing" in refusal("--router-ssl-name", "a")
    assert "--router-ssl-keyfile" in refusal("--router-ssl-ca-certs", ca, "--router-ssl-certfile", pair[1])
    gone = folder / "gone.pem"
    assert refusal(*served(gone, Path(pair[3]))) == f"--ssl-certfile is {gone}: No such file or directory"
    assert refusal(*served(Path(pair[1]), gone)) == f"--ssl-keyfile is {gone}: No such file or directory"
    assert refusal(*pair, "--ssl-ca-certs", str(gone)) == f"--ssl-ca-certs is {gone}: No such file or directory"
    assert "Is a directory" in refusal(*pair, "--ssl-ca-certs", str(folder))


def test_what_is_in_the_files(authority: Authority, pair: list[str], folder: Path) -> None:
    certfile, keyfile = Path(pair[1]), Path(pair[3])
    _, other_key = authority.issue("other")
    assert f"--ssl-keyfile is {other_key}: it does not fit the certificate {certfile}" in refusal(
        *served(certfile, other_key)
    )
    assert "no certificate in PEM form" in refusal(*served(keyfile, keyfile))
    assert "no private key in PEM form" in refusal(*served(certfile, certfile))
    empty = folder / "empty.pem"
    empty.write_text("")
    assert "no certificate in PEM form" in refusal(*pair, "--ssl-ca-certs", str(empty))
    locked = folder / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", keyfile, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    assert "it is encrypted" in refusal(*served(certfile, locked))


def test_certificates_that_are_not_good_today_or_for_this(authority: Authority, folder: Path) -> None:
    expired = authority.issue("expired", days=-1)
    assert f"--ssl-certfile is {expired[0]}: it is expired" in refusal(*served(*expired))
    of_client = authority.issue("client", usage="clientAuth")
    assert re.search("cannot be used here .*purpose", refusal(*served(*of_client)))
    shown = ["--router-ssl-certfile", str(of_client[0]), "--router-ssl-keyfile", str(of_client[1])]
    gateway.config.parse_args(["--router-ssl-ca-certs", str(authority.certfile), *shown])
    of_server = authority.issue("only-server", usage="serverAuth")
    shown = ["--router-ssl-certfile", str(of_server[0]), "--router-ssl-keyfile", str(of_server[1])]
    with pytest.raises(gateway.config.ConfigError, match=r"--router-ssl-certfile .*purpose"):
        gateway.config.parse_args(["--router-ssl-ca-certs", str(authority.certfile), *shown])
    past = Authority(folder, "past", days=-1)
    assert f"--ssl-ca-certs is {past.certfile}: expired on" in refusal(
        *served(*authority.issue("server")), "--ssl-ca-certs", str(past.certfile)
    )


def test_quire_serve_gives_them_to_router_and_gateway(authority: Authority, pair: list[str]) -> None:
    ca = str(authority.certfile)
    ports = ["--port", "0", "--grpc-port", "0"]
    with pytest.raises(ValueError, match="--ssl-certfile needs --router-ssl-ca-certs"):
        quire.config.parse_args([*ports, *pair])
    with pytest.raises(ValueError, match="without --ssl-certfile"):
        quire.config.parse_args([*ports, "--router-ssl-ca-certs", ca])
    with pytest.raises(ValueError, match="give it one with --router-ssl-certfile"):
        quire.config.parse_args([*ports, *pair, "--ssl-ca-certs", ca, "--router-ssl-ca-certs", ca])
    with pytest.raises(ValueError, match="without TLS"):
        quire.config.parse_args([*ports, "--worker-ssl-name", "a"])
    config = quire.config.parse_args([*ports, *pair, "--router-ssl-ca-certs", ca])
    plan = quire.plan.make_plan(config, Path("/dev/null"), {})
    assert plan.url.startswith("https://")
    asked, answers = router.config.parse_args([*plan.router.args]), gateway.config.parse_args([*plan.gateway.args])
    assert asked.tls == answers.tls
    assert asked.tls is not None
    assert answers.router_tls == plan.router_tls
    assert worker.config.parse_args([*plan.workers[0].args]).tls is None
