"""A vocabulary for tiny models: every printable ASCII character, and words that cut JSON and digits at odd places."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models

from tests.doubles.tiny_model import VOCAB
from worker.vocabulary import Vocabulary

STOP = 2
_NAMES = ["<pad>", "<s>", "</s>", "<unk>"]
_WORDS = (
    *('{"', '":', '", "', '"}', "}}", "],", "[[", " {", "true", "fals", "null"),
    *("123", "-1", "e-", "ab", "red", "yes", "no"),
)
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TOKENS = [*_NAMES, *_CHARACTERS, *_WORDS]

assert len(TOKENS) < VOCAB, "some ids stay without a token, as in padded models"

VOCABULARY = Vocabulary([token.encode() for token in TOKENS], frozenset(range(len(_NAMES))))


def text_of(token_ids: list[int]) -> str:
    """The text that a client would see; ids that are not text have none."""
    return "".join(TOKENS[token_id] for token_id in token_ids if len(_NAMES) <= token_id < len(TOKENS))


def ids_of(text: str) -> list[int]:
    """One token for each character."""
    return [TOKENS.index(character) for character in text]


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer.json beside a tiny model, in the form of SentencePiece with a space for itself."""
    core = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(TOKENS)}, merges=[]))
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _NAMES])
    core.save(str(folder / "tokenizer.json"))
