"""What traces say of a request, in the names of OpenTelemetry's conventions for generative AI. Nothing of its text."""

from typing import TYPE_CHECKING

from gateway.schema import ChatBody, GenerateBody
from protos import inference_pb2
from protos.tracing import Attributes

if TYPE_CHECKING:
    from gateway.generation import Generation

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def operation(body: GenerateBody) -> str:
    """The kind of a request."""
    return "chat" if isinstance(body, ChatBody) else "text_completion"


def of_request(body: GenerateBody, requests: list[inference_pb2.GenerateRequest]) -> Attributes:
    """What was asked for."""
    call = requests[0]
    found: dict[str, str | bool | int | float] = {
        "gen_ai.operation.name": operation(body),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": call.model,
        "gen_ai.request.stream": bool(body.stream),
        "gen_ai.request.choice.count": (call.n or 1) * len(requests),
        "gen_ai.response.id": call.request_id,
    }
    if call.stopping.HasField("max_tokens"):
        found["gen_ai.request.max_tokens"] = call.stopping.max_tokens
    for name in _SAMPLING:
        value = getattr(body, name, None)
        if value is not None:
            found[f"gen_ai.request.{name}"] = value
    return found


def of_response(generation: "Generation") -> Attributes:
    """What it came to."""
    found: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.response.finish_reasons": [reason for _, reason in sorted(generation.finish_reasons.items())],
    }
    if generation.reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = generation.reasoning_tokens
    if generation.first_text_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = generation.first_text_s
    return found
