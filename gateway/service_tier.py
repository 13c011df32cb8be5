"""OpenAI's service tiers as classes of priority."""

from collections.abc import Sequence

from gateway.schema import GenerateBody
from protos import inference_pb2

# Lower is more urgent; there is room for classes of an operator's own between them.
CLASSES = {"flex": 10, "priority": -10}
# What asks for nothing.
_STANDARD = ("auto", "default")


def asked_class(body: GenerateBody) -> int | None:
    """The class that the body's tier stands for; None when it has none, or says its ``priority`` itself."""
    return CLASSES.get(body.service_tier or "") if body.priority is None else None


def apply_tier(
    body: GenerateBody, requests: Sequence[inference_pb2.GenerateRequest], takes_priorities: bool
) -> list[str]:
    """Gives the requests the class of the body's tier, if the workers have classes. Returns what had no effect."""
    wanted = asked_class(body)
    if wanted is not None and takes_priorities:
        for request in requests:
            request.priority = wanted
        return []
    return [] if body.service_tier is None or body.service_tier in _STANDARD else ["service_tier"]


def tier_of(body: GenerateBody, priority: int) -> str | None:
    """The tier that a request was served in; None when its body does not ask."""
    if body.service_tier is None:
        return None
    return "default" if priority == 0 else "flex" if priority > 0 else "priority"
