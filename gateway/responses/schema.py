"""What clients of the Responses API send, as pydantic models. As in chat, undeclared fields are accepted."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.schema import MAX_ID_LENGTH, MAX_TOOLS, Body, Count, FunctionName, RefusalPart, string_or_list

CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]


class TextPart(Body):
    """A piece of text. Images and files are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    Discriminator(
        lambda value: "refusal" if isinstance(value, dict) and value.get("type") == "refusal" else "text",
    ),
]

Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Part], Field(min_length=1), Tag("list")],
    Discriminator(
        string_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class MessageItem(Body):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(Body):
    """A call that the assistant made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str


class FunctionCallOutputItem(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class ReasoningItem(Body):
    """What the assistant thought earlier: taken, as clients send back what they got, and not shown to the model."""

    type: Literal["reasoning"]


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return kind if kind in ("message", "function_call", "function_call_output", "reasoning") else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="Input should be a message, function_call, function_call_output or reasoning item",
    ),
]

Input = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Item], Field(min_length=1), Tag("list")],
    Discriminator(
        string_or_list,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


class FunctionTool(Body):
    """A function that the model may call; the other kinds of tools run on servers that this is not."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedFunction, Tag("object")],
    Discriminator(
        lambda value: {str: "string", dict: "object"}.get(type(value)),
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be none, auto, required or an object that names a function",
    ),
]


class TextFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(Body):
    """How the text is."""

    format: TextFormat | None = None


class Reasoning(Body):
    """How much the model thinks first."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesBody(Body):
    """The body of POST /v1/responses. Undeclared fields go on to chat completions, so that vLLM's extensions work."""

    model: Annotated[str, Field(min_length=1)]
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    stream_options: dict[str, Any] | None = None
