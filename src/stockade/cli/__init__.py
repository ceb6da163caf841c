"""The front door for terminals: it parses, prints and exits, and decides nothing."""

from __future__ import annotations

from stockade.cli._main import app, main

__all__ = ["app", "main"]
