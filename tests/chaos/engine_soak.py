"""Random mixed load on one engine with a real model: all kinds of sampling, shared prefixes, cancels, preemptions.

    python -m tests.chaos.engine_soak --model FOLDER|FILE.gguf --seconds 300 [--device cuda] [--seed 7] [--dtype float32]

Checked: after every step the books of the blocks; when all have ended, that no block is held; that every sequence got
what it asked for and no token that it must not have; and that some give the same again when they run alone. In float32
on a CPU each must; on a GPU sums depend on the batch, and the share is printed.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from worker.config import WorkerConfig
from worker.engine import Engine, EngineLimits
from worker.sequence import FinishReason, SamplingParams, Sequence, token_array
from worker.setup import resolve_device
from worker.speculation.config import parse_speculative_config
from worker.startup import build_engine

_FIRST_TOKEN = 300  # after the vocabularies' control tokens


class Soak:
    """The load and its checks.

    Args:
        engine, limits: as ``build_engine`` made them.
        seed: of everything random.
    """

    def __init__(self, engine: Engine, limits: EngineLimits, seed: int) -> None:
        self.engine, self.limits = engine, limits
        self.chance = random.Random(seed)
        self.longest = min(limits.max_model_len, 4 * limits.max_num_batched_tokens)
        self.prefixes = [self._ids(self.chance.randint(1, self.longest // 2)) for _ in range(8)]
        self.ended = self.cancelled = self.tokens = self.repeated = self.equal = 0

    def _ids(self, count: int) -> list[int]:
        return [self.chance.randrange(_FIRST_TOKEN, self.limits.vocab_size) for _ in range(count)]

    def sequence(self, number: int) -> Sequence:
        """A random one that fits."""
        chance = self.chance
        prompt = list(chance.choice(self.prefixes)) if chance.random() < 0.6 else []
        prompt += self._ids(max(1, min(int(chance.lognormvariate(4, 1.2)), self.longest // 3)))
        max_tokens = max(1, min(int(chance.lognormvariate(3.5, 1)), self.longest - len(prompt)))
        stops = frozenset(self._ids(2)) if chance.random() < 0.2 else frozenset()
        rule: dict[str, object] = {"temperature": chance.choice([0.0, 0.0, 0.3, 1.0, 1.5]), "seed": number}
        options: list[tuple[str, Callable[[], object]]] = [
            ("top_p", lambda: chance.uniform(0.05, 1.0)),
            ("top_k", lambda: chance.choice([1, 5, 40, 1000])),
            ("min_p", lambda: chance.uniform(0.0, 0.5)),
            ("presence_penalty", lambda: chance.uniform(-2, 2)),
            ("frequency_penalty", lambda: chance.uniform(-2, 2)),
            ("repetition_penalty", lambda: chance.uniform(0.5, 2)),
            ("logit_bias", lambda: tuple((token, chance.uniform(-100, 100)) for token in self._ids(3))),
            ("allowed_token_ids", lambda: tuple(self._ids(20))),
            ("bad_words", lambda: (tuple(self._ids(1)), tuple(self._ids(2)))),
            ("min_tokens", lambda: chance.randint(1, max_tokens)),
            ("logprobs", lambda: chance.choice([0, 1, 20])),
            ("prompt_logprobs", lambda: chance.choice([0, 3])),
        ]
        rule.update({name: make() for name, make in options if chance.random() < 0.1})
        return _made(f"soak-{number}", prompt, SamplingParams(**rule), max_tokens, stops)  # type: ignore[arg-type]

    def run(self, seconds: float) -> None:
        """Keeps the engine loaded, with a pause now and then in which everything must come to rest."""
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            alive: list[Sequence] = []
            for _ in range(self.chance.randint(1, 4 * self.limits.max_num_seqs)):
                for _ in range(self.chance.choice([0, 0, 1, 1, 2, 8])):
                    number += 1
                    alive.append(self.sequence(number))
                    self.engine.add(alive[-1])
                if alive and self.chance.random() < 0.05:
                    self.engine.cancel(self.chance.choice(alive))
                alive = self._step(alive)
            while self.engine.has_unfinished:
                alive = self._step(alive)
            assert not alive, f"{alive[0].request_id} never ended"
            pool = self.engine.scheduler.pool
            assert pool.num_free + pool.num_cached == pool.num_blocks, "blocks are held though nothing runs"

    def _step(self, alive: list[Sequence]) -> list[Sequence]:
        output = self.engine.step()
        self.engine.scheduler.pool.check()
        self.tokens += len(output.tokens)
        for seq in output.finished:
            self._check(seq)
        return [seq for seq in alive if not seq.finished]

    def _check(self, seq: Sequence) -> None:
        self.ended += 1
        if seq.finish_reason is FinishReason.CANCELLED:
            self.cancelled += 1
            return
        name, rule, output = seq.request_id, seq.sampling, list(seq.tokens[seq.output_start :])
        assert seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), f"{name}: {seq.finish_reason} {seq.error}"
        assert all(0 <= token < self.limits.vocab_size for token in output), f"{name}: no token"
        if seq.finish_reason is FinishReason.LENGTH:
            assert len(output) == seq.max_tokens, f"{name}: {len(output)} of {seq.max_tokens} tokens"
        else:
            assert output[-1] in seq.stop_token_ids, f"{name}: stopped without a stop token"
            assert len(output) >= rule.min_tokens, f"{name}: too short"
        if rule.allowed_token_ids:
            assert set(output) <= set(rule.allowed_token_ids), f"{name}: a token that is not allowed"
        for word in rule.bad_words:
            for start in range(len(output)):
                assert tuple(output[start : start + len(word)]) != word, f"{name}: a bad word"

    def repeat_alone(self, count: int) -> None:
        """Runs random sequences in a crowd, then each alone and without the prefix cache."""
        crowd = [self.sequence(1_000_000 + number) for number in range(4 * count)]
        for seq in crowd:
            self.engine.add(seq)
        while self.engine.has_unfinished:
            self.engine.step()
        for seq in crowd[:count]:
            prompt = list(seq.tokens[: seq.output_start])
            again = _made(seq.request_id, prompt, seq.sampling, seq.max_tokens, seq.stop_token_ids)
            again.skip_reading_prefix_cache = True
            self.engine.add(again)
            while self.engine.has_unfinished:
                self.engine.step()
            self.repeated += 1
            self.equal += again.tokens == seq.tokens


def _made(name: str, prompt: list[int], rule: SamplingParams, max_tokens: int, stops: frozenset[int]) -> Sequence:
    tokens = token_array()
    tokens.extend(prompt)
    return Sequence(name, tokens, rule, max_tokens, stops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--speculative-config", type=parse_speculative_config, metavar="JSON", help="with drafts")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=1024, help="few, so that some are preempted")
    args = vars(parser.parse_args())
    seconds, seed = args.pop("seconds"), args.pop("seed")
    engine, limits = build_engine(WorkerConfig(**args))
    soak = Soak(engine, limits, seed)
    soak.run(seconds)
    soak.repeat_alone(16)
    print(
        f"{soak.ended} sequences ended, {soak.cancelled} of them cancelled; {soak.tokens} tokens, "
        f"{engine.scheduler.num_preemptions} preemptions; no rule broken, no block lost"
    )
    print(f"alone as in a crowd: {soak.equal} of {soak.repeated}")
    if args["dtype"] == "float32" and resolve_device(args["device"]).type == "cpu":
        assert soak.equal == soak.repeated, "some sequences depend on what runs beside them"


if __name__ == "__main__":
    main()
