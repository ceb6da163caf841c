"""Where code runs: one protocol, its backends, and what this node allows.

``Backend.probe`` measures, ``Backend.create`` makes a :class:`Sandbox`, and every end is an :class:`Exit` of a
closed list with its evidence. Imports are lazy: the spawner process must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade._lazy import lazy

if TYPE_CHECKING:
    from stockade.sandbox._backend import BubblewrapBackend as BubblewrapBackend
    from stockade.sandbox._doctor import diagnose as diagnose
    from stockade.sandbox._files import PathRefused as PathRefused
    from stockade.sandbox._live import LiveSandbox as LiveSandbox
    from stockade.sandbox._trainer import trainer_launch as trainer_launch
    from stockade.sandbox._types import DNS_PORT as DNS_PORT
    from stockade.sandbox._types import HOME as HOME
    from stockade.sandbox._types import NO_LISTENERS as NO_LISTENERS
    from stockade.sandbox._types import PROXY_PORT as PROXY_PORT
    from stockade.sandbox._types import TRANSPARENT_PORTS as TRANSPARENT_PORTS
    from stockade.sandbox._types import TRUST as TRUST
    from stockade.sandbox._types import WORKSPACE as WORKSPACE
    from stockade.sandbox._types import Backend as Backend
    from stockade.sandbox._types import Capabilities as Capabilities
    from stockade.sandbox._types import Collected as Collected
    from stockade.sandbox._types import ExecResult as ExecResult
    from stockade.sandbox._types import Exit as Exit
    from stockade.sandbox._types import ExitKind as ExitKind
    from stockade.sandbox._types import Fault as Fault
    from stockade.sandbox._types import Listeners as Listeners
    from stockade.sandbox._types import Sandbox as Sandbox
    from stockade.sandbox._types import Skipped as Skipped
    from stockade.sandbox._types import Spec as Spec
    from stockade.sandbox._types import Usage as Usage
    from stockade.sandbox._types import fault_of as fault_of

_TYPES = (
    "DNS_PORT HOME NO_LISTENERS PROXY_PORT TRANSPARENT_PORTS TRUST WORKSPACE Backend Capabilities "
    "Collected ExecResult Exit ExitKind Fault Listeners Sandbox Skipped Spec Usage fault_of"
)
_EXPORTS = {
    "BubblewrapBackend": "stockade.sandbox._backend",
    "LiveSandbox": "stockade.sandbox._live",
    "PathRefused": "stockade.sandbox._files",
    "diagnose": "stockade.sandbox._doctor",
    "trainer_launch": "stockade.sandbox._trainer",
    **dict.fromkeys(_TYPES.split(), "stockade.sandbox._types"),
}
__all__ = sorted(_EXPORTS)  # noqa: PLE0605 - a list of str, which the checker cannot see
__getattr__ = lazy(__name__, _EXPORTS)
