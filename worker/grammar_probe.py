"""Tries grammars out in a process of their own, which may be killed: the compiler's time and memory are the client's to
choose, and a thread that it has taken cannot be had back.

``python -m worker.grammar_probe`` reads one grammar a line and answers each with a line, both JSON strings: what is
wrong, or nothing.
"""

import json
import os
import queue
import resource
import select
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from worker.child_environment import child_environment

# For one grammar, the process's start included.
PROBE_TIMEOUT_S = 8.0
LIMITS = LLParserLimits(verbose_errors=False)
# The compiler follows references between rules by recursion; so long a chain of them fits no source.
STACK_BYTES = 512 * 1024 * 1024
_MEMORY_BYTES = 4 * 1024**3


class GrammarProbe:
    """The process, started when the first grammar comes and again after it was killed. ``fault`` is one thread's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def fault(self, grammar: str) -> str:
        """What is wrong with a grammar; empty when it compiles within the limits of time and memory."""
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.grammar_probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                process_group=0,  # Ctrl-C in the terminal is for the worker alone
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], PROBE_TIMEOUT_S)[0]:
                self.close()
                return f"it takes longer than {PROBE_TIMEOUT_S:g} s to compile; make it simpler"
            answer: str = json.loads(process.stdout.readline())
            return answer
        except (BrokenPipeError, ValueError):  # the process is gone, in the middle of a line or before it
            self.close()
            return "it is too large to compile; make it simpler"

    def close(self) -> None:
        """Kills the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def fault(matcher: LLMatcher) -> str:
    """What is wrong with a matcher that was just made; empty when nothing is."""
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    return failure(matcher)


def failure(matcher: LLMatcher) -> str:
    """Why a matcher can go on no more; empty while it can."""
    if not matcher.is_error():
        return ""
    reason = matcher.get_error().partition("\n<")[0].strip()[:400]
    return "no token can come next" if reason.startswith("NoExtension") else reason


def main() -> None:
    """Answers until its input ends, and then ends at once, whatever it is at."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_compile, args=(grammars,), daemon=True).start()
    for line in sys.stdin:
        grammars.put(json.loads(line))
    os._exit(0)


def _compile(grammars: "queue.SimpleQueue[str]") -> None:
    # What a grammar costs lies in itself: single bytes will do for tokens.
    tokenizer = LLTokenizer("byte")
    while True:
        matcher = LLMatcher(tokenizer, grammars.get(), log_level=0, limits=LIMITS)
        sys.stdout.write(json.dumps(fault(matcher)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
