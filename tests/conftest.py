"""Fixtures that more than one test file needs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is first imported, by whichever library: kernels are then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from router.tokenizer import Tokenizer
    from tests.doubles.demo_oracle import GreedyOracle


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; QUIRE_TEST_MODEL names one that is already there."""
    path = os.environ.get("QUIRE_TEST_MODEL")
    if path:
        return Path(path)
    from quire.models import fetch_demo_model

    return fetch_demo_model()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> "Tokenizer":
    """The demo model's tokenizer, as the router loads it."""
    # Tests of the worker run on machines without the router's libraries.
    from router.tokenizer_loading import load_tokenizer

    return load_tokenizer(demo_model)


@pytest.fixture(scope="session")
def greedy_oracle(demo_model: Path, request: pytest.FixtureRequest) -> "GreedyOracle":
    """What transformers generates with the demo model, which it loads once for all tests that ask."""
    from tests.doubles.demo_oracle import GreedyOracle

    return GreedyOracle(demo_model, request.config.rootpath / ".cache" / "greedy-oracle")
