"""The bytes that each token id stands for, worked out once from the tokenizer's own description of its decoder.

With this table, turning ids into text is joining bytes and decoding UTF-8: fast, and independent of how the ids are
cut into pieces. Knows nothing of sequences.
"""

import copy
import json

from tokenizers import Tokenizer

from protos.token_bytes import UnknownDecoder, token_converter
from router.config import ConfigError


class TokenBytes:
    """The bytes of every token.

    Attributes:
        table: bytes by id; empty for special tokens, which are not text, and for ids without a token.
        special: what special tokens are written as.
        leading: a prefix that the tokenizer puts before every text, and that whole texts are shown without.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer's decoder is of a kind that this router does not know."""
        decoder = json.loads(tokenizer.to_str())["decoder"]
        try:
            convert, self.leading = token_converter(decoder)
        except UnknownDecoder as error:
            raise ConfigError(str(error)) from error
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.table: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            if token_id not in self.special:
                self.table[token_id] = convert(token)

    def join(self, token_ids: list[int]) -> bytes:
        """The bytes of the tokens together. Ids beyond the table have none."""
        table = self.table
        try:
            return b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # a model's vocabulary may be padded beyond the tokenizer's
            size = len(table)
            return b"".join([table[token_id] for token_id in token_ids if token_id < size])

    def with_special(self) -> "TokenBytes":
        """A copy in which special tokens are text like others."""
        copied = copy.copy(self)
        copied.table = [self.special.get(token_id, data) for token_id, data in enumerate(self.table)]
        return copied

    def shown(self, token_id: int) -> bytes:
        """What one token is written as, special tokens included."""
        return self.special.get(token_id) or self.join([token_id])

    def text(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; what is not UTF-8 is replaced by U+FFFD."""
        if skip_special_tokens or self.special.keys().isdisjoint(token_ids):
            data = self.join(token_ids)
        else:
            data = b"".join(map(self.shown, token_ids))
        return data.removeprefix(self.leading).decode("utf-8", "replace")
