"""From a body to a request that is ready for the router: everything is checked, and the model's dialect is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from gateway.chat_dialect import NO_TEMPLATE, Dialect, asks_for_template, dialect_of
from gateway.conversation import check_messages
from gateway.dependencies import config_of
from gateway.errors import invalid
from gateway.schema import ChatBody, GenerateBody, TokenizeBody
from gateway.size_check import check_sizes
from gateway.tools import check_tools
from gateway.translate import JSON_DIALECT, chat_requests, tokenize_request
from gateway.unsupported import refuse_in_messages, refuse_unsupported
from gateway.upstream import Upstream
from protos import inference_pb2


@dataclass(frozen=True)
class Prepared:
    """A request that only has to be sent.

    Attributes:
        body: what the client asks for.
        id: of the request.
        requests: one a prompt.
        dialect: in which the model is spoken to.
        echoes: the texts that choices begin with.
        with_logprobs: whether log-probabilities go out.
        ignored: further names of fields without effect.
        name_of: from names of fields of ``body`` to those that the client knows.
    """

    body: GenerateBody
    id: str
    requests: list[inference_pb2.GenerateRequest]
    dialect: Dialect = JSON_DIALECT
    echoes: Sequence[str] = ()
    with_logprobs: bool = False
    ignored: Sequence[str] = ()
    name_of: Callable[[str], str] = str


async def prepare_chat(body: ChatBody, id_: str, request: Request, upstream: Upstream) -> Prepared:
    """Prepares a conversation, also one that came as another API has it. Raises ApiError."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    check_messages(body.messages)
    check_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    dialect = await _dialect(body, request, upstream)
    requests = chat_requests(body, id_, dialect)
    return Prepared(body, id_, requests, dialect, with_logprobs=bool(body.logprobs))


async def prepare_tokenize(body: TokenizeBody, request: Request, upstream: Upstream) -> inference_pb2.TokenizeRequest:
    """The call that tokenizes a prompt or a conversation. Raises ApiError."""
    check_sizes(body, config_of(request).limits)
    if body.messages is not None:
        refuse_in_messages(body.messages)
        check_messages(body.messages)
    return tokenize_request(body, await _dialect(body, request, upstream))


async def _dialect(body: ChatBody | TokenizeBody, request: Request, upstream: Upstream) -> Dialect:
    """How the body's model is spoken to; the router is asked only where it matters."""
    template = NO_TEMPLATE
    if asks_for_template(body):
        template = (await upstream.get_model(body.model)).chat_template
    return dialect_of(body, template, config_of(request).tool_call_parser)
