"""The progress bar of many prompts, with the speed at which tokens go through."""

import time

from tqdm import tqdm

from quire.offline.outputs import RequestOutput


class PromptProgress:
    """Counts finished requests on a bar; a context manager that takes the bar away from further output at its end.

    Args:
        total: requests to come.
        shown: without, nothing is written.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._bar: tqdm[None] | None = (
            tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True) if shown else None
        )
        self._started = time.monotonic()
        self._prompt_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> "PromptProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """A request has finished; ``output`` holds all of it."""
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds = f"{self._prompt_tokens / seconds:.1f} tok/s in, {self._output_tokens / seconds:.1f} tok/s out"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update()
