"""Text to token ids and back, with the model's own vocabulary and template. Knows neither torch nor transformers."""

import json
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Core

from router.chat_template import ChatTemplate, TemplateFailed
from router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.gguf_vocab import read_gguf_vocabulary


class TokenizerError(ValueError):
    """The model's tokenizer cannot be loaded; the message names the file and says what to do."""


@dataclass(frozen=True)
class ChatMessage:
    """One message; ``content`` is always text, never a control token."""

    role: str
    content: str
    name: str | None = None


class Tokenizer:
    """A vocabulary, its chat template, and the tokens that end a turn.

    Args:
        core: the library's tokenizer.
        eos_token_ids: tokens that end the model's turn.
        chat_template: Jinja, or None when the model has none.
        bos_token, eos_token: their texts, for the template.
        add_bos: puts the bos token before every text that does not have it, for files that say so themselves.
    """

    def __init__(
        self,
        core: Core,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        self._core = core
        # The same vocabulary, to which special tokens' texts are text like any other.
        self._plain = Core.from_str(core.to_str())
        self._plain.encode_special_tokens = True
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        added: dict[int, AddedToken] = core.get_added_tokens_decoder()
        # A token of one character cannot be broken, and none of the supported templates has one.
        self._special = {t.content: token_id for token_id, t in added.items() if t.special and len(t.content) > 1}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._template = (
            ChatTemplate(chat_template, {"bos_token": bos_token, "eos_token": eos_token}) if chat_template else None
        )
        self._bos = core.token_to_id(bos_token) if add_bos and bos_token else None
        self._token_bytes = _token_bytes(core, added)

    # ---- text to tokens ----

    def encode(self, text: str, add_special_tokens: bool = True) -> "array[int]":
        """Token ids of a raw text, in which special tokens' texts are special tokens, as in transformers.

        Args:
            text: any text.
            add_special_tokens: adds what the model puts around every text.
        """
        ids = _packed(self._core.encode(text, add_special_tokens=add_special_tokens))
        if add_special_tokens and self._bos is not None and (not ids or ids[0] != self._bos):
            ids.insert(0, self._bos)
        return ids

    def encode_chat(self, messages: list[ChatMessage], add_generation_prompt: bool = True) -> "array[int]":
        """Token ids of a chat. Special tokens come from the template alone: in a message they are plain text.

        Raises:
            TemplateFailed: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise TemplateFailed("this model has no chat template; use a text prompt, or start with --chat-template")
        if not any(self._has_special(message) for message in messages):
            text = self._template.render([_plain_dict(message) for message in messages], add_generation_prompt)
            return _packed(self._core.encode(text, add_special_tokens=False))
        return self._encode_guarded(messages, add_generation_prompt)

    def _has_special(self, message: ChatMessage) -> bool:
        texts = (message.role, message.content, message.name or "")
        return self._any_special is not None and any(self._any_special.search(text) for text in texts)

    def _encode_guarded(self, messages: list[ChatMessage], add_generation_prompt: bool) -> "array[int]":
        """Encodes a chat with special tokens' texts in its messages.

        These texts are broken by a mark before they are rendered; what is whole afterwards was written by the template.
        The stretches between the template's special tokens are then encoded as plain text, without the mark.
        """
        everything = "".join(f"{message.role}{message.content}{message.name or ''}" for message in messages)
        mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in everything)
        pattern = self._any_special
        assert pattern is not None

        def guard(text: str) -> str:
            while pattern.search(text):  # again, as breaking one may leave another that overlapped it
                text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
            return text

        guarded = [
            ChatMessage(guard(message.role), guard(message.content), message.name and guard(message.name))
            for message in messages
        ]
        assert self._template is not None
        text = self._template.render([_plain_dict(message) for message in guarded], add_generation_prompt)
        ids: array[int] = array("I")
        for piece in pattern.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
            elif piece:
                ids.extend(self._plain.encode(piece.replace(mark, ""), add_special_tokens=False).ids)
        return ids

    # ---- tokens to text ----

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._core.decode(token_ids, skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one new sequence."""
        return ByteDetokenizer(self._token_bytes) if self._token_bytes else WindowDetokenizer(self.decode)


def load_tokenizer(path: Path, chat_template: Path | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder or a GGUF file.

    Args:
        path: the folder or file.
        chat_template: a Jinja file that replaces the model's own template.

    Raises:
        TokenizerError: something is missing, damaged or not supported.
    """
    try:
        template = chat_template.read_text(encoding="utf-8") if chat_template else None
        if path.is_dir():
            return _from_folder(path, template)
        if path.is_file() and path.suffix == ".gguf":
            vocabulary = read_gguf_vocabulary(path)
            return Tokenizer(
                vocabulary.tokenizer,
                vocabulary.eos_token_ids,
                template or vocabulary.chat_template,
                vocabulary.bos_token,
                vocabulary.eos_token,
                vocabulary.add_bos,
            )
    except TokenizerError:
        raise
    except (OSError, ValueError, KeyError, IndexError, TemplateFailed) as error:
        raise TokenizerError(f"the tokenizer of {path} cannot be loaded: {error}") from error
    raise TokenizerError(f"{path} is neither a model folder nor a .gguf file on this machine")


def _from_folder(folder: Path, template: str | None) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(f"{file} is missing; give --tokenizer a folder that has it")
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json")
    eos_token, bos_token = _text(settings.get("eos_token")), _text(settings.get("bos_token"))
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            ends += found if isinstance(found, list) else [found]
            break
    eos = core.token_to_id(eos_token) if eos_token else None
    if eos is not None and eos not in ends:
        ends.append(eos)
    if template is None:
        jinja = folder / "chat_template.jinja"
        template = (
            jinja.read_text(encoding="utf-8") if jinja.exists() else _named_template(settings.get("chat_template"))
        )
    return Tokenizer(core, tuple(ends), template, bos_token, eos_token)


def _named_template(setting: Any) -> str | None:
    """tokenizer_config.json has one template, or a list of named ones of which "default" counts."""
    if isinstance(setting, list):
        return next((str(item["template"]) for item in setting if item.get("name") == "default"), None)
    return setting if isinstance(setting, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return content


def _text(token: Any) -> str:
    """Settings write a token as its text or as an object around it."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token if isinstance(token, str) else ""


def _plain_dict(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _packed(encoding: Encoding) -> "array[int]":
    return array("I", encoding.ids)


def _token_bytes(core: Core, added: dict[int, AddedToken]) -> list[bytes]:
    """The bytes of every token of a byte-level vocabulary; empty for other vocabularies."""
    decoder = json.loads(core.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return []
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    table = [b""] * (max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, token_id in core.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else token.encode()
        elif all(character in byte_of for character in token):
            table[token_id] = bytes(byte_of[character] for character in token)
        else:
            table[token_id] = token.encode()
    return table


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte (Radford et al., 2019): printable Latin-1 stays, others move up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
