"""The message object, for the OpenAPI document and as a check of what is sent."""

from typing import Any, Literal

from pydantic import BaseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class MessageUsage(BaseModel):
    """Tokens of the request. Those of the prompt that were cached are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    """The reply of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessagesErrorObject(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorReply(BaseModel):
    """The body of every answer that is not a success."""

    type: Literal["error"] = "error"
    error: MessagesErrorObject


class CountTokensReply(BaseModel):
    """The reply of POST /v1/messages/count_tokens."""

    input_tokens: int
