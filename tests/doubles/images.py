"""What compose/Dockerfile says of the images: their stages, and what each process's image installs."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROCESSES = ("gateway", "router", "worker")


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name, each as its instructions and their arguments."""
    text = re.sub(r"\\\n", " ", (ROOT / "compose/Dockerfile").read_text())
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stages[rest.split(" AS ")[1]] = []
        list(stages.values())[-1].append((instruction, rest))
    return stages


STAGES = read_stages()


def arguments(stage: str, instruction: str) -> list[str]:
    """What follows each such instruction of a stage."""
    return [rest for name, rest in STAGES[stage] if name == instruction]


def run_script(name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of compose/ to its end."""
    command = [sys.executable, str(ROOT / "compose" / name), *argv]
    return subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60
    )


def extras_of(process: str) -> list[str]:
    """The extras that a process's image installs."""
    (found,) = re.findall(rf"requirements\.py ([\w ]+) > {process}\.txt", arguments("requirements", "RUN")[0])
    return found.split()


def required_by(process: str) -> list[Requirement]:
    """What a process's image installs, before what that brings."""
    done = run_script("requirements.py", *extras_of(process))
    assert done.returncode == 0, done.stderr
    return [Requirement(line) for line in done.stdout.splitlines()]


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of all distributions that these requirements bring, by what is installed here."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in requirements]
    while todo:
        requirement, asked = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": asked}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(line), extra) for line in metadata.requires(name) or []]
    return {name for name, _ in seen}
