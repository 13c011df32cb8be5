"""``python requirements.py [EXTRA ...]``: prints what pyproject.toml, in this folder, requires with these extras.

An image installs this list before it copies the source, so that a changed source installs nothing anew.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of a project with some extras, each once, without those on the project itself.

    Args:
        project: pyproject.toml's table ``project``.

    Raises:
        ValueError: the project has no such extra.
    """
    return list(dict.fromkeys([*project["dependencies"], *_of_extras(project, extras)]))


def _of_extras(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    known: dict[str, list[str]] = project["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise ValueError(f"pyproject.toml has no extra {extra!r}; it has {', '.join(known)}")
        for requirement in known[extra]:
            if own := re.fullmatch(rf"{project['name']}\[(.+)\]", requirement):
                yield from _of_extras(project, re.split(r"\s*,\s*", own[1]))
            else:
                yield requirement


def main() -> int:
    """Prints one requirement a line. Returns the process's exit status."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    try:
        lines = requirements(project, sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"requirements.py: {error}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
