"""What a request brings beside its target, against the terms of the rule that allows it (cases 82 and 97)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stockade.egress.gate._reason import Reason
from stockade.egress.gate._verdict import Verdict

if TYPE_CHECKING:
    from stockade.egress.gate._request import RequestHead
    from stockade.egress.gate._verdict import Grant

_ALLOWED = Verdict(allowed=True, reason=Reason.ALLOWED)
_NO_UPGRADE = Verdict(allowed=False, reason=Reason.UPGRADE_NOT_ALLOWED)
_FOREIGN = Verdict(allowed=False, reason=Reason.FOREIGN_CREDENTIAL)
_WEBSOCKET = b"websocket"
_IN_QUERY = re.compile(
    r"(?:^|[&;])(?:(?:x[-_])?(?:goog[-_])?api[-_]?key|(?:access|auth|private|job)[-_]token|key=AIza)", re.IGNORECASE
)


def judge_upgrade(head: RequestHead, grant: Grant) -> Verdict:
    """Say whether the request may become a WebSocket, if it asks for that (case 82; RFC 6455 section 4.1).

    Any other upgrade is not refused: it is left out of what is forwarded (case 60). Reason: upgrade_not_allowed.
    """
    if head.upgrade != _WEBSOCKET:
        return _ALLOWED
    plain = head.request.method == "GET" and head.version == 11 and not head.body
    return _ALLOWED if grant.websocket and plain else _NO_UPGRADE


def judge_credentials(head: RequestHead, grant: Grant) -> Verdict:
    """Say whether the request may bring credentials of its own (case 97). Reason: foreign_credential.

    Where a rule injects one, somebody else's would upload to somebody else's account. With ``strip_credentials`` the
    header lines are left out instead; what is in the query cannot be, so it is refused even then.
    """
    if grant.credential is None and not grant.guarded:
        return _ALLOWED
    if head.credentials and not grant.strip_credentials:
        return _FOREIGN
    query = head.request.query
    return _FOREIGN if query and _IN_QUERY.search(query) else _ALLOWED
