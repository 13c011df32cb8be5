"""The model's tokenizer: text and chats to ids, ids to text. Blocking; callers run it in threads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Core

from router.chat_template import ChatTemplate, Message, TemplateExtras, TemplateRefusal, ToolCall, mapped
from router.control_tokens import ControlTokens
from router.token_bytes import TokenBytes


@dataclass(frozen=True)
class TokenizerFiles:
    """What a model's files say about its tokenizer.

    Attributes:
        core: the tokenizer itself.
        chat_template: Jinja text, if there is one.
        named_tokens: tokens that templates write by name, say ``bos_token``.
        eos_token_ids: ids that end the model's output.
    """

    core: Core
    chat_template: str | None
    named_tokens: dict[str, str]
    eos_token_ids: frozenset[int]


class Tokenizer:
    """Encodes and decodes for one model. Safe to use from several threads.

    Raises:
        ConfigError: the tokenizer or the template is of a kind that this router does not know.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._core = files.core
        self._core.no_truncation()
        self._core.no_padding()
        self._control = ControlTokens(self._core)
        self._template = (
            ChatTemplate(files.chat_template, files.named_tokens) if files.chat_template is not None else None
        )
        self.token_bytes = TokenBytes(self._core)
        self.eos_token_ids = files.eos_token_ids
        vocabulary = self._core.get_vocab(with_added_tokens=True)
        # Ids are below this.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # No token stands for more characters than this, so longer texts need more tokens.
        self.longest_token = max(map(len, vocabulary), default=1)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's template, if it has one."""
        return self._template

    @property
    def model_vocab_size(self) -> int:
        """Entries without those that were added to the tokenizer later: every model with it has at least these."""
        return int(self._core.get_vocab_size(with_added_tokens=False))

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of raw text. Control tokens written in it are control tokens: the client does its own templating."""
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extras: TemplateExtras = TemplateExtras(),  # noqa: B008 - it is frozen
    ) -> list[int]:
        """The ids of a chat. Control tokens written in its messages, tools and extras are plain text.

        Raises:
            TemplateRefusal: there is no template, or it does not take these messages.
        """
        if self._template is None:
            raise TemplateRefusal(
                "the model has no chat template: send the prompt as text, or start the router with --chat-template"
            )
        if not self._template.takes_tools and (extras.tools or any(_has_tools(message) for message in messages)):
            raise TemplateRefusal("the model's chat template takes no tools: tell the model of them in words")
        guard = self._control.guard
        guarded = [_guarded(message, guard) for message in messages]
        guarded_extras = TemplateExtras(mapped(extras.tools, guard), mapped(extras.kwargs, guard))
        try:
            rendered = self._template.render(
                guarded, add_generation_prompt=add_generation_prompt, extras=guarded_extras
            )
        except TemplateRefusal as error:
            raise TemplateRefusal(self._control.unguard(str(error))) from error
        if guarded == list(messages) and guarded_extras == extras:
            return self.encode_text(rendered, add_special_tokens=False)
        return self._control.encode(rendered)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, with or without control tokens."""
        return self.token_bytes.text(token_ids, skip_special_tokens=skip_special_tokens)


def _has_tools(message: Message) -> bool:
    return bool(message.tool_calls) or message.tool_call_id is not None


def _guarded(message: Message, guard: Callable[[str], str]) -> Message:
    return Message(
        guard(message.role),
        guard(message.content),
        message.name and guard(message.name),
        tuple(ToolCall(guard(call.id), guard(call.name), mapped(call.arguments, guard)) for call in message.tool_calls),
        message.tool_call_id and guard(message.tool_call_id),
    )
