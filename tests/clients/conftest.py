"""A server for clients to talk to: the three processes with the demo model, or one that runs already."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.processes import Stack

MODEL = "QUIRE_TEST_SERVED_MODEL"
URL = "QUIRE_TEST_URL"


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Address and model; QUIRE_TEST_URL and QUIRE_TEST_SERVED_MODEL name others, for clients in another environment."""
    if URL in os.environ:
        yield os.environ[URL], os.environ[MODEL]
        return
    model: Path = request.getfixturevalue("demo_model")
    stack = Stack(model, "--max-model-len", "1024")
    stack.start()
    yield stack.url, "model"
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}
