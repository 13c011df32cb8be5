"""What clients get: OpenAI's response objects, and vLLM's for tokenizing, as pydantic models.

Replies that are sent once are built from these. Chunks of a stream are written by ``chunks``, for speed; their
models stand here for the OpenAPI document, and tests hold the one to the other.
"""

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorObject


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the generated tokens were for. Those of reasoning are counted with its marks."""

    reasoning_tokens: int


class UsageReply(BaseModel):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(BaseModel):
    """What is called, and the arguments as the model wrote them: a JSON object as a text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool, for the client to carry out."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The reply of one choice. ``content`` is null when there is nothing but calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=lambda value: value is None)


class TokenAlternative(BaseModel):
    """A token that might have come."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(TokenAlternative):
    """One token of a message, and the likeliest ones at its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(BaseModel):
    """Log-probabilities of a text's tokens, in lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatChoice(BaseModel):
    """One of n replies. ``stop_reason`` is the stop string or token id that was met, if any."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    """The reply of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    service_tier: str | None = Field(default=None, exclude_if=lambda value: value is None)


class TextChoice(BaseModel):
    """One continuation. ``stop_reason`` is the stop string or token id that was met, if any."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """The reply of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply


class FunctionDelta(BaseModel):
    """The name comes first and once; the arguments in pieces."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What one chunk adds to the call at ``index``; ``id`` and ``type`` come in its first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What one chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """One choice in a chunk; it has a finish reason in its last chunk only."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a chat stream. ``usage`` is there when stream_options.include_usage is true."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: str | None = None
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None


class TextChunkChoice(BaseModel):
    """One continuation in a chunk; it has a finish reason in its last chunk only."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class CompletionChunk(BaseModel):
    """One event of a completion stream. ``usage`` is there when stream_options.include_usage is true."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageReply | None = None


class ModelReply(BaseModel):
    """One served model. ``max_model_len`` is 0 while no worker is ready."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["quire"] = "quire"
    max_model_len: int


class ModelList(BaseModel):
    """The reply of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelReply]


class TokenizeReply(BaseModel):
    """The reply of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class DetokenizeReply(BaseModel):
    """The reply of POST /detokenize."""

    prompt: str


class StatusReply(BaseModel):
    """The reply of the probes."""

    status: Literal["ok"] = "ok"


class LoadReply(BaseModel):
    """The reply of GET /load: generating requests that wait or run in this gateway, by vLLM's name."""

    server_load: int


class VersionReply(BaseModel):
    """The reply of GET /version."""

    version: str
