"""What the gate answers: an allowance or a refusal, how the connection is to be handled, and on which terms."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

import msgspec

if TYPE_CHECKING:
    from stockade.egress.gate._address import Address
    from stockade.egress.gate._reason import Reason


class Handling(StrEnum):
    """What becomes of something that was allowed.

    ``REQUEST``: this one request is forwarded. ``OPAQUE``: the tunnel carries TLS to the host that was named
    (:func:`judge_hello`), and nobody looks inside. ``RAW``: the tunnel carries any bytes (a ``tcp`` rule).
    ``INSPECT``: the tunnel ends here; TLS is terminated, or HTTP in clear is read, and each request inside is decided
    on its own.
    """

    REQUEST = "request"
    OPAQUE = "opaque"
    RAW = "raw"
    INSPECT = "inspect"


class Grant(msgspec.Struct, frozen=True):
    """The terms of the rule that allowed something.

    ``rule`` and ``wildcard`` as in :class:`Verdict`; ``pinned`` is a service's address. ``index`` is the rule's place
    in ``Rules.allow`` (-1: a service). ``ech`` is ``allow``, ``log`` or ``deny``, the default already filled in.
    ``credential`` names what is injected; ``guarded`` says that a rule of the same host pattern injects one, so that
    the client may bring none of its own (case 97). ``limited`` is the place of the rule's own limits in
    ``Rules.rule_limits`` (-1: none).
    """

    rule: str
    wildcard: bool = False
    pinned: Address | None = None
    index: int = -1
    ech: str = "log"
    websocket: bool = False
    credential: str | None = None
    strip_credentials: bool = False
    store: bool = False
    read_only: bool = False
    limited: int = -1
    guarded: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """An answer of the gate. It has no truth value: ask ``.allowed``.

    ``rule`` names the rule that decided (``allow *.x.example line 7``), if one did. ``wildcard`` says that this rule
    names its hosts by a pattern (see :func:`judge_hello`). ``pinned`` is the fixed address of a service: dial it,
    resolve nothing. ``handling`` and ``grant`` speak of what was allowed; a refusal has no grant.
    """

    allowed: bool
    reason: Reason
    rule: str | None = None
    wildcard: bool = False
    pinned: Address | None = None
    handling: Handling = Handling.REQUEST
    grant: Grant | None = None

    def __bool__(self) -> NoReturn:
        """Refuse: ``if verdict:`` would read a denial as consent."""
        raise TypeError("a Verdict has no truth value: use .allowed")
