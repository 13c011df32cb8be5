"""What clients send: the OpenAI request bodies, and vLLM's for tokenizing, as pydantic models.

Types are strict, since JSON has types: "5" is no integer and true no number. null means absent. Fields that are not
declared are accepted; ``ignored_fields`` tells which of them had no effect. Declared fields that are not built yet
are refused by ``unsupported``.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_PROMPTS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_TOOLS = 1024
MAX_ID_LENGTH = 256
# The documented default of the older endpoint; chat goes on until the context is full.
DEFAULT_COMPLETION_TOKENS = 16

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")]
Count = Annotated[int, Field(ge=1, lt=2**32)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="allow")


def string_or_list(value: Any) -> str | None:
    """Which of the two a value is, for unions of them; None when it is neither."""
    if isinstance(value, str):
        return "string"
    return "list" if isinstance(value, list) else None


def _prompt_kind(value: Any) -> str | None:
    """The first entry decides what a list is, so that errors speak of the one shape that was meant."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, str):
        return "texts"
    if isinstance(first, int):
        return "ids"
    return "lists of ids" if isinstance(first, list) else None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag("string")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("list")],
    Discriminator(
        string_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]

TokenList = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenList, Tag("ids")]
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class TextPart(Body):
    """One piece of a message. Only text is supported so far."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    Discriminator(lambda value: "refusal" if isinstance(value, dict) and value.get("type") == "refusal" else "text"),
]

Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[ContentPart], Field(min_length=1), Tag("list")],
    Discriminator(
        string_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(Body):
    """What a call names, and the arguments as a JSON text."""

    name: FunctionName
    arguments: str


class ToolCall(Body):
    """A call that the assistant made earlier."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """One turn of a conversation. ``conversation`` says which roles need which fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None

    def text(self) -> str:
        """The content as one string; empty when there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)

    def refuses(self) -> bool:
        """Whether a part of the content is a refusal."""
        return isinstance(self.content, list) and any(isinstance(part, RefusalPart) for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1)]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class JsonSchemaFormat(Body):
    """The schema that the reply must fit. It is kept to with and without ``strict``."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """What the reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


JsonSchema = Annotated[
    Annotated[str, Tag("string")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(
        lambda value: {str: "string", dict: "object"}.get(type(value)),
        custom_error_type="schema_type",
        custom_error_message="Input should be a JSON schema, as an object or a string",
    ),
]


class StructuredOutputs(Body):
    """vLLM's way to say what the reply must be: one of these. Nothing else is taken, as it would change the reply."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(Body):
    """A function that the model may call. With ``strict``, calls that do not fit ``parameters`` are errors."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionReference(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedTool, Tag("object")],
    Discriminator(
        lambda value: {str: "string", dict: "object"}.get(type(value)),
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be none, auto, required or an object that names a function",
    ),
]


class GenerateBody(Body):
    """What both generating endpoints take. vLLM's extensions follow the fields of OpenAI."""

    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Keys are token ids, written as strings as JSON demands.
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    skip_reading_prefix_cache: bool | None = None
    # flex, priority and others; ``service_tier`` says what they are here.
    service_tier: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # What vLLM called them before.
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerateBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    # The newer name of max_tokens; it wins when both are given.
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Values for the model's chat template, by its names for them, say enable_thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None


class CompletionBody(GenerateBody):
    """The body of POST /v1/completions. Without max_tokens 16 tokens are generated, as OpenAI documents."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None
    suffix: str | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """The body of POST /tokenize: either a prompt or messages."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: Annotated[str, Field(min_length=1)]
    tokens: list[TokenId]


def ignored_fields(body: Body) -> list[str]:
    """Names of the fields that were sent, are not null and have no effect: those of the body, then of what is in it.

    The place in a list is left out of a name, and what is in many of its entries is named once.
    """
    names = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return list(dict.fromkeys([*names, *ignored_within(body)]))


def ignored_within(body: Body) -> Iterator[str]:
    """The same of the objects in a body alone, repeated where they are."""
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Body):
                prefix = field.alias or name
                extra = part.model_extra or {}
                yield from (f"{prefix}.{one}" for one, given in extra.items() if given is not None)
                yield from (f"{prefix}.{one}" for one in ignored_within(part))
