"""On whose behalf a request comes, as far as the router's queue and its policies care."""

from hashlib import blake2b

from starlette.datastructures import Headers

from gateway.access.guard import presented_key
from gateway.errors import invalid
from gateway.schema import GenerateBody
from protos import inference_pb2
from protos.api_keys import ApiKey

SESSION_HEADER = "x-quire-session"


def name_caller(
    requests: list[inference_pb2.GenerateRequest], headers: Headers, body: GenerateBody, key: ApiKey | None = None
) -> None:
    """Fills in the tenant, within it the body's ``user``, the session, and the class that the key's requests have at
    best.

    The tenant is that of the key, or stands for the key. The session is what the header ``x-quire-session`` says, else
    the body's ``prompt_cache_key``. Only digests go on: neither keys nor names of users are anyone else's business.

    Raises:
        ApiError (400): the body asks for a more urgent class than the key may have.
    """
    if key is not None and key.priority_ceiling is not None:
        for request in requests:
            request.priority = _bounded(request.priority, body.priority is not None, key.priority_ceiling)
    account = key.account if key is not None else _digest(presented_key(headers))
    user = _digest(body.user or "")
    tenant = f"{account}/{user}" if user else account
    session = _digest(headers.get(SESSION_HEADER) or body.prompt_cache_key or "")
    for request in requests:
        request.tenant, request.session_id = tenant, session


def _bounded(priority: int, is_asked_for: bool, ceiling: int) -> int:
    if is_asked_for and priority < ceiling:
        raise invalid("priority", f"priority is {priority}; this key's requests may have {ceiling} or more")
    return max(priority, ceiling)


def _digest(text: str) -> str:
    """Sixteen characters that stand for a text; empty when it is."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if text else ""
