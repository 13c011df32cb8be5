"""Turns prompts into ids in threads, a bounded number at a time: the event loop never tokenizes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos import inference_pb2
from router.admission import WaitingQueue
from router.chat_template import TemplateRefusal
from router.errors import InvalidArgument
from router.tokenizer import Tokenizer
from router.validation import check_chat, check_ids, check_text_length

PromptRequest = inference_pb2.GenerateRequest | inference_pb2.ExplainRequest | inference_pb2.TokenizeRequest
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
        """The prompt's field and its ids.

        Args:
            request: has the oneof ``prompt``.
            max_model_len: texts that cannot fit are refused before they are tokenized; 0: any length.
            vocab_size: ids must be below.
            add_special_tokens: for text.

        Raises:
            InvalidArgument: the prompt is missing or wrong.
            QueueFull: too many others are at it.
        """
        field = request.WhichOneof("prompt")
        tokenizer = self._tokenizer
        if field == "token_ids" and not isinstance(request, inference_pb2.TokenizeRequest):
            token_ids = list(request.token_ids.ids)
            check_ids("token_ids.ids", token_ids, vocab_size)
            return field, token_ids
        if field == "text":
            text = request.text
            if max_model_len:
                check_text_length(field, len(text), tokenizer.longest_token, max_model_len)
            encode = tokenizer.encode_text
            return field, await self._run(lambda: encode(text, add_special_tokens=add_special_tokens))
        if field == "chat":
            return field, await self._encode_chat(request.chat, max_model_len)
        raise InvalidArgument("prompt", "there is no prompt: give one of text, token_ids or chat")

    async def _encode_chat(self, chat: inference_pb2.Chat, max_model_len: int) -> list[int]:
        messages = check_chat(chat)
        tokenizer = self._tokenizer
        if max_model_len:
            characters = sum(len(message.content) for message in messages)
            check_text_length("chat", characters, tokenizer.longest_token, max_model_len)
        opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        try:
            return await self._run(lambda: tokenizer.encode_chat(messages, add_generation_prompt=opened))
        except TemplateRefusal as error:
            raise InvalidArgument("chat", str(error)) from error

    async def encode_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """The ids of words that may stand within a text: each as it is, and after a space. Raises QueueFull."""
        tokenizer = self._tokenizer
        texts = [text for word in words for text in dict.fromkeys((word, " " + word.lstrip()))]
        return await self._run(
            lambda: [tokenizer.encode_text(text, add_special_tokens=False) for text in texts],
        )

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ids, control tokens included. Raises QueueFull."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _run(self, work: Callable[[], Result]) -> Result:
        with self._queue.place():
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Ends the threads, without waiting for what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)
