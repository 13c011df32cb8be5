"""Cold start (workload C) of a model's shape: ``quire bench startup``, also for folders without weights or tokenizer.

    python -m benchmarks.startup --model benchmarks/models/llama-3.1-8b [any flag of quire bench startup]

A model without weights gets random ones; making them is told apart and not counted, as reading real ones takes a time
of its own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.serving.servable import servable
from quire.bench.startup import main as startup


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(__file__).parent / "models"
    parser.add_argument("--model", type=Path, default=models / "llama-3.1-8b", help="folder or .gguf file")
    parser.add_argument("--max-model-len", default="8192")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model, load_format = servable(args.model, Path(folder))
        flags += ["--model", str(model), "--max-model-len", args.max_model_len]
        return startup([*flags, *(["--load-format", load_format] if load_format else [])])


if __name__ == "__main__":
    sys.exit(main())
