"""Every error that Octavo raises on purpose.

The tree::

    OctavoError
    |-- ConfigError (ValueError)            a setting is wrong; names the field, the value, the fix
    |-- ModelError                          the model folder cannot be used; names the file
    |   `-- HubError                        a download failed; says why and what to do
    |-- RequestError (ValueError)           a request is wrong; carries field, HTTP status and code
    |   |-- ContextLengthError              prompt (plus answer) does not fit the context
    |   |-- UnsupportedError                asks for something that does not work yet
    |   |-- GrammarError                    what the answer has to look like cannot be had
    |   |-- GrammarBusyError                other grammars came first; try again after `retry_after`
    |   |-- NotFoundError                   unknown model or resource
    |   |-- StepFailedError             the engine failed while it computed; not the request's fault
    |   |-- GivenUpError                    the engine died of the request, again and again
    |   |-- SleepError                      the engine sleeps, or cannot fall asleep or wake up
    |   |-- KVLoadError                     a KV connector could not load what it has of the prompt
    |   |-- ScalingError                    the number of engines cannot be changed so, or now
    |   |-- ProfilerError                   a profile is started twice, or stopped without a start
    |   |-- QueueFullError                  too much waiting; try again after `retry_after` seconds
    |   |-- UnmetDeadlineError              a deadline cannot be met; try again after `retry_after`
    |   `-- DeadlineError                   the request's own deadline passed
    |       `-- FirstTokenError             it passed before the first token came
    |-- EngineDeadError                     the engine process is gone; says the root cause
    |   |-- EngineStoppedError              a signal held it or one of its workers
    |   `-- NodeMissingError                its machine is not there, or not any more
    `-- BenchError                          a benchmark cannot be run; says what is missing
        `-- DatasetError (ValueError)       a data set is unusable; names file, line and field
"""

from __future__ import annotations

import re
import signal


class OctavoError(Exception):
    """Base of all of Octavo's own errors."""


class ConfigError(OctavoError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class ModelError(OctavoError):
    """A model folder is incomplete, damaged or of a kind that is not supported."""


class HubError(ModelError):
    """A model could not be fetched from the hub."""


class RequestError(OctavoError, ValueError):
    """A request cannot be served as it is; nobody else is affected.

    Args:
        message: what is wrong and how to mend it.
        param: name of the offending request field, if there is one.
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
    """The prompt, or the prompt and the answer asked for, is longer than the model's context."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class UnsupportedError(RequestError):
    """The request asks for a feature that this version does not have."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "unsupported_parameter")


class GrammarError(RequestError):
    """What the answer has to look like is invalid, too large, or more than a backend can honour.

    The message says which part of it; the server names the field that it came in.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, "structured_outputs", "invalid_grammar")


class GrammarBusyError(RequestError):
    """The grammar was not compiled in time, since others came first; try again later."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, "structured_outputs", "grammar_busy")
        self.retry_after = retry_after


class NotFoundError(RequestError):
    """The named model or resource does not exist."""

    status = 404

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code or "model_not_found")


class StepFailedError(RequestError):
    """The step that the request was part of failed; the same request may work again."""

    status = 500
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "step_failed")


class GivenUpError(RequestError):
    """The engine died again and again with the request in flight; it must not be asked again."""

    status = 500
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "given_up")


class KVLoadError(RequestError):
    """What a KV connector has of the prompt could not be loaded; asked again it may be."""

    status = 503
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "kv_load_failed")


class ScalingError(RequestError):
    """The number of engines cannot be changed so, or not now."""

    status = 409
    type = "conflict_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, "new_data_parallel_size", "scaling_failed")


class ProfilerError(RequestError):
    """A profile cannot be started, stopped or written now."""

    status = 409

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "profiler")


class SleepError(RequestError):
    """The engine cannot fall asleep or wake up, or was put to sleep before the end."""

    status = 503
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, None, "sleep")


class QueueFullError(RequestError):
    """The waiting queue is full. `retry_after` is an estimate in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, None, "queue_full")
        self.retry_after = retry_after


class DeadlineError(RequestError):
    """The request did not finish before its own deadline."""

    status = 408
    type = "timeout_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, "deadline_ms", "deadline_exceeded")


class UnmetDeadlineError(RequestError):
    """A deadline cannot be met; it might after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(
        self, message: str, param: str | None = "deadline_ms", retry_after: int = 1
    ) -> None:
        super().__init__(message, param, "deadline_unmet")
        self.retry_after = retry_after


class FirstTokenError(DeadlineError):
    """The request did not get its first token as early as it asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.param = "max_ttft_ms"


class EngineDeadError(OctavoError):
    """The engine cannot go on, or its process has ended; the message is the root cause."""


class EngineStoppedError(EngineDeadError):
    """A signal such as SIGSTOP held the engine or a worker, so it was killed; no request did it."""


class NodeMissingError(EngineDeadError):
    """The machine on which an engine is to run is not there, or not any more."""


class BenchError(OctavoError):
    """A benchmark cannot be run, or measured nothing that counts."""


class DatasetError(BenchError, ValueError):
    """A data set is missing, empty or malformed; the message names the file, line and field."""


def make_error(kind: str | None, message: str) -> OctavoError:
    """The error that another process reported.

    Args:
        kind: name of its class; what is none of Octavo's becomes a plain `OctavoError`.
        message: its text.
    """
    found = globals().get(kind or "")
    if isinstance(found, type) and issubclass(found, OctavoError):
        return found(message)
    return OctavoError(message)


def reason_of(error: BaseException) -> str:
    """What an error of the system says, without its number, for people."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def signal_name(number: int) -> str:
    """What a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have none
        return f"signal {number}"
