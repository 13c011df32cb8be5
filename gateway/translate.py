"""From request bodies to the wire's requests, and from the router's names of fields back to the client's.

Pure functions: no I/O, no clock, no state.
"""

import re

from gateway.chat_dialect import Dialect
from gateway.constraint import constraint_of
from gateway.conversation import chat_in_words, chat_with_tools, tool_instructions
from gateway.errors import ParamOf, invalid
from gateway.schema import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, GenerateBody, TokenizeBody
from gateway.tools import named, offered
from protos import inference_pb2, sampling_pb2

_INDEX = re.compile(r"\[(\d+)\]")


JSON_DIALECT = Dialect("json")
"""Of a model about which nothing is known."""


def chat_requests(
    body: ChatBody, request_id: str, dialect: Dialect = JSON_DIALECT
) -> list[inference_pb2.GenerateRequest]:
    """The one call that a chat request makes."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = _request(body, request_id, max_tokens)
    if body.logprobs:
        request.output.logprobs = body.top_logprobs or 0
        request.output.token_bytes = True
    if dialect.native:
        chat = chat_with_tools(body.messages, offered(body), dialect.tool_format)
    else:
        required = body.tool_choice == "required"
        instructions = tool_instructions(offered(body), dialect.tool_format, required, named(body))
        chat = chat_in_words(body.messages, dialect.tool_format, instructions)
    request.chat.CopyFrom(_completed(chat, body, dialect))
    return [request]


def _completed(chat: inference_pb2.Chat, body: ChatBody | TokenizeBody, dialect: Dialect) -> inference_pb2.Chat:
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    chat.template_kwargs = dialect.template_kwargs
    return chat


def completion_requests(body: CompletionBody, request_id: str) -> list[inference_pb2.GenerateRequest]:
    """One call for each prompt. Several get ids that end in their place, since ids are unique on the wire."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = _prompts(body)
    requests = []
    for index, prompt in enumerate(prompts):
        request = _request(body, request_id if len(prompts) == 1 else f"{request_id}-{index}", max_tokens)
        if body.logprobs is not None:
            request.output.logprobs = body.logprobs
            request.output.token_bytes = True
            if body.echo:
                request.output.prompt_logprobs = body.logprobs
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def tokenize_request(body: TokenizeBody, dialect: Dialect = JSON_DIALECT) -> inference_pb2.TokenizeRequest:
    """The call of POST /tokenize. Raises ApiError (400) unless there is exactly one of prompt and messages."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "either prompt or messages is needed, and not both")
    request = inference_pb2.TokenizeRequest(model=body.model)
    if body.messages is not None:
        functions = [tool.function for tool in body.tools or ()]
        if dialect.native:
            chat = chat_with_tools(body.messages, functions, dialect.tool_format)
        else:
            instructions = tool_instructions(functions, dialect.tool_format, required=False, named=None)
            chat = chat_in_words(body.messages, dialect.tool_format, instructions)
        request.chat.CopyFrom(_completed(chat, body, dialect))
    else:
        request.text = body.prompt or ""
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return request


def param_names(body: object) -> ParamOf:
    """A function from the router's name of a field (``stopping.max_tokens``) to the one in this body."""
    prompt = "messages" if getattr(body, "messages", None) is not None else "prompt"
    renamed = {"chat": prompt, "text": prompt, "token_ids": prompt, "prompt": prompt}
    if not hasattr(body, "prompt") and not hasattr(body, "messages"):
        renamed = {"token_ids": "tokens"}
    if getattr(body, "max_completion_tokens", None) is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    constraint = constraint_of(body) if isinstance(body, GenerateBody) else None
    if constraint is not None:
        renamed[constraint.field] = constraint.param

    def param_of(field: str) -> str | None:
        steps = _INDEX.sub(r".\1", field).split(".")
        if steps[0] in ("sampling", "stopping") and len(steps) > 1:
            del steps[0]
        # chat.messages.0.role is messages.0.role for the client, token_ids.ids.3 is prompt.3, choices.texts.1 choice.1.
        if steps[0] == "chat" and steps[1:2] in (["tools"], ["template_kwargs"]):
            return ".".join([{"tools": "tools", "template_kwargs": "chat_template_kwargs"}[steps[1]], *steps[2:]])
        if steps[:2] in (["chat", "messages"], ["token_ids", "ids"], ["choices", "texts"]):
            del steps[1]
        steps[0] = renamed.get(steps[0], steps[0])
        return ".".join(steps)

    return param_of


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body one by one: the schema has made sure that a list does not mix its kinds."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[str | list[int]] = [entry for entry in prompt if not isinstance(entry, int)]
    return prompts or [[entry for entry in prompt if isinstance(entry, int)]]


def _request(body: GenerateBody, request_id: str, max_tokens: int | None) -> inference_pb2.GenerateRequest:
    """Everything but the prompt. What the client left out stays out: the router knows the defaults."""
    constraint = constraint_of(body)
    sampling = sampling_pb2.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        # vLLM's clients say "off" with -1, the wire with 0.
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        # The wire has no sign; clients may send one.
        seed=None if body.seed is None else body.seed % 2**64,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias={int(token): value for token, value in (body.logit_bias or {}).items()},
        allowed_token_ids=body.allowed_token_ids,
        **({} if constraint is None else {constraint.field: constraint.value}),  # type: ignore[arg-type]
    )
    stopping = sampling_pb2.StopConditions(
        max_tokens=max_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens,
        bad_words=body.bad_words,
    )
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        model=body.model,
        sampling=sampling,
        stopping=stopping,
        n=body.n,
        output=inference_pb2.OutputOptions(final_only=not body.stream),
        cache_salt=body.cache_salt,
        skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
        priority=body.priority or 0,
    )
