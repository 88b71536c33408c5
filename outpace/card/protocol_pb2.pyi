from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "tokenizer", "num_tokens", "name", "digest", "max_positions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    tokenizer: str
    num_tokens: int
    name: str
    digest: str
    max_positions: int
    def __init__(self, protocol_version: _Optional[int] = ..., tokenizer: _Optional[str] = ..., num_tokens: _Optional[int] = ..., name: _Optional[str] = ..., digest: _Optional[str] = ..., max_positions: _Optional[int] = ...) -> None: ...

class FromTarget(_message.Message):
    __slots__ = ("hello", "events", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    events: _containers.RepeatedCompositeFieldContainer[Event]
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("key", "open", "correction", "directives", "pause", "resume", "close")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    key: int
    open: Open
    correction: Correction
    directives: Directives
    pause: Pause
    resume: Resume
    close: Close
    def __init__(self, key: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., correction: _Optional[_Union[Correction, _Mapping]] = ..., directives: _Optional[_Union[Directives, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request", "next_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    request: Request
    next_id: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., next_id: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("prompt", "rule", "rule_options", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "allowed", "stop_ids", "seed", "choice", "max_tokens")
    class RuleOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    RULE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    rule: str
    rule_options: _containers.ScalarMap[str, str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    allowed: _containers.RepeatedScalarFieldContainer[int]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    choice: int
    max_tokens: int
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., rule: _Optional[str] = ..., rule_options: _Optional[_Mapping[str, str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., allowed: _Optional[_Iterable[int]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Correction(_message.Message):
    __slots__ = ("tokens", "length", "root_id")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    length: int
    root_id: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., root_id: _Optional[int] = ...) -> None: ...

class Directives(_message.Message):
    __slots__ = ("levels", "depth", "width", "outcomes", "floor", "share", "in_levels")
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    IN_LEVELS_FIELD_NUMBER: _ClassVar[int]
    levels: int
    depth: int
    width: int
    outcomes: int
    floor: float
    share: float
    in_levels: bool
    def __init__(self, levels: _Optional[int] = ..., depth: _Optional[int] = ..., width: _Optional[int] = ..., outcomes: _Optional[int] = ..., floor: _Optional[float] = ..., share: _Optional[float] = ..., in_levels: bool = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Close(_message.Message):
    __slots__ = ("finish_reason", "num_tokens", "error")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    num_tokens: int
    error: str
    def __init__(self, finish_reason: _Optional[str] = ..., num_tokens: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number", "padding", "answer_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    padding: bytes
    answer_bytes: int
    def __init__(self, number: _Optional[int] = ..., padding: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number", "padding")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    number: int
    padding: bytes
    def __init__(self, number: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class FromDrafter(_message.Message):
    __slots__ = ("hello", "levels", "seconds", "pong", "request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    levels: _containers.RepeatedCompositeFieldContainer[Level]
    seconds: float
    pong: Pong
    request: Request
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., levels: _Optional[_Iterable[_Union[Level, _Mapping]]] = ..., seconds: _Optional[float] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Level(_message.Message):
    __slots__ = ("key", "root_id", "alias", "id_steps", "parent_steps", "tokens", "roles", "log_probs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    ID_STEPS_FIELD_NUMBER: _ClassVar[int]
    PARENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    key: int
    root_id: int
    alias: int
    id_steps: _containers.RepeatedScalarFieldContainer[int]
    parent_steps: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    roles: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[int] = ..., root_id: _Optional[int] = ..., alias: _Optional[int] = ..., id_steps: _Optional[_Iterable[int]] = ..., parent_steps: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., roles: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...
