"""Drafts by a smaller model of the same vocabulary (Leviathan et al., 2023): its greedy continuation.

The model has an engine of its own. A draft is an ordinary request to it: the tokens so far as prompt, run to the end.
What it computed for earlier drafts its prefix cache still knows, but for the last block, and what it needs no more it
forgets. So it follows sequences that come, go, are preempted and have drafts rejected, without being told.
"""

from worker.engine import Engine
from worker.sequence import SamplingParams, Sequence

_GREEDY = SamplingParams(temperature=0.0)


class ModelDrafter:
    """Asks the draft model.

    Args:
        engine: of the draft model, with a prefix cache over blocks of the target's length.
        max_model_len: most tokens that it can see.
        vocab_size: of the target; a draft model may have more ids, which no token has.
    """

    def __init__(self, engine: Engine, max_model_len: int, vocab_size: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """As many drafts as wanted for each sequence; fewer where it becomes too long for the draft model."""
        asked = [self._request(seq, most) for seq, most in wanted]
        for request in asked:
            if request is not None:
                self._engine.add(request)
        while self._engine.has_unfinished:
            self._engine.step()
        return [[] if request is None else self._drafts(request) for request in asked]

    def _request(self, seq: Sequence, most: int) -> Sequence | None:
        count = min(most, self._max_model_len - len(seq.tokens))
        if count < 1:
            return None
        # Names of blocks are the target's, as far as it needed any: a long prompt is hashed once.
        names = list(seq.block_names)
        return Sequence(seq.request_id, seq.tokens[:], _GREEDY, count, cache_root=seq.cache_root, block_names=names)

    def _drafts(self, request: Sequence) -> list[int]:
        drafts = request.tokens[request.num_prompt_tokens :].tolist()
        unknown = next((place for place, token in enumerate(drafts) if token >= self._vocab_size), len(drafts))
        return drafts[:unknown]
