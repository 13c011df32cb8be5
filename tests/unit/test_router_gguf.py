"""Tokenizers from GGUF files: each pre-tokenizer against the model family's own rule, and what is refused."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.config import ConfigError
from router.gguf_vocab import read_gguf
from router.tokenizer_loading import load_tokenizer

SAMPLE = [
    "Hello world, it's 2024 and we'll see: 12345 words!",
    "  indented\n\n\ncode();\t// x",
    "ÀÉ straße 漢字 かな",
    "don't DON'T",
]
# As the models' published tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def by_regex(pattern: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


FAMILIES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": by_regex(LLAMA3),
    "qwen2": by_regex(QWEN2),
}


def trained(pre_tokenizer, whole_words: bool = False) -> Tokenizer:
    """A little byte-level BPE."""
    core = Tokenizer(models.BPE(ignore_merges=whole_words))
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(SAMPLE * 5, trainer)
    return core


def write_gguf(path: Path, core: Tokenizer, kind: str = "gpt2", pre: str | None = "gpt-2", **more) -> Path:
    """The vocabulary of a tokenizer as a GGUF file, with two control tokens and one of the user's own."""
    model = json.loads(core.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<|begin|>", "<|end|>", "<think>"])
    writer.add_token_types([1] * len(tokens) + [3, 3, 4])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(the tokenizer from a file, what it was made from)"""
    core = trained(FAMILIES[request.param], whole_words=request.param == "llama-bpe")
    if request.param == "qwen2":  # as in that family's tokenizer.json
        core.normalizer = normalizers.NFC()
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", core, pre=request.param, add_bos_token=False)
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<|begin|>", "<|end|>")])
    core.add_tokens([AddedToken("<think>", normalized=False)])
    return load_tokenizer(path), core


TEXTS = st.text(alphabet=st.one_of(st.sampled_from("ab'sTI 12\n\t!漢é٣²"), st.characters(codec="utf-8")), max_size=40)


@settings(deadline=None)
@given(text=TEXTS)
@example(text="\uf900")  # which a family that normalizes shows as another character
def test_text_has_the_ids_of_the_family(family, text):
    tokenizer, core = family
    assert tokenizer.encode_text(text + "<|end|> it's<think>") == core.encode(text + "<|end|> it's<think>").ids
    shown = text if core.normalizer is None else core.normalizer.normalize_str(text)
    assert tokenizer.decode(core.encode(text).ids) == shown


def test_tokens_that_end_a_turn_are_collected(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", trained(FAMILIES["gpt-2"]), eot_token_id=5, eom_token_id=6)
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == {5, 6, tokenizer.vocab_size - 2}


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_begin_of_text_is_added_where_the_file_or_the_family_says_so(tmp_path, pre, flag, added):
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", trained(FAMILIES["gpt-2"]), pre=pre, **more))
    bos = tokenizer.vocab_size - 3
    assert (tokenizer.encode_text("hi")[0] == bos) is added
    assert bos not in tokenizer.encode_text("hi", add_special_tokens=False)


def test_template_sees_named_tokens(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", trained(FAMILIES["gpt-2"]), chat_template="{{ bos_token }}{{ eos_token }}")
    files = read_gguf(path)
    assert files.chat_template == "{{ bos_token }}{{ eos_token }}"
    assert files.named_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize(("kind", "pre", "name"), [("llama", None, "'llama'"), ("gpt2", "martian", "'martian'")])
def test_other_kinds_are_named_with_a_way_out(tmp_path, kind, pre, name):
    path = write_gguf(tmp_path / "m.gguf", trained(FAMILIES["gpt-2"]), kind=kind, pre=pre)
    with pytest.raises(ConfigError, match=name) as raised:
        load_tokenizer(path)
    assert "--tokenizer" in str(raised.value)


def test_damaged_files_are_explained(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF, but not really")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(path)
    write_gguf(path, trained(FAMILIES["gpt-2"]), eos_token_id=10**6)
    with pytest.raises(ConfigError, match="damaged"):
        load_tokenizer(path)
