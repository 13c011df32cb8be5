"""The house rules that docs/architecture.md states: who may import whom, names, and sizes."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "protos": set(),
    "kernels": set(),
    "gateway": {"protos"},
    "router": {"protos"},
    "worker": {"kernels", "protos"},
    "quire": {"gateway", "protos", "router", "worker"},
}
LINE_LIMIT = 500


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def imported(path: Path) -> Iterator[str]:
    """The top-level names of all absolute imports in a file, wherever in it they stand."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = sources(package)
    assert files, f"{package}/ holds no Python file"
    allowed = MAY_IMPORT[package] | {package}
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path)
        if name in MAY_IMPORT and name not in allowed
    }
    assert not wrong


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"kernels", "torch", "triton", *sys.stdlib_module_names}
    wrong = {f"{path.name} imports {name}" for path in sources("kernels") for name in imported(path)}
    assert {line for line in wrong if line.rsplit(" ", 1)[1] not in allowed} == set()


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after one statement."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(package: str) -> str:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(package)]
    return "import " + ", ".join(name.removesuffix(".__init__") for name in names)


@pytest.mark.parametrize("package", ["router", "gateway", "protos"])
def test_router_and_gateway_run_where_torch_is_not_installed(package: str) -> None:
    assert not loaded_after(modules_of(package)) & {"torch", "transformers", "worker", "kernels"}


def test_a_worker_on_a_cpu_needs_no_triton() -> None:
    assert "triton" not in loaded_after("import worker.__main__, worker.rank, worker.startup, worker.model_runner")


def test_the_command_starts_without_torch() -> None:
    assert "torch" not in loaded_after(
        "import quire.cli, quire.serve, quire.chat, quire.bench.command, quire.bench.serve"
    )


def test_the_offline_api_is_imported_when_it_is_used() -> None:
    assert loaded_after("import quire") <= {"quire", *sys.stdlib_module_names, *loaded_after("pass")}
    assert "torch" not in loaded_after("from quire import EngineArgs, RequestOutput, SamplingParams")
    assert {"torch", "tokenizers"} <= loaded_after("from quire import *")


@pytest.mark.parametrize("package", ["worker", "router", "gateway"])
def test_config_modules_need_the_standard_library_only(package: str) -> None:
    allowed = {package, "protos"}  # of which only what knows no gRPC either
    assert loaded_after(f"import {package}.config") <= {*allowed, *sys.stdlib_module_names, *loaded_after("pass")}


def test_no_file_is_named_after_nothing_in_particular() -> None:
    files = [path for folder in (*MAY_IMPORT, "tests", "benchmarks") for path in sources(folder)]
    vague = re.compile(r"(utils?|common|helpers?|misc|manager)", re.IGNORECASE)
    parts = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {part for part in parts if vague.fullmatch(part.removeprefix("test_"))} == set()
    classes = {
        node.name for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    }
    assert {name for name in classes if name.endswith("Manager")} == set()


def test_an_installed_quire_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.relative_to(ROOT).parts[:-1]) for folder in MAY_IMPORT for path in sources(folder)}
    assert found == set(listed)


def test_files_stay_short() -> None:
    files = [path for folder in (*MAY_IMPORT, "tests", "benchmarks") for path in sources(folder)]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: size for name, size in sizes.items() if size >= LINE_LIMIT} == {}


def test_test_folders_hide_no_package() -> None:
    """A package or a folder of a package's name below tests/ would be imported in place of the real one."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()} & set(MAY_IMPORT) == set()
