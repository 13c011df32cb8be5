"""The demo model through transformers alone: its own GGUF reader, its own generate, a tokenizer built beside ours."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast


class TieWarning(UserWarning):
    """Two ids were equally good to within 1e-4 of a logit."""


@dataclass(frozen=True)
class Continuation:
    """Greedy output of one prompt, and for each token how far its logit was above the next best one's."""

    tokens: list[int]
    margins: list[float]


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, from the GGUF file's vocabulary, merges and template."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == 3
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


def load_model(path: Path) -> LlamaForCausalLM:
    """The demo model in float32."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    return model


class GreedyOracle:
    """``generate`` of transformers, one prompt at a time. Remembers answers in a file, as they never change.

    Args:
        path: the demo model's GGUF file.
        cache: folder for the answers, keyed by the model, the prompt and the versions.

    Attributes:
        tokenizer: the model's; its end of sequence ends a continuation, and is part of it.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self._path = path
        self.tokenizer = load_tokenizer(path)
        self._cache = cache
        self._model: LlamaForCausalLM | None = None

    def __call__(self, prompt: list[int], max_tokens: int) -> Continuation:
        key = json.dumps(
            [
                self._path.name,
                self._path.stat().st_size,
                prompt,
                max_tokens,
                self.tokenizer.eos_token_id,
                torch.__version__,
                transformers.__version__,
            ]
        )
        file = self._cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if not file.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            answer = self._generate(prompt, max_tokens)
            file.write_text(json.dumps([answer.tokens, answer.margins]))
        return Continuation(*json.loads(file.read_text()))

    @torch.inference_mode()
    def _generate(self, prompt: list[int], max_tokens: int) -> Continuation:
        if self._model is None:
            self._model = load_model(self._path)
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        return Continuation(out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
