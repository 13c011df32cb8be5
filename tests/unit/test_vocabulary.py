"""The worker's reading of a vocabulary is the router's."""

import json

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.token_bytes import TokenBytes
from router.tokenizer_loading import load_tokenizer
from tests.doubles.tiny_vocabulary import VOCABULARY, save_tokenizer
from worker.vocabulary import VocabularyError, folder_vocabulary, gguf_vocabulary


def check(vocabulary, router: TokenBytes) -> None:
    assert len(vocabulary.tokens) == len(router.table)
    assert vocabulary.special == router.special.keys()
    for token_id, token in enumerate(vocabulary.tokens):
        assert token == router.shown(token_id)


def test_of_a_gguf_file(demo_model):
    vocabulary = gguf_vocabulary(gguf.GGUFReader(demo_model).fields, demo_model)
    check(vocabulary, load_tokenizer(demo_model, None).token_bytes)
    assert b" Paris" in vocabulary.tokens


SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xE9>", "▁Paris", "é", "Ġa"]


@pytest.mark.parametrize("decoder", [SENTENCEPIECE, decoders.ByteLevel(), decoders.Metaspace()], ids=str)
@pytest.mark.parametrize("unigram", [False, True])
def test_of_a_folder(tmp_path, decoder, unigram):
    if unigram:
        core = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0))
    else:
        core = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(PIECES)}, merges=[]))
    core.decoder = decoder
    core.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|new|>", special=True)])
    core.add_tokens([AddedToken("plain added")])
    core.save(str(tmp_path / "tokenizer.json"))
    check(folder_vocabulary(tmp_path), TokenBytes(core))


def test_of_the_tiny_models(tmp_path):
    save_tokenizer(tmp_path)
    assert folder_vocabulary(tmp_path) == VOCABULARY


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no tokenizer.json"),
        ("{", "no readable vocabulary"),
        ("[]", "no readable vocabulary"),
        (json.dumps({"model": {"vocab": {}}}), "no readable vocabulary"),
        (json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}), "'WordPiece' is not supported"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(VocabularyError, match=said) as caught:
        folder_vocabulary(tmp_path)
    assert str(tmp_path) in str(caught.value)
