"""Each process's image installs all that the process imports, at its start or later."""

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.doubles.images import PROCESSES, ROOT, closure, required_by

OURS = {"gateway", "router", "worker", "kernels", "protos", "quire"}
# Brought by torch where it is built for GPUs, and imported there alone.
ONLY_ON_GPUS = {"worker": {"triton"}}


def file_of(module: str) -> Path | None:
    """Where a module's source is; None: it is a name within one."""
    path = ROOT / Path(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imported(node: ast.AST) -> Iterator[str]:
    """All that is imported under a node, but what only type checkers see: modules, and names that may be some."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def reached_from(entry: str) -> tuple[set[str], dict[str, str]]:
    """Our modules that an entry point leads to, and others' packages, each with one module of ours that imports it."""
    seen: set[str] = set()
    others: dict[str, str] = {}
    todo = [entry]
    while todo:
        module = todo.pop()
        if module in seen or (file := file_of(module)) is None:
            continue
        seen.add(module)
        for name in imported(ast.parse(file.read_text(), str(file))):
            package = name.split(".")[0]
            if package in OURS:
                parts = name.split(".")
                todo += [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            elif package not in sys.stdlib_module_names:
                others.setdefault(package, module)
    return seen, others


@pytest.mark.parametrize("process", PROCESSES)
def test_what_a_process_imports_is_in_its_image(process: str) -> None:
    modules, others = reached_from(f"{process}.__main__")
    assert len(modules) > 50
    assert "grpc" in others
    providers = metadata.packages_distributions()
    there = closure(required_by(process))
    missing = {
        package: module
        for package, module in others.items()
        if package not in ONLY_ON_GPUS.get(process, ())
        and not there & {canonicalize_name(name) for name in providers.get(package, [])}
    }
    assert missing == {}
