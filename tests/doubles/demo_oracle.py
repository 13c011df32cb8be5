"""The demo model through transformers alone: its own GGUF reader, its own generate, a tokenizer built beside ours."""

import hashlib
import json
import os
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
    """``generate`` of transformers. Remembers answers in files, as they never change.

    Args:
        path: the demo model's GGUF file.
        cache: folder for the answers, keyed by the model, the prompt and the versions.

    Attributes:
        tokenizer: the model's; its end of sequence ends a continuation, and is part of it.
    """

    # Up to this length, prompts are generated from together: most of such a step is reading the weights.
    _SHORT = 80

    def __init__(self, path: Path, cache: Path) -> None:
        self._path = path
        self.tokenizer = load_tokenizer(path)
        self._cache = cache
        self._model: LlamaForCausalLM | None = None

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> list[Continuation]:
        """Each prompt's greedy output."""
        files = [self._file(prompt, max_tokens) for prompt in prompts]
        unknown = [(prompt, file) for prompt, file in zip(prompts, files, strict=True) if not file.exists()]
        short = [(prompt, file) for prompt, file in unknown if len(prompt) <= self._SHORT]
        for batch in [short, *([entry] for entry in unknown if entry not in short)]:
            answers = self._generate([prompt for prompt, _ in batch], max_tokens) if batch else []
            for (_, file), answer in zip(batch, answers, strict=True):
                self._remember(file, answer)
        return [Continuation(*json.loads(file.read_text())) for file in files]

    def _file(self, prompt: list[int], max_tokens: int) -> Path:
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
        return self._cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _remember(self, file: Path, answer: Continuation) -> None:
        """At once, for whoever else reads the folder."""
        self._cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps([answer.tokens, answer.margins]))
        unfinished.replace(file)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[Continuation]:
        if self._model is None:
            self._model = load_model(self._path)
        end = self.tokenizer.eos_token_id
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        out = self._model.generate(
            torch.tensor([[end] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits, dim=1).topk(2).values
        answers = []
        for tokens, margins in zip(
            out.sequences[:, longest:].tolist(), (best[..., 0] - best[..., 1]).tolist(), strict=True
        ):
            length = tokens.index(end) + 1 if end in tokens else len(tokens)
            answers.append(Continuation(tokens[:length], margins[:length]))
        return answers
