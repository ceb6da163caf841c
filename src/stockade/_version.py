"""The version of this distribution, readable without importing anything of it."""

__version__ = "0.1.0"
