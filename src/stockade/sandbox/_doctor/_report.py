"""The words of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn


class Status(StrEnum):
    """How far a capability goes on this node."""

    OK = "ok"
    LIMITED = "limited"
    """There, but less than it could be, or not proven."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability. ``ask`` is one sentence for the node's operators, empty where nothing is to be asked.

    ``needed`` is true where no sandbox can be started without it.
    """

    name: str
    status: Status
    detail: str
    ask: str = ""
    needed: bool = False

    def to_json(self) -> dict[str, str | bool]:
        """The finding as plain types."""
        return {
            "name": self.name,
            "status": str(self.status),
            "detail": self.detail,
            "ask": self.ask,
            "needed": self.needed,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in a fixed order."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> NoReturn:
        """Refuse: ask :attr:`ready`."""
        raise TypeError("a Report has no truth value; ask .ready")

    def __getitem__(self, name: str) -> Finding:
        """The finding called ``name``; KeyError if there is none."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    @property
    def ready(self) -> bool:
        """Whether a sandbox can be started here: nothing that is needed is missing."""
        return not self.obstacles

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """What is needed and missing."""
        return tuple(finding for finding in self.findings if finding.needed and finding.status is Status.MISSING)

    @property
    def asks(self) -> tuple[str, ...]:
        """The sentences for the operators, most urgent first."""
        urgent = [finding.ask for finding in self.obstacles]
        others = [finding.ask for finding in self.findings]
        return tuple(dict.fromkeys(ask for ask in (*urgent, *others) if ask))

    def to_json(self) -> dict[str, object]:
        """``{"ready", "findings": [...], "asks": [...]}`` in plain types."""
        return {
            "ready": self.ready,
            "findings": [finding.to_json() for finding in self.findings],
            "asks": list(self.asks),
        }
