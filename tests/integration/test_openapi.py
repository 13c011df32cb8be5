"""The OpenAPI document against the server: Schemathesis makes requests of it, and holds the answers to it."""

import os
import shutil
import subprocess

import pytest

from tests.integration.fake_inference import FakeInference, running_stack

# It must be pinned to versions of libraries that are not ours, and so runs from an environment of its own.
PROGRAM = os.environ.get("QUIRE_TEST_SCHEMATHESIS") or shutil.which("schemathesis")
# That every body is served which the schema allows cannot be: limits are settings, and fields exclude each other.
CHECKS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance")


@pytest.mark.slow
@pytest.mark.skipif(
    PROGRAM is None,
    reason="Schemathesis is not here: pipx install schemathesis, or name it in QUIRE_TEST_SCHEMATHESIS",
)
def test_answers_are_as_documented(tmp_path):
    with running_stack(FakeInference(words=["x"], any_model=True)) as stack:
        done = subprocess.run(
            [
                str(PROGRAM), "run", f"{stack.url}/openapi.json", *CHECKS, "--no-color",
                "--phases", "coverage,fuzzing", "--max-examples", "30", "--seed", "1", "--no-shrink",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Tested: " in done.stdout
