from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokens", "chat", "parameters", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "num_speculative_tokens", "seed", "sample_index", "resume_from", "want_token_texts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokens: TokenIds
    chat: Chat
    parameters: SamplingParameters
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_speculative_tokens: int
    seed: int
    sample_index: int
    resume_from: int
    want_token_texts: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., parameters: _Optional[_Union[SamplingParameters, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., resume_from: _Optional[int] = ..., want_token_texts: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("kind", "draft_position")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Origin.Kind]
        KIND_PLAIN: _ClassVar[Origin.Kind]
        KIND_DRAFT: _ClassVar[Origin.Kind]
        KIND_RECOVERED: _ClassVar[Origin.Kind]
        KIND_BONUS: _ClassVar[Origin.Kind]
    KIND_UNSPECIFIED: Origin.Kind
    KIND_PLAIN: Origin.Kind
    KIND_DRAFT: Origin.Kind
    KIND_RECOVERED: Origin.Kind
    KIND_BONUS: Origin.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_POSITION_FIELD_NUMBER: _ClassVar[int]
    kind: Origin.Kind
    draft_position: int
    def __init__(self, kind: _Optional[_Union[Origin.Kind, str]] = ..., draft_position: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "origins", "finish_reason", "usage", "draft_statistics", "seed", "token_texts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedCompositeFieldContainer[Origin]
    finish_reason: FinishReason
    usage: Usage
    draft_statistics: DraftStatistics
    seed: int
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., draft_statistics: _Optional[_Union[DraftStatistics, _Mapping]] = ..., seed: _Optional[int] = ..., token_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class DraftStatistics(_message.Message):
    __slots__ = ("rounds", "undrafted_rounds", "drafted_per_position", "accepted_per_position", "acceptance_length")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    undrafted_rounds: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    acceptance_length: float
    def __init__(self, rounds: _Optional[int] = ..., undrafted_rounds: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., acceptance_length: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("service", "ready", "roles", "requests_in_flight", "admission_limit", "target", "head", "draft_placement", "num_speculative_tokens", "totals", "max_context", "version")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_LIMIT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    service: str
    ready: bool
    roles: _containers.RepeatedCompositeFieldContainer[RoleStatus]
    requests_in_flight: int
    admission_limit: int
    target: str
    head: str
    draft_placement: str
    num_speculative_tokens: int
    totals: EngineTotals
    max_context: int
    version: str
    def __init__(self, service: _Optional[str] = ..., ready: _Optional[bool] = ..., roles: _Optional[_Iterable[_Union[RoleStatus, _Mapping]]] = ..., requests_in_flight: _Optional[int] = ..., admission_limit: _Optional[int] = ..., target: _Optional[str] = ..., head: _Optional[str] = ..., draft_placement: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., totals: _Optional[_Union[EngineTotals, _Mapping]] = ..., max_context: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class RoleStatus(_message.Message):
    __slots__ = ("role", "desired", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: str
    desired: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    def __init__(self, role: _Optional[str] = ..., desired: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "state", "node_id", "device", "sampler", "threads", "pid", "running_requests", "waiting_requests", "kv_blocks_used", "kv_blocks_total")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[ReplicaStatus.State]
        STATE_STARTING: _ClassVar[ReplicaStatus.State]
        STATE_READY: _ClassVar[ReplicaStatus.State]
        STATE_DRAINING: _ClassVar[ReplicaStatus.State]
        STATE_LOST: _ClassVar[ReplicaStatus.State]
    STATE_UNSPECIFIED: ReplicaStatus.State
    STATE_STARTING: ReplicaStatus.State
    STATE_READY: ReplicaStatus.State
    STATE_DRAINING: ReplicaStatus.State
    STATE_LOST: ReplicaStatus.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ReplicaStatus.State
    node_id: str
    device: str
    sampler: str
    threads: int
    pid: int
    running_requests: int
    waiting_requests: int
    kv_blocks_used: int
    kv_blocks_total: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ReplicaStatus.State, str]] = ..., node_id: _Optional[str] = ..., device: _Optional[str] = ..., sampler: _Optional[str] = ..., threads: _Optional[int] = ..., pid: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ...) -> None: ...

class EngineTotals(_message.Message):
    __slots__ = ("rounds", "undrafted_rounds", "tokens", "drafted_per_position", "accepted_per_position", "draft_bytes", "verdict_bytes", "stale_drafts", "late_rounds", "decode_tokens", "decode_seconds", "link")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERDICT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LATE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    undrafted_rounds: int
    tokens: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    draft_bytes: int
    verdict_bytes: int
    stale_drafts: int
    late_rounds: int
    decode_tokens: int
    decode_seconds: float
    link: LinkTotals
    def __init__(self, rounds: _Optional[int] = ..., undrafted_rounds: _Optional[int] = ..., tokens: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., draft_bytes: _Optional[int] = ..., verdict_bytes: _Optional[int] = ..., stale_drafts: _Optional[int] = ..., late_rounds: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., decode_seconds: _Optional[float] = ..., link: _Optional[_Union[LinkTotals, _Mapping]] = ...) -> None: ...

class LinkTotals(_message.Message):
    __slots__ = ("lost_drafters", "abandoned_requests", "malformed_messages", "overflows")
    LOST_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OVERFLOWS_FIELD_NUMBER: _ClassVar[int]
    lost_drafters: int
    abandoned_requests: int
    malformed_messages: int
    overflows: int
    def __init__(self, lost_drafters: _Optional[int] = ..., abandoned_requests: _Optional[int] = ..., malformed_messages: _Optional[int] = ..., overflows: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("drafters", "verifiers")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    drafters: int
    verifiers: int
    def __init__(self, drafters: _Optional[int] = ..., verifiers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("drafters", "verifiers")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    drafters: int
    verifiers: int
    def __init__(self, drafters: _Optional[int] = ..., verifiers: _Optional[int] = ...) -> None: ...
