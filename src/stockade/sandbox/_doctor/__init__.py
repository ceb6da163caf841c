"""What this node allows, tried out rather than looked up: the probes behind ``stockade doctor``."""

from __future__ import annotations

from stockade.sandbox._doctor._diagnose import diagnose
from stockade.sandbox._doctor._report import Finding, Report, Status

__all__ = ["Finding", "Report", "Status", "diagnose"]
