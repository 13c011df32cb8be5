"""OpenAI's client for Node."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("openai_node.cjs")
NODE = shutil.which("node")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def has_client() -> bool:
    return NODE is not None and not subprocess.run([NODE, "-e", "require('openai')"], capture_output=True).returncode


@pytest.mark.skipif(not has_client(), reason="npm install openai; NODE_PATH names its node_modules")
def test_chat_stream_tools_and_structured_output(server):
    done = subprocess.run([str(NODE), SCRIPT, *server], env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "chat, stream, tools, structured output"
