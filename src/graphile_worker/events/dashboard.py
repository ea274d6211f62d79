"""Events about what people do on the dashboard."""

from __future__ import annotations

from typing import ClassVar

from graphile_worker.events.base import Event


class DashboardAction(Event, frozen=True, kw_only=True):
    """A viewer of the dashboard, or a client of its API, has changed something: for an audit log."""

    name: ClassVar[str] = "dashboard:action"
    user: str
    action: str
    """For example ``retry``, ``add``, ``cron`` or ``unlock``."""
    schema: str
    target: str
    """The filter, the ids, the task or the workers that the action applied to, as text."""
    count: int
    """How many jobs (or rows, or workers) were changed."""
