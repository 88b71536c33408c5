"""What a request is refused with: a status, a sentence, and the two shapes in which the APIs say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError

KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FAULT = "the server met a fault of its own; its log tells more under this request's id"


class ApiError(Exception):
    """An answer with an error's status. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Whether, and when, a client should ask again."""
        if self.retry_after is not None:
            seconds = max(self.retry_after, 0.001)
            return {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(round(1000 * seconds))}
        return {"x-should-retry": "false"} if self.status in (500, 504) else {}

    def openai(self) -> dict[str, Any]:
        """As the OpenAI API says it."""
        kind = KINDS.get(self.status, KINDS[400] if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages(self, request_id: str) -> dict[str, Any]:
        """As the Messages API says it."""
        kind = MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


def of(error: BaseException, fields: Mapping[str, Any] = {}) -> ApiError:
    """An error as an answer: a UserError is the request's fault, and names one of its `fields` first; anything else is
    our own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        first = str(error).split(" ", 1)[0]
        return ApiError(400, str(error), param=first if first in fields else None, code="invalid_value")
    return ApiError(500, FAULT, code="internal_error")


def unavailable(why: str, code: str) -> ApiError:
    """The server cannot take requests now, or could not begin this one."""
    return ApiError(503, why, code=code, retry_after=1.0)
