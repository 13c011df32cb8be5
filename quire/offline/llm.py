"""Many prompts at once: all go into the engine, and their outputs come back in the prompts' order."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.models import DEMO_MODEL
from quire.offline.engine_args import EngineArgs
from quire.offline.llm_engine import LLMEngine
from quire.offline.outputs import RequestOutput
from quire.offline.progress import PromptProgress
from quire.offline.prompts import ChatPrompt, Prompt, one_by_one
from quire.offline.sampling_params import RequestOutputKind, SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in this process.

    Args:
        model: a folder, a .gguf file, a hub id, or the demo model.
        engine_args: the other fields of ``EngineArgs``.

    Raises:
        TypeError: there is no such argument.
        ValueError and others, as ``LLMEngine.from_engine_args`` does.
    """

    def __init__(self, model: str | Path = DEMO_MODEL, **engine_args: Any) -> None:
        # Nobody waits for the next token of a batch.
        engine_args.setdefault("max_num_prefill_tokens_with_decodes", 0)
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args))
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts. Nothing runs unless all of them are right.

        Args:
            prompts: one or several: each a text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            sampling_params: for all, or one for each; None is ``SamplingParams()``.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One finished output for each prompt, in their order.

        Raises:
            ValueError: a prompt or parameter is wrong; the message names the field, and which of several prompts it is.
            RuntimeError: requests that were added to ``llm_engine`` are unfinished, or the engine failed.
        """
        return self._run(one_by_one(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations, written by the model's chat template. As ``generate`` apart from this.

        Args:
            messages: one conversation or several: each a list of dicts with ``role`` and ``content``.
            sampling_params: for all, or one for each.
            use_tqdm: show a progress bar on stderr.
            add_generation_prompt: open the assistant's turn after the last message.
        """
        chats: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self._run([ChatPrompt(chat, add_generation_prompt) for chat in chats], sampling_params, use_tqdm)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        if engine.has_unfinished_requests():
            raise RuntimeError(
                f"{engine.get_num_unfinished_requests()} requests that were added to llm_engine are unfinished; "
                "step until they end, or abort them"
            )
        # Outputs in between would be made for nobody.
        params = [
            dataclasses.replace(each, output_kind=RequestOutputKind.FINAL_ONLY)
            for each in _for_each(sampling_params, len(prompts))
        ]
        records = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                records.append(engine.prepare(str(next(self._numbers)), prompt, each))
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                raise ValueError(f"prompt {index} of {len(prompts)}: {error}") from error
        order = [record.request_id for record in records]
        finished: dict[str, RequestOutput] = {}
        try:
            for record in records:
                engine.start(record)
            with PromptProgress(len(records), use_tqdm) as progress:
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        finished[output.request_id] = output
                        progress.add(output)
        finally:
            engine.abort_request(order)  # whatever is left when a step raised
        return [finished[request_id] for request_id in order]


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """One for each prompt. Raises ValueError when there are more or fewer."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts; give one for all, or one for each"
        )
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params[{index}] is {each!r}; it must be SamplingParams")
    return params
