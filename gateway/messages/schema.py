"""What clients of the Messages API send, as pydantic models. As in chat, undeclared fields are accepted."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.schema import MAX_ID_LENGTH, MAX_TOOLS, Body, Count, FunctionName, StopString, string_or_list

CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]


class TextBlock(Body):
    """A piece of text. Images and documents are not supported."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Body):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]


Text = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextBlock], Tag("list")],
    Discriminator(
        string_or_list,
        custom_error_type="text_type",
        custom_error_message="Input should be a string or a list of text blocks",
    ),
]


class ToolResultBlock(Body):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Text | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """What the assistant thought earlier: taken, as clients send back what they got, and not shown to the model."""

    type: Literal["thinking", "redacted_thinking"]


_KINDS = {
    "text": "text",
    "tool_use": "tool_use",
    "tool_result": "tool_result",
    "thinking": "thinking",
    "redacted_thinking": "thinking",
}

Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(
        lambda value: _KINDS.get(value["type"]) if isinstance(value, dict) and _is_text(value.get("type")) else None,
        custom_error_type="block_type",
        custom_error_message="Input should be a text, tool_use, tool_result or thinking block",
    ),
]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


class Message(Body):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[Block], Tag("list")],
        Discriminator(
            string_or_list,
            custom_error_type="content_type",
            custom_error_message="Input should be a string or a list of content blocks",
        ),
    ]


class Tool(Body):
    """A function that the model may call; tools that run on servers are not supported."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    """The schema that the text must fit."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """What the text must be, and how much the model thinks first."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Body):
    """About the request."""

    user_id: str | None = None


class CountTokensBody(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Text | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages. Undeclared fields go on to chat completions, so that vLLM's extensions work."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: int | None = None
    stop_sequences: list[StopString] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    # Both tiers are one here.
    service_tier: Literal["auto", "standard_only"] | None = None
