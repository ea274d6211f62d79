"""`Operations`: what pages and the API change. Each method checks the viewer's permission itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.web.auth import Access
    from graphile_worker.web.filters import Filter
    from graphile_worker.web.models import ActionPreview, ActionResult, JobRow, Operation


class Operations:
    """Changes one queue. Each change checks the permission, and emits an audit event.

    `selected` is a `Filter`, or ids as text. An action on at most 1,000 jobs is done when the method returns.
    Otherwise it goes on in the background, and the result names the `Operation`.

    Raises:
        ForbiddenError: The viewer may not do this, or the dashboard is read-only.
        ChangedCountError: `expected_count` is not the number of jobs that match now.
        InvalidJobError: An argument is invalid.
    """

    async def preview(self, action: str, selected: Filter | Sequence[str], access: Access) -> ActionPreview:
        """Return how many jobs the action applies to, and the first of them."""
        raise NotImplementedError

    async def act(
        self,
        action: str,
        selected: Filter | Sequence[str],
        access: Access,
        *,
        expected_count: int | None = None,
        run_at: str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
        reason: str | None = None,
    ) -> ActionResult:
        """Change jobs: ``retry``, ``run_now``, ``reschedule``, ``cancel``, ``fail``, ``complete`` or ``remove``.

        `run_at` (ISO 8601 with an offset), `priority`, `attempts` and `max_attempts` are for ``reschedule``; `reason` is for
        ``cancel`` and ``fail``.
        """
        raise NotImplementedError

    async def add(self, task: str, payload: str, access: Access, **options: Any) -> JobRow:
        """Add a job. The payload is JSON text. Options: queue_name, run_at, max_attempts, job_key, job_key_mode, priority, flags."""
        raise NotImplementedError

    async def run_cron(self, identifier: str, access: Access) -> JobRow:
        """Add the job of a recurring task now."""
        raise NotImplementedError

    async def maintain(
        self, what: str, access: Access, *, dry_run: bool = False, worker_ids: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Run ``sweep``, ``unlock`` (of `worker_ids`) or ``cleanup`` (``jobs``, ``tasks``, ``queues`` removed)."""
        raise NotImplementedError

    def list(self) -> list[Operation]:
        """Return the operations of this process, the newest first."""
        raise NotImplementedError

    def get(self, operation_id: str) -> Operation | None:
        """Return an operation; None if this process does not know it."""
        raise NotImplementedError

    def stop(self, operation_id: str, access: Access) -> Operation | None:
        """Stop an operation after its current batch."""
        raise NotImplementedError
