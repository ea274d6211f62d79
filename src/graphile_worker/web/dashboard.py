"""`Dashboard`: the ASGI application."""

from __future__ import annotations
