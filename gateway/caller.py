"""On whose behalf a request comes, as far as the router's queue and its policies care."""

from hashlib import blake2b

from starlette.datastructures import Headers

from gateway.schema import GenerateBody
from protos import inference_pb2

SESSION_HEADER = "x-quire-session"


def name_caller(requests: list[inference_pb2.GenerateRequest], headers: Headers, body: GenerateBody) -> None:
    """Fills in the tenant, which is the API key, and within it the body's ``user``, and the session.

    The session is what the header ``x-quire-session`` says, else the body's ``prompt_cache_key``. Only digests go on:
    neither keys nor names of users are anyone else's business.
    """
    account, user = _digest(headers.get("authorization", "")), _digest(body.user or "")
    tenant = f"{account}/{user}" if user else account
    session = _digest(headers.get(SESSION_HEADER) or body.prompt_cache_key or "")
    for request in requests:
        request.tenant, request.session_id = tenant, session


def _digest(text: str) -> str:
    """Sixteen characters that stand for a text; empty when it is."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if text else ""
