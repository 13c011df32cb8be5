from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "tools", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., tools: _Optional[_Iterable[str]] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("text", "token_ids", "final_only", "logprobs", "prompt_logprobs", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: bool
    token_ids: bool
    final_only: bool
    logprobs: int
    prompt_logprobs: int
    token_bytes: bool
    def __init__(self, text: _Optional[bool] = ..., token_ids: _Optional[bool] = ..., final_only: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., token_bytes: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "n", "output", "cache_salt", "skip_reading_prefix_cache", "priority", "tenant", "session_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: _sampling_pb2.SamplingParams
    stopping: _sampling_pb2.StopConditions
    n: int
    output: OutputOptions
    cache_salt: str
    skip_reading_prefix_cache: bool
    priority: int
    tenant: str
    session_id: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sampling_pb2.StopConditions, _Mapping]] = ..., n: _Optional[int] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., skip_reading_prefix_cache: _Optional[bool] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[GenerateEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[GenerateEvent, _Mapping]]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "delta", "finished", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "route")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    route: Route
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., route: _Optional[_Union[Route, _Mapping]] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("worker", "reason", "predicted_cached_tokens", "cached_tokens", "queue_ms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    reason: str
    predicted_cached_tokens: int
    cached_tokens: int
    queue_ms: int
    def __init__(self, worker: _Optional[str] = ..., reason: _Optional[str] = ..., predicted_cached_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "token_bytes", "top_token_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _sampling_pb2.Logprobs
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    top_token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., top_token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "text", "first_index", "token_ids", "logprobs", "token_bytes", "top_token_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _sampling_pb2.Logprobs
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    top_token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., top_token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "reason", "usage", "stop_string", "stop_token_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: _sampling_pb2.FinishReason
    usage: _sampling_pb2.Usage
    stop_string: str
    stop_token_id: int
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_model_len", "created", "ready_workers", "chat_template", "takes_priorities")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    READY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TAKES_PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    created: int
    ready_workers: int
    chat_template: ChatTemplate
    takes_priorities: bool
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., created: _Optional[int] = ..., ready_workers: _Optional[int] = ..., chat_template: _Optional[_Union[ChatTemplate, _Mapping]] = ..., takes_priorities: _Optional[bool] = ...) -> None: ...

class ChatTemplate(_message.Message):
    __slots__ = ("takes_tools", "tool_call_format", "variables")
    TAKES_TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    takes_tools: bool
    tool_call_format: str
    variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, takes_tools: _Optional[bool] = ..., tool_call_format: _Optional[str] = ..., variables: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("results",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[CancelResponse.Outcome]
        OUTCOME_CANCELLED: _ClassVar[CancelResponse.Outcome]
        OUTCOME_NOT_FOUND: _ClassVar[CancelResponse.Outcome]
    OUTCOME_UNSPECIFIED: CancelResponse.Outcome
    OUTCOME_CANCELLED: CancelResponse.Outcome
    OUTCOME_NOT_FOUND: CancelResponse.Outcome
    class Result(_message.Message):
        __slots__ = ("request_id", "outcome", "usage")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        outcome: CancelResponse.Outcome
        usage: _sampling_pb2.Usage
        def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[CancelResponse.Outcome, str]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CancelResponse.Result]
    def __init__(self, results: _Optional[_Iterable[_Union[CancelResponse.Result, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "cache_salt", "session_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    cache_salt: str
    session_id: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., cache_salt: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("prompt_tokens", "policy", "chosen", "candidates", "queued")
    class Candidate(_message.Message):
        __slots__ = ("worker", "ready", "running", "capacity", "score", "cached_tokens", "wait_s", "work_s", "decode_s", "memory_s", "index_state", "backlog_tokens")
        WORKER_FIELD_NUMBER: _ClassVar[int]
        READY_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        CAPACITY_FIELD_NUMBER: _ClassVar[int]
        SCORE_FIELD_NUMBER: _ClassVar[int]
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        WAIT_S_FIELD_NUMBER: _ClassVar[int]
        WORK_S_FIELD_NUMBER: _ClassVar[int]
        DECODE_S_FIELD_NUMBER: _ClassVar[int]
        MEMORY_S_FIELD_NUMBER: _ClassVar[int]
        INDEX_STATE_FIELD_NUMBER: _ClassVar[int]
        BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
        worker: str
        ready: bool
        running: int
        capacity: int
        score: float
        cached_tokens: int
        wait_s: float
        work_s: float
        decode_s: float
        memory_s: float
        index_state: str
        backlog_tokens: int
        def __init__(self, worker: _Optional[str] = ..., ready: _Optional[bool] = ..., running: _Optional[int] = ..., capacity: _Optional[int] = ..., score: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., work_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., memory_s: _Optional[float] = ..., index_state: _Optional[str] = ..., backlog_tokens: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    policy: str
    chosen: str
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainResponse.Candidate]
    queued: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., policy: _Optional[str] = ..., chosen: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[ExplainResponse.Candidate, _Mapping]]] = ..., queued: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("waiting", "workers", "predictions")
    class Worker(_message.Message):
        __slots__ = ("address", "name", "ready", "running", "waiting", "slots_taken", "max_slots", "total_blocks", "used_blocks", "cached_blocks", "free_blocks", "block_size", "prefix_cache_queries", "prefix_cache_hits", "preemptions", "backlog_tokens", "prefill_tokens_per_second", "draft_tokens", "accepted_tokens", "start_seconds")
        class StartSecondsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        READY_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        SLOTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
        MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
        TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
        PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
        PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
        PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
        BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
        PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        START_SECONDS_FIELD_NUMBER: _ClassVar[int]
        address: str
        name: str
        ready: bool
        running: int
        waiting: int
        slots_taken: int
        max_slots: int
        total_blocks: int
        used_blocks: int
        cached_blocks: int
        free_blocks: int
        block_size: int
        prefix_cache_queries: int
        prefix_cache_hits: int
        preemptions: int
        backlog_tokens: int
        prefill_tokens_per_second: float
        draft_tokens: int
        accepted_tokens: int
        start_seconds: _containers.ScalarMap[str, float]
        def __init__(self, address: _Optional[str] = ..., name: _Optional[str] = ..., ready: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots_taken: _Optional[int] = ..., max_slots: _Optional[int] = ..., total_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., start_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...
    class Predictions(_message.Message):
        __slots__ = ("sequences", "predicted_tokens", "cached_tokens", "missed_tokens", "unexpected_tokens")
        SEQUENCES_FIELD_NUMBER: _ClassVar[int]
        PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        UNEXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        sequences: int
        predicted_tokens: int
        cached_tokens: int
        missed_tokens: int
        unexpected_tokens: int
        def __init__(self, sequences: _Optional[int] = ..., predicted_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., missed_tokens: _Optional[int] = ..., unexpected_tokens: _Optional[int] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[GetLoadResponse.Worker]
    predictions: GetLoadResponse.Predictions
    def __init__(self, waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[GetLoadResponse.Worker, _Mapping]]] = ..., predictions: _Optional[_Union[GetLoadResponse.Predictions, _Mapping]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...
