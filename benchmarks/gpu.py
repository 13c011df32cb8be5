"""All measurements of one GPU in one call: steady decode (D), mixed requests (T), prefill (PF), and drafts.

    python -m benchmarks.gpu [--only bf16 fp8 awq drafts 70b] [--model benchmarks/models/llama-3.1-8b] [--quick]

Weights are bf16, fp8 (once more with an 8-bit cache), and 4-bit where MODEL-awq lies beside the model. The 70B model
runs only when it is named. What a GPU cannot do is left out, and said: 8 bits need compute capability 8.9, all else
8.0. Each measurement is a process of its own, which compares a tiny model's output with transformers' before it times
anything; one that fails is reported, and the others go on. At the end come short tables of all.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.float8 import has_float8

FP8 = ["--quantization", "fp8"]
FP8_CACHE = [*FP8, "--kv-cache-dtype", "fp8"]
KINDS = ("bf16", "fp8", "awq", "drafts", "70b")
_LOWEST = (8, 0)


@dataclass(frozen=True)
class Measurement:
    """A process to run.

    Attributes:
        name: of its row.
        kind: one of ``KINDS``.
        arguments: the module and its flags.
    """

    name: str
    kind: str
    arguments: list[str]

    @property
    def needs_float8(self) -> bool:
        """Whether the GPU must have instructions for 8-bit floats."""
        return "fp8" in self.arguments


def measurements(model: Path, quick: bool, speculative: str | None) -> list[Measurement]:
    """All that there are for this model."""
    steps = ["--steps", "16" if quick else "64"]
    decode = ["benchmarks.decode", "--batch", *(["1", "64"] if quick else ["1", "8", "64", "256"]), *steps]
    offline = ["benchmarks.offline", *(["--requests", "128", "--max-output", "64"] if quick else [])]
    drafts = ["benchmarks.speculation", "--rounds", "1" if quick else "3"]
    drafts += ["--speculative-config", speculative] if speculative else []
    of_model = ["--model", str(model)]
    found = []
    for name, kind, flags in (("bf16", "bf16", []), ("fp8", "fp8", FP8), ("fp8, 8-bit cache", "fp8", FP8_CACHE)):
        found.append(Measurement(name, kind, [*decode, *of_model, *flags]))
        found.append(Measurement(name, kind, [*offline, *of_model, *flags]))
    quantized = model.with_name(model.name + "-awq")
    if quantized.is_dir():
        found.append(Measurement("awq", "awq", [*decode, "--model", str(quantized)]))
        found.append(Measurement("awq", "awq", [*offline, "--model", str(quantized)]))
    found.append(Measurement("bf16", "drafts", [*drafts, *of_model]))
    large = Path(__file__).parent / "models" / "llama-3.1-70b"
    large_decode = ["benchmarks.decode", "--batch", "1", "8", "64", *steps, "--model", str(large), *FP8_CACHE]
    found.append(Measurement("70B, fp8, 8-bit cache", "70b", large_decode))
    return found


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


def decode_cells(lines: list[str]) -> dict[str, str]:
    """By batch: milliseconds a step, and the share of the memory floor."""
    rows = (re.fullmatch(r" *(\d+) +([\d.]+) +[\d.]+ +(\d+%) +\d+", line) for line in lines)
    return {f"at {row[1]}": f"{row[2]} ({row[3]})" for row in rows if row}


def offline_cells(lines: list[str]) -> dict[str, str]:
    """Prefill alone in milliseconds, several at once and mixed requests in tokens per second."""
    cells = {}
    for line in lines:
        if match := re.match(r"(PF .+): ([\d.]+) ms, (\d+) tokens/s", line):
            cells[match[1]] = f"{match[2]} ms" if match[1].startswith("PF 1 ") else f"{match[3]} tok/s"
        elif match := re.match(r"(T .+): [\d.]+ s, (\d+) output", line):
            cells[match[1]] = f"{match[2]} tok/s"
    return cells


def drafts_cells(lines: list[str]) -> dict[str, str]:
    """By task: steps and seconds with drafts, as shares of those without."""
    pattern = r"(.+): steps .+ \(([\d.]+)\), seconds .+ \(([\d.]+)\), of the processor .+, (\d+ of \d+) drafts"
    rows = (re.match(pattern, line) for line in lines)
    return {row[1]: f"{row[2]} / {row[3]}, {row[4]}" for row in rows if row}


TABLES = {
    "benchmarks.decode": ("decode, ms a step (share of the memory floor)", decode_cells),
    "benchmarks.offline": ("prefill and mixed requests", offline_cells),
    "benchmarks.speculation": ("drafts: steps / seconds as shares of those without, drafts accepted", drafts_cells),
}


def print_table(title: str, rows: list[tuple[str, dict[str, str]]]) -> None:
    """A row a line, with all columns that any of them has."""
    columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
    width = max(len(name) for name, _ in rows)
    widths = [max(len(column), *(len(cells.get(column, "")) for _, cells in rows)) for column in columns]
    print(f"\n{title}")
    print("  ".join([" " * width, *(f"{column:>{size}}" for column, size in zip(columns, widths, strict=True))]))
    for name, cells in rows:
        shown = (f"{cells.get(column, ''):>{size}}" for column, size in zip(columns, widths, strict=True))
        print("  ".join([f"{name:{width}}", *shown]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(__file__).parent / "models"
    parser.add_argument("--model", type=Path, default=models / "llama-3.1-8b", help="a folder; weights are random")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS[:-1], help="default: all but 70b")
    parser.add_argument("--speculative-config", metavar="JSON", help="of the drafts (default: prompt lookup, 4 tokens)")
    parser.add_argument("--quick", action="store_true", help="fewer batches, steps and requests")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _LOWEST:
        parser.exit(1, "this needs a GPU of compute capability 8.0 or newer that torch sees\n")

    tables: dict[str, list[tuple[str, dict[str, str]]]] = {}
    ended: list[str] = []
    failed = False
    for measurement in measurements(args.model, args.quick, args.speculative_config):
        if measurement.kind not in args.only:
            continue
        module, *_ = measurement.arguments
        what = f"{module.removeprefix('benchmarks.')}, {measurement.name}"
        if measurement.needs_float8 and not has_float8(torch.device("cuda")):
            ended.append(f"left out: {what}; 8 bits need compute capability 8.9")
            continue
        started = time.perf_counter()
        print(f"== {what}", flush=True)
        try:
            tables.setdefault(module, []).append((measurement.name, TABLES[module][1](run(measurement.arguments))))
        except subprocess.CalledProcessError as error:
            failed = True
            ended.append(f"FAILED: {what}, with status {error.returncode}; see above")
        print(f"   {time.perf_counter() - started:.0f} s", flush=True)
    for module, rows in tables.items():
        if rows:
            print_table(TABLES[module][0], rows)
    print("\n".join(["", *ended]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
