"""Turns a request's prompt into ids. Blocking: servers call it in threads."""

from protos import inference_pb2
from router.chat import characters_of, check_extras, check_messages
from router.chat_template import TemplateRefusal
from router.errors import InvalidArgument
from router.tokenizer import Tokenizer
from router.validation import check_ids, check_text_length

PromptRequest = inference_pb2.GenerateRequest | inference_pb2.ExplainRequest | inference_pb2.TokenizeRequest


def encode_prompt(
    tokenizer: Tokenizer,
    request: PromptRequest,
    max_model_len: int,
    vocab_size: int,
    *,
    add_special_tokens: bool = True,
) -> tuple[str, list[int]]:
    """The prompt's field and its ids.

    Args:
        tokenizer: the model's.
        request: has the oneof ``prompt``.
        max_model_len: texts that cannot fit are refused before they are tokenized; 0: any length.
        vocab_size: ids must be below.
        add_special_tokens: for text.

    Raises:
        InvalidArgument: the prompt is missing or wrong.
    """
    field = request.WhichOneof("prompt")
    if field == "token_ids" and not isinstance(request, inference_pb2.TokenizeRequest):
        token_ids = list(request.token_ids.ids)
        check_ids("token_ids.ids", token_ids, vocab_size)
        return field, token_ids
    if field == "text":
        if max_model_len:
            check_text_length(field, len(request.text), tokenizer.longest_token, max_model_len)
        return field, tokenizer.encode_text(request.text, add_special_tokens=add_special_tokens)
    if field == "chat":
        return field, _encode_chat(tokenizer, request.chat, max_model_len)
    raise InvalidArgument("prompt", "there is no prompt: give one of text, token_ids or chat")


def _encode_chat(tokenizer: Tokenizer, chat: inference_pb2.Chat, max_model_len: int) -> list[int]:
    messages = check_messages(chat)
    extras = check_extras(chat)
    template = tokenizer.chat_template
    if template is not None and (taken := template.reserved & extras.kwargs.keys()):
        raise InvalidArgument("chat.template_kwargs", f"{min(taken)} is the server's to give to the chat template")
    if max_model_len:
        check_text_length("chat", characters_of(chat), tokenizer.longest_token, max_model_len)
    opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    try:
        return tokenizer.encode_chat(messages, add_generation_prompt=opened, extras=extras)
    except TemplateRefusal as error:
        raise InvalidArgument("chat", str(error)) from error


def encode_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> list[list[int]]:
    """The ids of words that may stand within a text: each as it is, and after a space."""
    texts = [text for word in words for text in dict.fromkeys((word, " " + word.lstrip()))]
    return [tokenizer.encode_text(text, add_special_tokens=False) for text in texts]
