from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterMessage(_message.Message):
    __slots__ = ("submit", "cancel", "credit", "ping", "subscribe_kv_events")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: CancelSlot
    credit: Credit
    ping: Ping
    subscribe_kv_events: SubscribeKvEvents
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelSlot, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., subscribe_kv_events: _Optional[_Union[SubscribeKvEvents, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "step_batch", "rejected", "pong", "kv_events")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step_batch: StepBatch
    rejected: Rejected
    pong: Pong
    kv_events: KvEvents
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step_batch: _Optional[_Union[StepBatch, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("slot", "generation", "request_id", "prompt_token_ids", "num_emitted", "sampling", "max_tokens", "stop_token_ids", "cache_salt", "time_left_ms", "min_tokens", "bad_words", "logprobs", "prompt_logprobs", "skip_reading_prefix_cache", "priority", "traceparent")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    request_id: str
    prompt_token_ids: bytes
    num_emitted: int
    sampling: _sampling_pb2.SamplingParams
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    time_left_ms: int
    min_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprobs: int
    prompt_logprobs: int
    skip_reading_prefix_cache: bool
    priority: int
    traceparent: str
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., num_emitted: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., time_left_ms: _Optional[int] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_reading_prefix_cache: _Optional[bool] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelSlot(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("step_batches",)
    STEP_BATCHES_FIELD_NUMBER: _ClassVar[int]
    step_batches: int
    def __init__(self, step_batches: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "epoch", "model", "manifest_hash", "vocab_size", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_slots", "takes_priorities", "enable_prefix_caching", "start_seconds")
    class StartSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    epoch: int
    model: str
    manifest_hash: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_slots: int
    takes_priorities: bool
    enable_prefix_caching: bool
    start_seconds: _containers.ScalarMap[str, float]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., manifest_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_slots: _Optional[int] = ..., takes_priorities: _Optional[bool] = ..., enable_prefix_caching: _Optional[bool] = ..., start_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("step", "slots", "generations", "first_indices", "counts", "token_ids", "admitted", "finished", "load", "logprobs", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDICES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    first_indices: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    finished: _containers.RepeatedCompositeFieldContainer[FinishedSlot]
    load: Load
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    def __init__(self, step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., first_indices: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[FinishedSlot, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("slot", "generation", "first_index", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    first_index: int
    logprobs: _sampling_pb2.Logprobs
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., first_index: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("slot", "generation", "cached_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    cached_tokens: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FinishedSlot(_message.Message):
    __slots__ = ("slot", "generation", "reason", "usage", "stop_token_id", "error", "field")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    reason: _sampling_pb2.FinishReason
    usage: _sampling_pb2.Usage
    stop_token_id: int
    error: str
    field: str
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("slot", "generation", "reason", "message", "field")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Rejected.Reason]
        REASON_INVALID: _ClassVar[Rejected.Reason]
        REASON_FULL: _ClassVar[Rejected.Reason]
        REASON_DRAINING: _ClassVar[Rejected.Reason]
    REASON_UNSPECIFIED: Rejected.Reason
    REASON_INVALID: Rejected.Reason
    REASON_FULL: Rejected.Reason
    REASON_DRAINING: Rejected.Reason
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    reason: Rejected.Reason
    message: str
    field: str
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[_Union[Rejected.Reason, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "cached_blocks", "num_preemptions", "prefill_tokens", "busy_us", "draft_tokens", "accepted_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    free_blocks: int
    cached_blocks: int
    num_preemptions: int
    prefill_tokens: int
    busy_us: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., busy_us: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class SubscribeKvEvents(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("epoch", "sequence", "snapshot", "cleared", "removed", "stored")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    snapshot: bool
    cleared: bool
    removed: bytes
    stored: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., cleared: _Optional[bool] = ..., removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "step", "step_age_ms", "load", "draining", "step_time_us", "longest_step_us")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_US_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_US_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    step: int
    step_age_ms: int
    load: Load
    draining: bool
    step_time_us: int
    longest_step_us: int
    def __init__(self, nonce: _Optional[int] = ..., step: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., step_time_us: _Optional[int] = ..., longest_step_us: _Optional[int] = ...) -> None: ...
