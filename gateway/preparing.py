"""From a body to a request that is ready for the router: everything is checked, and the model's dialect is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from gateway.chat_dialect import Dialect, asks_for_template, dialect_of
from gateway.conversation import check_messages
from gateway.dependencies import config_of
from gateway.errors import invalid
from gateway.schema import ChatBody, CompletionBody, GenerateBody, TokenizeBody
from gateway.service_tier import apply_tier, asked_class, tier_of
from gateway.size_check import check_sizes
from gateway.tools import check_tools
from gateway.translate import JSON_DIALECT, chat_requests, completion_requests, tokenize_request
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

    def tier(self) -> str | None:
        """The service tier that it was sent in, for who asked."""
        return tier_of(self.body, self.requests[0].priority)


async def prepare_chat(body: ChatBody, id_: str, request: Request, upstream: Upstream) -> Prepared:
    """Prepares a conversation, also one that came as another API has it. Raises ApiError."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    check_messages(body.messages)
    check_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    model = await _model_of(body, upstream)
    dialect = _dialect(body, request, model)
    requests = chat_requests(body, id_, dialect)
    ignored = apply_tier(body, requests, model.takes_priorities)
    return Prepared(body, id_, requests, dialect, with_logprobs=bool(body.logprobs), ignored=ignored)


async def prepare_completion(body: CompletionBody, id_: str, request: Request, upstream: Upstream) -> Prepared:
    """Prepares one or several prompts. Raises ApiError."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    requests = completion_requests(body, id_)
    model = await _model_of(body, upstream)
    ignored = apply_tier(body, requests, model.takes_priorities)
    echoes = await _echoes(requests, body.n or 1, upstream) if body.echo else []
    return Prepared(body, id_, requests, echoes=echoes, with_logprobs=body.logprobs is not None, ignored=ignored)


async def prepare_tokenize(body: TokenizeBody, request: Request, upstream: Upstream) -> inference_pb2.TokenizeRequest:
    """The call that tokenizes a prompt or a conversation. Raises ApiError."""
    check_sizes(body, config_of(request).limits)
    if body.messages is not None:
        refuse_in_messages(body.messages)
        check_messages(body.messages)
    return tokenize_request(body, _dialect(body, request, await _model_of(body, upstream)))


async def _model_of(body: GenerateBody | TokenizeBody, upstream: Upstream) -> inference_pb2.Model:
    """What the router says of the body's model; it is asked only where that matters."""
    matters = isinstance(body, GenerateBody) and asked_class(body) is not None
    if isinstance(body, ChatBody | TokenizeBody):
        matters = matters or asks_for_template(body)
    return await upstream.get_model(body.model) if matters else inference_pb2.Model()


def _dialect(body: ChatBody | TokenizeBody, request: Request, model: inference_pb2.Model) -> Dialect:
    return dialect_of(body, model.chat_template, config_of(request).tool_call_parser)


async def _echoes(requests: Sequence[inference_pb2.GenerateRequest], n: int, upstream: Upstream) -> list[str]:
    """The prompts' texts, one for each choice."""
    texts = []
    for request in requests:
        text = request.text
        if request.WhichOneof("prompt") == "token_ids":
            ids = inference_pb2.DetokenizeRequest(model=request.model, token_ids=request.token_ids.ids)
            text = (await upstream.detokenize(ids, lambda field: "prompt")).text
        texts += [text] * n
    return texts
