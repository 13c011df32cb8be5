"""The conformance suite against the whole stack with the demo model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.demo_oracle import load_tokenizer
from tests.doubles.processes import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SUITE = Path(__file__).resolve().parents[1] / "conformance"


@pytest.fixture(scope="module")
def environment(demo_model, tmp_path_factory):
    """What the suite reads: the address of a running stack, and a folder with the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer(demo_model).save_pretrained(folder)
    stack = Stack(demo_model, "--max-model-len", "4096", gateway_flags=("--api-key", "conformance"))
    stack.start()
    yield {
        **os.environ,
        "BASE_URL": f"{stack.url}/v1",
        "MODEL": "model",
        "MODEL_DIR": str(folder),
        "API_KEY": "conformance",
    }
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """(exit status, output) of the suite."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(SUITE / "pytest.ini")]
    done = subprocess.run(
        [*command, *arguments], cwd=SUITE, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_conformance(environment):
    status, output = run(environment)
    assert status == 0, output
