"""Every error that stockade raises on purpose.

::

    StockadeError
    ├── ConfigError             a file that a person wrote is wrong (exit code 2)
    │   ├── PolicyError         … a policy
    │   ├── TaskError           … a task file
    │   └── JobError            … a training job
    ├── NodeError               this machine cannot do what was asked (exit code 2)
    ├── SandboxFault            the isolation failed, not the program inside it
    ├── RecordError             the record cannot be written or read; whoever acts must not go on
    ├── RunError                a run's directory, identity or life cycle forbids it
    ├── Stopped                 a person stopped the run
    └── BrokerError             the broker refused a request (carries its code)
        └── AgentGone           … because there is nobody to answer

The classes say *whose* fault it is. Each message stands alone on one line; ``hint`` says what to do next.
This module and :mod:`stockade.ids` are the only ones that both import trees share beside ``policy``.
"""

from __future__ import annotations

from pathlib import Path


class StockadeError(Exception):
    """Base of all errors raised on purpose; ``hint`` is one line on what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class ConfigError(StockadeError, ValueError):
    """A file is wrong; the message starts with ``file:line: key:`` as far as these are known."""

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        line: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        where = "" if path is None else str(path)
        if line is not None:
            where += f":{line}"
        prefix = ": ".join(part for part in (where, key) if part)
        super().__init__(f"{prefix}: {message}" if prefix else message, hint=hint)
        self.path = None if path is None else str(path)
        self.line = line
        self.key = key


class PolicyError(ConfigError):
    """A policy that must not be used."""


class TaskError(ConfigError):
    """A line of a task file that cannot be run."""


class JobError(ConfigError):
    """A training job that cannot be run."""


class NodeError(StockadeError, OSError):
    """This machine lacks something that the request needs; ``hint`` says what to ask the operators for."""


class SandboxFault(StockadeError, RuntimeError):
    """The isolation or its machinery failed: an infrastructure fault, never the candidate's."""


class RecordError(StockadeError, OSError):
    """The record cannot be written, or does not verify."""


class RunError(StockadeError):
    """A run's directory, identity or state does not allow the request."""


class Stopped(StockadeError):
    """The run was stopped by a person; nothing more may start in it."""


class BrokerError(StockadeError):
    """An answer of the broker other than success: ``code`` of its closed list, HTTP ``status``."""

    def __init__(self, code: str, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.status = status


class AgentGone(BrokerError, ConnectionError):
    """The node agent does not answer: it ended, or it was never started."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__("agent_gone", 0, message, hint=hint)
