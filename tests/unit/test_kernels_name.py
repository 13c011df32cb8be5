"""Our folder ``kernels`` has the name of a distribution that transformers looks for; it must not take ours for that."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json
from importlib.metadata import packages_distributions
import kernels, torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
model = LlamaForCausalLM(config)
ids = model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
print(json.dumps({
    "file": kernels.__file__,
    "owners": [name.lower() for name in packages_distributions().get("kernels", [])],
    "available": is_kernels_available(),
    "tokens": ids.shape[1],
}))
"""


def test_transformers_works_beside_our_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["file"] == str(ROOT / "kernels" / "__init__.py")
    assert "kernels" not in found["owners"]
    assert found["available"] is False
    assert found["tokens"] == 5
