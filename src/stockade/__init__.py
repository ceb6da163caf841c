"""stockade: rollouts of model-written code in sandboxes, with one guarded way out and a record of everything.

Start with :func:`connect`. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade._lazy import lazy
from stockade._version import __version__ as __version__

if TYPE_CHECKING:
    from stockade.client import BrokerClient as BrokerClient
    from stockade.client import Episode as Episode
    from stockade.client import ExecReply as ExecReply
    from stockade.client import Run as Run
    from stockade.client import SyncRun as SyncRun
    from stockade.client import connect as connect
    from stockade.client import connect_sync as connect_sync
    from stockade.errors import AgentGone as AgentGone
    from stockade.errors import BrokerError as BrokerError
    from stockade.errors import ConfigError as ConfigError
    from stockade.errors import NodeError as NodeError
    from stockade.errors import PolicyError as PolicyError
    from stockade.errors import StockadeError as StockadeError
    from stockade.events import iter_events as iter_events
    from stockade.events import verify_run as verify_run
    from stockade.gym import Task as Task
    from stockade.gym import load_tasks as load_tasks
    from stockade.policy import Policy as Policy
    from stockade.policy import load_policy as load_policy
    from stockade.rewards import Grade as Grade
    from stockade.rewards import Grader as Grader
    from stockade.rewards import Verdict as Verdict

_HOMES = {
    "stockade.client": "BrokerClient Episode ExecReply Run SyncRun connect connect_sync",
    "stockade.errors": "AgentGone BrokerError ConfigError NodeError PolicyError StockadeError",
    "stockade.events": "iter_events verify_run",
    "stockade.gym": "Task load_tasks",
    "stockade.policy": "Policy load_policy",
    "stockade.rewards": "Grade Grader Verdict",
}
_EXPORTS = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_EXPORTS, "__version__"])  # noqa: PLE0605 - a list of str, which the checker cannot see
__getattr__ = lazy(__name__, _EXPORTS)
