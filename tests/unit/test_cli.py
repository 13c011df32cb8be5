"""The quire command: which sub-command runs, and with what."""

from pathlib import Path

import pytest

from quire import cli
from quire.models import DEMO_MODEL, ModelError


def test_without_a_command_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for command in ("serve", "worker", "router", "gateway", "chat", "bench", "fetch"):
        assert f"\n  {command} " in out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sreve"])
    assert ended.value.code == 2
    assert "sreve" in capsys.readouterr().err


def test_fetch_prints_where_a_model_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.resolve()}\n"


def test_a_model_that_is_not_there_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "/nowhere/model"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "/nowhere/model" in err


@pytest.mark.parametrize("command", ["worker", "router", "serve"])
def test_every_process_says_first_that_the_model_is_missing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--port", "0", "--grpc-port", "0", "--worker-port", "0"] if command == "serve" else []
    assert cli.main([command, "--model", "/nowhere/model", *ports]) == 1
    assert "no model '/nowhere/model'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "worker", "router", "gateway", "chat", "bench", "fetch"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_processes_get_a_local_path_and_clients_see_the_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "some-model.gguf"
    file.touch()
    assert cli.with_local_model(["--port", "1", f"--model={file}"], served=True) == [
        *("--model", str(file), "--port", "1", "--served-model-name", "some-model")
    ]
    assert cli.with_local_model(["--model", str(file)], served=False) == ["--model", str(file)]
    assert cli.with_local_model(["--model", str(file), "--served-model-name", "a", "b"], served=True) == [
        *("--model", str(file), "--served-model-name", "a", "b")
    ]
    monkeypatch.setattr(cli, "resolve", lambda model: Path("/cache") / model)
    assert cli.with_local_model([], served=True) == [
        *("--model", f"/cache/{DEMO_MODEL}", "--served-model-name", DEMO_MODEL)
    ]


def test_help_of_a_process_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str) -> Path:
        raise ModelError(model)

    monkeypatch.setattr(cli, "resolve", refuse)
    assert cli.with_local_model(["--help"], served=True) == ["--help"]
