"""All measurements of one GPU in one call: steady decode (D), mixed requests (T), prefill (PF), in bf16 and fp8.

    python -m benchmarks.gpu [--model benchmarks/models/llama-3.1-8b] [--quick]

Each measurement is a process of its own, which compares a tiny model's output with transformers' before it times
anything; one that fails is reported, and the others go on. What they found is printed once more at the end.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

FP8 = ["--quantization", "fp8", "--kv-cache-dtype", "fp8"]


def measurements(quick: bool) -> dict[str, list[str]]:
    """Modules and their arguments, by what they measure."""
    batches = ["1", "64"] if quick else ["1", "8", "64", "256"]
    decode = ["benchmarks.decode", "--batch", *batches, "--steps", "16" if quick else "64"]
    offline = ["benchmarks.offline", *(["--requests", "128", "--max-output", "64"] if quick else [])]
    found = {"decode, bf16": decode, "offline, bf16": offline}
    return found | {name.replace("bf16", "fp8"): [*arguments, *FP8] for name, arguments in found.items()}


def run(arguments: list[str]) -> list[str]:
    """The lines that a measurement printed, which are shown as they come. Raises CalledProcessError."""
    lines = []
    with subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print("   ", line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--quick", action="store_true", help="fewer batches, steps and requests")
    args = parser.parse_args()

    summary: dict[str, list[str]] = {}
    failed = False
    for name, arguments in measurements(args.quick).items():
        started = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            lines = run([*arguments, "--model", str(args.model)])
        except subprocess.CalledProcessError as error:
            failed, lines = True, [f"FAILED with status {error.returncode}; see above"]
        summary[f"{name} ({time.perf_counter() - started:.0f} s)"] = lines
    print("\nSummary")
    for name, lines in summary.items():
        print(name)
        for line in lines:
            if not line.startswith("correctness"):
                print("   ", line)
    sys.exit(failed)


if __name__ == "__main__":
    main()
