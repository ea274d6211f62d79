"""Log records that say what they are about."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    AnyLogger: TypeAlias = logging.Logger | logging.LoggerAdapter[Any]


class ScopedLogger(logging.LoggerAdapter[Any]):
    """A logger whose records carry a scope as attributes.

    The library's own are label, worker_id, task_identifier and job_id.

    >>> import logging
    >>> log = ScopedLogger(logging.getLogger("shop"), {"label": "job"}).scope(order=7)
    >>> dict(log.extra)
    {'label': 'job', 'order': 7}
    """

    def __init__(self, logger: AnyLogger, extra: Mapping[str, object]) -> None:
        super().__init__(logger, extra)
        self.extra: Mapping[str, object] = extra

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Add the scope to what the call itself says."""
        kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def scope(self, **extra: object) -> ScopedLogger:
        """The same logger with more to say in each record."""
        return ScopedLogger(self.logger, {**self.extra, **extra})
