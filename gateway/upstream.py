"""The gateway's one connection to the router: owns the channel and knows which requests run over it."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.access.limits import KeyUse
from gateway.config import GatewayConfig
from gateway.errors import ParamOf, from_rpc, unavailable
from gateway.generation import Generation
from gateway.metrics import Metrics
from gateway.reasoning import ReasoningTokens
from protos import inference_pb2, inference_pb2_grpc
from protos.api_keys import key_metadata
from protos.channel import INFERENCE_CHANNEL_OPTIONS, open_channel
from protos.tls import explain_failure
from protos.tracing import NO_SPAN, Span

logger = logging.getLogger("gateway")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

# Seconds. Probes must answer before those who ask give up.
_PROBE_TIMEOUT = 2.0
# Listing models asks nothing of a worker.
_LOOKUP_TIMEOUT = 10.0

Reply = TypeVar("Reply", bound=Message)


class Upstream:
    """Calls the router. Must be made and closed in the running loop."""

    def __init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._channel = open_channel(config.router, INFERENCE_CHANNEL_OPTIONS, config.router_tls)
        self._metadata = key_metadata(config.router_api_key)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._running: set[Generation] = set()
        self._draining = False
        # Why the router did not answer when it was asked last.
        self._fault = ""

    def generate(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        param_of: ParamOf,
        *,
        streamed: bool,
        reasoning: Callable[[], ReasoningTokens] | None = None,
        key_use: KeyUse | None = None,
        span: Span = NO_SPAN,
    ) -> Generation:
        """Begins the calls of one request; the caller closes the result.

        Args:
            requests: one a prompt.
            param_of: names the body's fields.
            streamed: the client is sent the text as it comes.
            reasoning: makes what counts the tokens of a choice's reasoning.
            key_use: is charged for it.
            span: of the HTTP request, in traces.

        Raises:
            ApiError (503): this process is draining.
            ApiError (429): a limit of the key is reached.
        """
        if self._draining:
            raise unavailable("This server is shutting down.")
        if key_use is not None:
            key_use.admit(time.monotonic())
        try:
            generation = Generation(
                self._stub,
                requests,
                timeout=self._config.request_timeout,
                metadata=self._metadata,
                param_of=param_of,
                metrics=self._metrics,
                streamed=streamed,
                reasoning=reasoning,
                on_close=partial(self._ended, key_use),
                on_tokens=None if key_use is None else lambda count: key_use.charge(time.monotonic(), count),
                span=span,
            )
        except BaseException:
            if key_use is not None:
                key_use.end()
            raise
        self._running.add(generation)
        return generation

    def _ended(self, key_use: KeyUse | None, generation: Generation) -> None:
        self._running.discard(generation)
        if key_use is not None:
            key_use.end()

    async def list_models(self) -> inference_pb2.ListModelsResponse:
        """The served models. Raises ApiError."""
        return await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), _LOOKUP_TIMEOUT)

    async def get_model(self, name: str) -> inference_pb2.Model:
        """One served model. Raises ApiError, 404 when there is no such model."""
        return await self._call(self._stub.GetModel, inference_pb2.GetModelRequest(model=name), _LOOKUP_TIMEOUT)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, param_of: ParamOf
    ) -> inference_pb2.TokenizeResponse:
        """Text to ids. Raises ApiError."""
        return await self._call(self._stub.Tokenize, request, self._config.request_timeout, param_of)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, param_of: ParamOf
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text. Raises ApiError."""
        return await self._call(self._stub.Detokenize, request, self._config.request_timeout, param_of)

    async def get_load(self) -> inference_pb2.GetLoadResponse:
        """Who waits in the router, and what its workers are busy with. Raises ApiError."""
        return await self._call(self._stub.GetLoad, inference_pb2.GetLoadRequest(), _PROBE_TIMEOUT)

    async def get_metrics(self) -> bytes:
        """The router's metrics, in Prometheus' text format. Raises ApiError."""
        request = inference_pb2.GetMetricsRequest()
        reply: inference_pb2.GetMetricsResponse = await self._call(self._stub.GetMetrics, request, _PROBE_TIMEOUT)
        return reply.text

    async def check_serving(self) -> None:
        """Returns when requests can be served now. Raises ApiError (503) that says why not."""
        if self._draining:
            raise unavailable("This server is shutting down.")
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            reply = await self._health.Check(request, timeout=_PROBE_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            self._note_fault(f"{error.code().name}: {explain_failure(error.details() or '', self._config.router_tls)}")
            raise unavailable("The router does not answer.") from None
        self._fault = ""
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise unavailable("No model is ready to serve requests.")

    def _note_fault(self, fault: str) -> None:
        """Logs why the router does not answer, once for as long as it is the same."""
        if fault != self._fault:
            self._fault = fault
            logger.warning("the router %s does not answer: %s", self._config.router, fault)

    def drain(self) -> None:
        """From now on new requests are refused; running ones go on."""
        self._draining = True

    def stop_running(self) -> None:
        """Ends all running requests; their clients get an error object."""
        if self._running:
            logger.warning("%d requests did not end in time and are cancelled", len(self._running))
        for generation in list(self._running):
            generation.stop(unavailable("This server is shutting down; the request was not completed."))

    async def close(self) -> None:
        """Closes the channel."""
        for generation in list(self._running):
            generation.close()
        await self._channel.close()

    async def _call(
        self,
        method: Callable[..., "grpc.aio.UnaryUnaryCall[Message, Reply]"],
        request: Message,
        limit_s: float,
        param_of: ParamOf = lambda field: field,
    ) -> Reply:
        try:
            return await method(request, timeout=limit_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, param_of) from None
