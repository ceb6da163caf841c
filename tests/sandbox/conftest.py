"""Real sandboxes for tests of the backend."""

from __future__ import annotations

from tests.sandboxes import owner, sandbox

__all__ = ["owner", "sandbox"]
