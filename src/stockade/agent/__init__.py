"""The node agent: the process that owns a run's sandboxes, egress and record on one node."""

from __future__ import annotations

from stockade.agent._gateway import Gateway, GatewayEnd, GatewaySpec, Listening
from stockade.agent._listener import Keys
from stockade.agent._metrics import exposition, read_metrics
from stockade.agent._node import AgentSpec, Node, run_agent
from stockade.agent._service import NodeService
from stockade.agent._site import operator_file
from stockade.agent._wayout import default_store

__all__ = [
    "AgentSpec",
    "Gateway",
    "GatewayEnd",
    "GatewaySpec",
    "Keys",
    "Listening",
    "Node",
    "NodeService",
    "default_store",
    "exposition",
    "operator_file",
    "read_metrics",
    "run_agent",
]
