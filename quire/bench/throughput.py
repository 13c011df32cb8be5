"""``quire bench throughput``: many requests at once through the engine in this process, without servers."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from protos.logs import log_to_stderr
from quire.bench.engine_flags import add_engine_arguments, engine_args
from quire.bench.records import Job
from quire.bench.request_flags import add_request_arguments, ignores_eos, sessions_of
from quire.bench.table import titled, write_json
from quire.models import ModelError, resolve

if TYPE_CHECKING:
    from quire.offline.llm_engine import LLMEngine
    from quire.offline.outputs import RequestOutput
    from quire.offline.request_record import RequestRecord

PROG = "quire bench throughput"
_INTERRUPTED = 130
_END_ID = 32000  # of random prompts, where the vocabulary has more


@dataclass
class Outcome:
    """What came of all requests.

    Attributes:
        seconds: from the first step's start to the last one's end; tokenizing is not in it.
        failures: by what was said, how many requests.
    """

    completed: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    failures: Counter[str] = field(default_factory=Counter)

    def take(self, output: "RequestOutput") -> None:
        """Counts a request that is through."""
        self.completed += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.output_tokens += sum(len(choice.token_ids) for choice in output.outputs)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire bench throughput``."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        allow_abbrev=False,
        conflict_handler="resolve",  # --seed is one for weights and requests
        description="Give the engine all requests at once, as quire.LLM does, and count requests and tokens a second. "
        "Exits 1 when a request failed.",
    )
    add_engine_arguments(parser)
    parser.add_argument("--tokenizer", metavar="PATH", help="a folder or .gguf file, if it is not the model's")
    add_request_arguments(parser, sessions=False)
    parser.add_argument("--temperature", type=float, default=0.0, help="of all outputs (default %(default)g: greedy)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns 0, 1 when it or a request failed, 130 when it was interrupted."""
    args = build_parser().parse_args(argv)
    log_to_stderr(args.log_level, "bench", args.log_format)
    try:
        arguments = engine_args(args)
        arguments.model = resolve(args.model)
        jobs = _jobs(args, arguments.model)
        from quire.offline.llm_engine import LLMEngine
        from worker.parallel.ranks import RankFailed
    except (ValueError, ModelError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    try:
        engine = LLMEngine.from_engine_args(arguments)
    except (ValueError, RankFailed) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    try:
        outcome = run_jobs(engine, jobs, args.temperature, ignores_eos(args))
    finally:
        engine.close()
    _report(args, outcome)
    return _INTERRUPTED if outcome.interrupted else int(bool(outcome.failures))


def _jobs(args: argparse.Namespace, model: Path) -> list[Job]:
    """Raises ValueError: the dataset cannot be used, or the model is none."""
    vocab_size = _END_ID
    if args.dataset is None:
        from worker.loader import open_checkpoint

        vocab_size = min(_END_ID, open_checkpoint(model).config.vocab_size)
    return [job for session in sessions_of(args, "ids", vocab_size) for job in session.turns]


def run_jobs(engine: "LLMEngine", jobs: Sequence[Job], temperature: float, ignore_eos: bool) -> Outcome:
    """Runs all requests to their end, or until Ctrl-C."""
    from router.errors import RequestError

    outcome = Outcome()
    ready = _prepared(engine, jobs, temperature, ignore_eos, outcome)
    with tqdm(total=len(ready), unit="req", disable=not sys.stderr.isatty()) as bar:
        began = time.monotonic()
        try:
            for record in ready:
                engine.start(record)
            while engine.has_unfinished_requests():
                left = engine.get_num_unfinished_requests()
                try:
                    for output in engine.step():
                        outcome.take(output)
                except (RequestError, ValueError) as error:  # of one request, which is over; the others go on
                    outcome.failures[str(error)] += 1
                bar.update(left - engine.get_num_unfinished_requests())
        except KeyboardInterrupt:
            outcome.interrupted = True
            outcome.unfinished = engine.get_num_unfinished_requests()
        outcome.seconds = time.monotonic() - began
    return outcome


def _prepared(
    engine: "LLMEngine", jobs: Sequence[Job], temperature: float, ignore_eos: bool, outcome: Outcome
) -> "list[RequestRecord]":
    """The requests, checked and tokenized; those that the engine refuses are counted as failures."""
    from quire.offline.prompts import ChatPrompt
    from quire.offline.sampling_params import RequestOutputKind, SamplingParams

    ready = []
    for number, job in enumerate(jobs):
        prompt: Any = job.prompt
        if not isinstance(prompt, str) and isinstance(prompt[0], dict):
            prompt = ChatPrompt(prompt)
        params = SamplingParams(
            temperature=temperature, max_tokens=job.max_tokens, ignore_eos=ignore_eos,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        try:
            ready.append(engine.prepare(str(number), prompt, params))
        except ValueError as error:
            outcome.failures[f"{job.source}: {error}" if job.source else str(error)] += 1
    return ready


def _report(args: argparse.Namespace, outcome: Outcome) -> None:
    seconds = outcome.seconds or float("inf")
    failed = sum(outcome.failures.values())
    total = outcome.prompt_tokens + outcome.output_tokens
    rows = {"requests, complete": f"{outcome.completed:,}", "requests, failed": f"{failed:,}"}
    if outcome.interrupted:
        rows["requests, interrupted"] = f"{outcome.unfinished:,}"
    rows |= {
        "seconds": f"{outcome.seconds:,.2f}",
        "prompt tokens": f"{outcome.prompt_tokens:,}",
        "output tokens": f"{outcome.output_tokens:,}",
        "requests/s": f"{outcome.completed / seconds:,.2f}",
        "output tokens/s": f"{outcome.output_tokens / seconds:,.1f}",
        "total tokens/s": f"{total / seconds:,.1f}",
    }
    sys.stdout.write("interrupted: what there is until then\n" if outcome.interrupted else "")
    sys.stdout.write(titled(f"throughput: {args.model}", rows))
    for what, count in outcome.failures.most_common():
        sys.stdout.write(f"  failed {count:,} x {what}\n")
    if args.json is not None:
        result = {
            "interrupted": outcome.interrupted, "completed": outcome.completed, "failed": failed,
            "failures": dict(outcome.failures), "unfinished": outcome.unfinished, "duration_s": outcome.seconds,
            "prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens,
            "request_throughput": outcome.completed / seconds, "output_throughput": outcome.output_tokens / seconds,
            "total_token_throughput": total / seconds,
        }  # fmt: skip
        write_json(args.json, "throughput", vars(args), result)
