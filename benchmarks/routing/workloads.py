"""What is sent to the virtual fleet: public traces, and workloads made here."""

import hashlib
import json
import random
from pathlib import Path

from benchmarks.routing.virtual_worker import Job


def name_of(*parts: object) -> bytes:
    """A block's name: 16 bytes, equal for equal parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def mooncake(path: Path, speedup: float, seed: int, spread_s: float = 0.1) -> list[Job]:
    """A trace of the Mooncake paper (FAST 2025), whose ids stand for blocks of 512 tokens, played faster.

    Each seed leaves out another twentieth of the requests and moves the others' arrivals by up to ``spread_s`` seconds.
    The trace has requests arrive together every three seconds; with 3 s they arrive evenly.
    """
    chance = random.Random(seed)
    jobs = []
    with path.open() as lines:
        for line in lines:
            if chance.random() < 0.05:
                continue
            row = json.loads(line)
            names = [ident.to_bytes(16, "big") for ident in row["hash_ids"][: row["input_length"] // 512]]
            arrival = (row["timestamp"] / 1000 + chance.uniform(0, spread_s)) / speedup
            jobs.append(Job(arrival, row["input_length"], max(1, row["output_length"]), names))
    return sorted(jobs, key=lambda job: job.arrival_s)


def prefix_groups(
    rate: float, seconds: float, block_size: int, seed: int, groups: int = 150, users: int = 5
) -> list[Job]:
    """Groups of users who share 6000 tokens and each add 1200 of their own; 200 tokens of output."""
    chance = random.Random(seed)
    jobs = []
    now = 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        group, user = chance.randrange(groups), chance.randrange(users)
        shared = [name_of(seed, "group", group, place) for place in range(6000 // block_size)]
        own = [name_of(seed, group, user, len(jobs), place) for place in range(7200 // block_size - len(shared))]
        jobs.append(Job(now, 7200, 200, shared + own))
    return jobs


def hot_prefix(rate: float, seconds: float, block_size: int, seed: int) -> list[Job]:
    """Eight of ten requests share one prefix of 8000 tokens, the others nothing; each has 1000 of its own."""
    chance = random.Random(seed)
    jobs = []
    now = 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        hot = chance.random() < 0.8
        turn = len(jobs)
        shared = [name_of(seed, "hot" if hot else turn, place) for place in range(8000 // block_size)]
        own = [name_of(seed, turn, "own", place) for place in range(9000 // block_size - len(shared))]
        jobs.append(Job(now, 9000, chance.randrange(50, 400), shared + own))
    return jobs


def conversations(rate: float, seconds: float, block_size: int, seed: int) -> list[Job]:
    """Chats of several turns, with one beginning in common: each prompt is all that was said before, and more."""
    chance = random.Random(seed)
    jobs = []
    now = 0.0
    while (now := now + chance.expovariate(rate / 5)) < seconds:
        chat, at, tokens = len(jobs), now, 2000
        for _ in range(chance.randrange(1, 10)):
            tokens += chance.randrange(100, 1500)
            output = chance.randrange(50, 500)
            names = [
                name_of(seed, "system" if place < 1500 // block_size else chat, place)
                for place in range(tokens // block_size)
            ]
            jobs.append(Job(at, tokens, output, names))
            tokens += output
            at += chance.expovariate(1 / 20) + 5
    return sorted(jobs, key=lambda job: job.arrival_s)
