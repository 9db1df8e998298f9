"""Errors that Octavo raises on purpose.

The tree::

    OctavoError
    |-- ConfigError (ValueError)            a setting is wrong; names the field, the value, the fix
    |-- ModelError                          the model folder cannot be used; names the file
    |   `-- HubError                        a download failed; names the reason and the fix
    |       |-- UnknownRepoError            the hub does not have the model
    |       `-- DownloadError               the hub cannot be reached, or fails; try again later
    |-- RequestError (ValueError)           a request is wrong; carries field, HTTP status and code
    |   |-- ContextLengthError              prompt (plus answer) does not fit the context
    |   |-- UnsupportedError                the request uses an unsupported feature
    |   |-- GrammarError                    the grammar is invalid, too large or unsupported
    |   |-- GrammarBusyError                other grammars had precedence; try again after
    |   |                                   `retry_after` seconds
    |   |-- NotFoundError                   unknown model or resource
    |   |-- AdapterError                    the adapter cannot be used; names the file, the tensor
    |   |                                   or the field, and the fix
    |   |   |-- UnknownAdapterError         the hub does not have the adapter
    |   |   `-- AdapterDownloadError        the hub cannot be reached, or fails; try again later
    |   |-- StepFailedError                 the engine failed in a step; not the request's fault
    |   |-- GivenUpError                    the engine died repeatedly during the request
    |   |-- SleepError                      the engine sleeps, or cannot fall asleep or wake up
    |   |-- KVLoadError                     a KV connector could not load its part of the prompt
    |   |-- ScalingError                    this number of engines is impossible, or not now
    |   |   `-- ScalingBusyError            the number is being changed already
    |   |-- ProfilerError                   a profile is started twice, or stopped without a start
    |   |-- QueueFullError                  too many requests wait; try again after `retry_after`
    |   |-- UnmetDeadlineError              a deadline cannot be met; try again after `retry_after`
    |   `-- DeadlineError                   the deadline of the request has passed
    |       `-- FirstTokenError             it passed before the first token
    |-- EngineDeadError                     the engine process has ended; names the root cause
    |   |-- EngineStoppedError              a signal held the engine or one of its workers
    |   `-- NodeMissingError                the machine of an engine is missing
    |-- StepLostError                       a step was cut off, and the engine computes it again
    `-- BenchError                          a benchmark cannot be run; names the missing part
        `-- DatasetError (ValueError)       a data set is unusable; names file, line and field
"""

from __future__ import annotations

import re
import signal


class OctavoError(Exception):
    """Base of Octavo's errors."""


class ConfigError(OctavoError, ValueError):
    """Setting that is unknown, out of range, or contradicts another one."""


class ModelError(OctavoError):
    """Model folder that is incomplete, damaged or of an unsupported kind."""


class HubError(ModelError):
    """Failed download of a model from the hub."""


class UnknownRepoError(HubError):
    """Name that the hub does not have, or does not show to this user."""


class DownloadError(HubError):
    """Download that may succeed later: the hub could not be reached, or failed."""


class RequestError(OctavoError, ValueError):
    """Request that cannot be served as it is; other requests are not affected.

    Args:
        message: the problem and the fix.
        param: name of the offending request field, if any.
        code: OpenAI-style machine-readable code.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt, or prompt and requested answer, longer than the model's context."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class UnsupportedError(RequestError):
    """Request for a feature that this version does not have."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "unsupported_parameter")


class GrammarError(RequestError):
    """Grammar that is invalid, too large, or not supported by a backend.

    The message names the part; the server names the field of the request.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, "structured_outputs", "invalid_grammar")


GRAMMAR_PACKAGES = {
    "llguidance": "pip install llguidance",
    "xgrammar": "pip install 'octavo[xgrammar]'",
}
"""Packages of the grammar backends, in order of preference, with the command that installs each."""


class GrammarBusyError(RequestError):
    """Grammar that was not compiled in time, since others had precedence; try again later."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, "structured_outputs", "grammar_busy")
        self.retry_after = retry_after


class NotFoundError(RequestError):
    """Model or resource that does not exist."""

    status = 404

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code or "model_not_found")


class AdapterError(RequestError):
    """Adapter that is damaged, of another model, or of an unsupported kind."""

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "invalid_adapter")


class UnknownAdapterError(AdapterError):
    """Hub id of an adapter that the hub does not have, or does not show to this user."""

    status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = "model_not_found"


class AdapterDownloadError(AdapterError):
    """Adapter whose download failed and may succeed later, after `retry_after` seconds."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.code = "unavailable"
        self.retry_after = retry_after


class StepLostError(OctavoError):
    """Error of a step that another engine's death cut off, and that can be scheduled again."""


class StepFailedError(RequestError):
    """Failed step of the request; the same request may work again."""

    status = 500
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "step_failed")


class GivenUpError(RequestError):
    """Request during which the engine died repeatedly; the client must not send it again."""

    status = 500
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "given_up")


class KVLoadError(RequestError):
    """KV data of the prompt that a connector could not load; a retry may succeed."""

    status = 503
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "kv_load_failed")


class ScalingError(RequestError):
    """Change of the number of engines that is impossible, or impossible now."""

    status = 409
    type = "conflict_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, "new_data_parallel_size", "scaling_failed")


class ScalingBusyError(ScalingError):
    """Change of the number of engines during another one; vLLM answers 503, too."""

    status = 503
    type = "server_error"
    retry_after = 5

    def __init__(
        self, message: str = "The number of engines is being changed already; try again later."
    ) -> None:
        super().__init__(message)


class ProfilerError(RequestError):
    """Profile that cannot be started, stopped or written now."""

    status = 409

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "profiler")


class SleepError(RequestError):
    """Engine that cannot fall asleep or wake up, or that fell asleep before the answer's end."""

    status = 503
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "sleep")


class QueueFullError(RequestError):
    """Full waiting queue. `retry_after` is an estimate in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, None, "queue_full")
        self.retry_after = retry_after


class DeadlineError(RequestError):
    """Request that did not finish before its deadline."""

    status = 408
    type = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, "deadline_ms", "deadline_exceeded")


class UnmetDeadlineError(RequestError):
    """Deadline that cannot be met; it may be possible after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(
        self, message: str, param: str | None = "deadline_ms", retry_after: int = 1
    ) -> None:
        super().__init__(message, param, "deadline_unmet")
        self.retry_after = retry_after


class FirstTokenError(DeadlineError):
    """Request without a first token by its deadline for that token."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.param = "max_ttft_ms"


class EngineDeadError(OctavoError):
    """Engine that cannot continue, or whose process has ended; the message is the root cause."""


class EngineStoppedError(EngineDeadError):
    """Engine killed because a signal such as SIGSTOP held it or a worker; no request caused it."""


class NodeMissingError(EngineDeadError):
    """Missing machine of an engine."""


class BenchError(OctavoError):
    """Benchmark that cannot be run, or measured nothing valid."""


class DatasetError(BenchError, ValueError):
    """Data set that is missing, empty or malformed; the message names the file, line and field."""


def make_error(kind: str | None, message: str) -> OctavoError:
    """Return the error that another process reported.

    Args:
        kind: name of its class; unknown names become a plain `OctavoError`.
        message: its text.
    """
    found = globals().get(kind or "")
    if isinstance(found, type) and issubclass(found, OctavoError):
        return found(message)
    return OctavoError(message)


def reason_of(error: BaseException) -> str:
    """Return the text of a system error, without its number."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
