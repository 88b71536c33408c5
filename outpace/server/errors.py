"""Errors of the HTTP APIs: a status, a sentence, and the bodies in which the OpenAI and Messages APIs report them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from outpace.core.errors import UserError

OPENAI_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
INTERNAL_ERROR = "internal error of the server; its log has details under this request's id"


class ApiError(Exception):
    """An error with an HTTP status. `param` names the wrong field of the request, `retry_after` is in seconds."""

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
        """The headers by which official clients decide whether and when to retry."""
        if self.retry_after is not None:
            seconds = max(self.retry_after, 0.001)
            return {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(round(1000 * seconds))}
        return {"x-should-retry": "false"} if self.status in (500, 504) else {}

    def openai(self) -> dict[str, Any]:
        kind = OPENAI_TYPES.get(self.status, OPENAI_TYPES[400] if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages(self, request_id: str) -> dict[str, Any]:
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


class PromptTooLong(ApiError):
    """A prompt fills the context. Clients recognize the message by the wording of their API and shorten the prompt."""

    def __init__(self, num_tokens: int, most: int) -> None:
        message = f"the prompt has {num_tokens} tokens, this model's maximum context length is {most} with the answer"
        super().__init__(400, message, param="prompt", code="context_length_exceeded")
        self._messages_wording = f"prompt is too long: {num_tokens} tokens > {most} maximum"

    def messages(self, request_id: str) -> dict[str, Any]:
        value = super().messages(request_id)
        value["error"]["message"] = self._messages_wording
        return value


def to_api_error(error: BaseException, fields: Container[str] = ()) -> ApiError:
    """Convert a UserError to 400, with its first word as `param` if that is in `fields`, and others to 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        first = str(error).split(" ", 1)[0]
        return ApiError(400, str(error), param=first if first in fields else None, code="invalid_value")
    return ApiError(500, INTERNAL_ERROR, code="internal_error")


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503 error after which a client may retry in a second."""
    return ApiError(503, message, code=code, retry_after=1.0)
