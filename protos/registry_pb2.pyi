from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("host", "port", "leaving")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    leaving: bool
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("renew_after_ms",)
    RENEW_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    renew_after_ms: int
    def __init__(self, renew_after_ms: _Optional[int] = ...) -> None: ...
