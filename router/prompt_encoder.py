"""Turns prompts into ids in threads, a bounded number at a time: the event loop never tokenizes."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos import inference_pb2
from router.admission import WaitingQueue
from router.prompt import PromptRequest, encode_prompt, encode_words
from router.tokenizer import Tokenizer

Result = TypeVar("Result")


class PromptEncoder:
    """Tokenizes for all calls.

    Args:
        tokenizer: the model's.
        queue: prompts that are being tokenized take places in it.
        threads: how many work side by side; the tokenizer frees the interpreter's lock.
    """

    def __init__(self, tokenizer: Tokenizer, queue: WaitingQueue, threads: int) -> None:
        self._tokenizer = tokenizer
        self._queue = queue
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def encode(
        self, request: PromptRequest, max_model_len: int, vocab_size: int, *, add_special_tokens: bool = True
    ) -> tuple[str, list[int]]:
        """The prompt's field and its ids, as ``encode_prompt`` finds them.

        Raises:
            InvalidArgument: the prompt is missing or wrong.
            QueueFull: too many others are at it.
        """
        work = functools.partial(
            encode_prompt, self._tokenizer, request, max_model_len, vocab_size, add_special_tokens=add_special_tokens
        )
        if request.WhichOneof("prompt") in ("text", "chat"):
            priority = request.priority if isinstance(request, inference_pb2.GenerateRequest) else None
            return await self._run(work, priority)
        return work()  # ids are only checked

    async def encode_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """The ids of words that may stand within a text, as ``encode_words`` finds them. Raises QueueFull."""
        return await self._run(lambda: encode_words(self._tokenizer, words))

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ids, control tokens included. Raises QueueFull."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _run(self, work: Callable[[], Result], priority: int | None = None) -> Result:
        with self._queue.place(priority):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Ends the threads, without waiting for what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)
