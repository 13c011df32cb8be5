"""The environment of Python processes that the worker starts."""

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Ours, and a child imports what we have imported, whatever lies in the folder that we were started in."""
    code = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
