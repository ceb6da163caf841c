"""The node agent: the process that owns a run's sandboxes, egress and record on one node."""

from __future__ import annotations

from stockade.agent._node import AgentSpec, Node, run_agent
from stockade.agent._service import NodeService

__all__ = ["AgentSpec", "Node", "NodeService", "run_agent"]
