"""The flags that say which requests are sent, the same for every benchmark that sends some."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from quire.bench.arrivals import arrival_times
from quire.bench.dataset import DatasetError, read_dataset
from quire.bench.records import Job, Session
from quire.bench.workloads import WORKLOADS, Form, Shape, make_sessions

NUM_PROMPTS = 256


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def not_negative(text: str) -> int:
    """A whole number, 0 or more, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return number


def _ratio(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return number


def add_request_arguments(parser: argparse.ArgumentParser, *, sessions: bool) -> None:
    """Adds the flags of workload and dataset; ``sessions``: also those of conversations."""
    group = parser.add_argument_group("requests")
    names = [name for name in WORKLOADS if sessions or name != "sessions"]
    group.add_argument(
        "--workload", default="random", choices=names,
        help="; ".join(f"{name}: {WORKLOADS[name]}" for name in names) + " (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--dataset", type=Path, metavar="FILE",
        help='requests from a file instead, one JSON object a line: {"prompt": ..., "max_tokens": ...}, {"messages": '
        "[...]}, a line of OpenAI's batches, or a ShareGPT conversation, whose first question is asked; in order",
    )  # fmt: skip
    group.add_argument(
        "--num-prompts", type=positive, metavar="N",
        help=f"requests to send (default {NUM_PROMPTS}; of a dataset: all)",
    )  # fmt: skip
    group.add_argument("--input-len", type=positive, metavar="N", help="tokens of a prompt (default: the workload's)")
    group.add_argument(
        "--output-len", type=positive, metavar="N", help="tokens of an output (default: the workload's, or the file's)"
    )
    group.add_argument(
        "--range-ratio", type=_ratio, default=0.0, metavar="R",
        help="lengths are drawn from 1 - R to 1 + R times their value (default 0: all are equal)",
    )  # fmt: skip
    group.add_argument("--num-prefixes", type=positive, default=1, metavar="N", help="default %(default)s")
    group.add_argument("--prefix-len", type=positive, default=2048, metavar="N", help="default %(default)s")
    if sessions:
        group.add_argument("--turns", type=positive, default=4, metavar="N", help="of a session (default %(default)s)")
    group.add_argument("--seed", type=not_negative, default=0, help="of all that is drawn (default %(default)s)")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="outputs do not end before their length, where the server knows this field (default: on for workloads, "
        "off for a dataset)",
    )  # fmt: skip


def ignores_eos(args: argparse.Namespace) -> bool:
    """What --ignore-eos says or, without it, what suits the requests."""
    return args.dataset is None if args.ignore_eos is None else bool(args.ignore_eos)


def sessions_of(args: argparse.Namespace, form: Form, vocab_size: int, warmups: int = 0) -> list[Session]:
    """The requests that the flags ask for, after ``warmups`` more of the same kind.

    Raises:
        DatasetError: the dataset cannot be used, or has fewer requests than are asked for.
    """
    if args.dataset is None:
        count = args.num_prompts or NUM_PROMPTS
        shape = Shape(
            args.workload, args.input_len, args.output_len, args.range_ratio, args.num_prefixes, args.prefix_len,
            getattr(args, "turns", 1),
        )  # fmt: skip
        # Apart, so that the measured ones are the same with and without a warm-up.
        before = make_sessions(replace(shape, turns=1), warmups, form, vocab_size, args.seed + 1) if warmups else []
        return [*before, *make_sessions(shape, count, form, vocab_size, args.seed)]
    jobs = read_dataset(args.dataset, args.output_len)
    if args.num_prompts is not None and args.num_prompts > len(jobs):
        raise DatasetError(
            f"--num-prompts is {args.num_prompts}, but {args.dataset} has {len(jobs)} requests: one that is sent twice "
            "would find itself cached"
        )
    jobs = [as_form(job, form) for job in jobs[: args.num_prompts]]
    return [Session((job,)) for job in (*(jobs[number % len(jobs)] for number in range(warmups)), *jobs)]


def as_form(job: Job, form: Form) -> Job:
    """The request with its prompt in a form that its endpoint takes: messages, or for others text or ids.

    Raises:
        DatasetError: it cannot be put so; the message names where it stands.
    """
    chats = not isinstance(job.prompt, str) and isinstance(job.prompt[0], dict)
    if form == "messages" and not chats:
        if isinstance(job.prompt, str):
            return replace(job, prompt=[{"role": "user", "content": job.prompt}])
        raise DatasetError(f"{job.source}: token ids cannot be sent as a chat; give --endpoint completions, or --grpc")
    if form == "text" and chats:
        raise DatasetError(f"{job.source}: messages need --endpoint chat, or --grpc")
    return job


def with_arrivals(sessions: Sequence[Session], rate: float, burstiness: float, seed: int) -> list[Session]:
    """The sessions, each due at its time; ``rate``: of sessions a second."""
    times = arrival_times(len(sessions), rate, burstiness, np.random.default_rng([seed, 2]))
    return [replace(session, due=due) for session, due in zip(sessions, times, strict=True)]
