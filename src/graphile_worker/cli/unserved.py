"""Warnings of ``graphile-worker dev`` about due jobs whose task no worker has."""

from __future__ import annotations

import asyncio
import difflib
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._base.text import join_truncated, pluralize
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Collection

    from graphile_worker.client import WorkerUtils

_INTERVAL = 2.0
_PAUSE_FACTOR = 50
"""The pause is at least this many times as long as the query, which scans all jobs."""


async def warn_of_unserved(utils: WorkerUtils, tasks: Collection[str]) -> None:
    """Warn once for each task that has due jobs but no Python worker, until cancelled.

    Args:
        utils: The worker's utils, which share its connections.
        tasks: The tasks of this worker.
    """
    warned: set[str] = set()
    while True:
        started = monotonic()
        try:
            await _warn(utils, tasks, warned)
        except GraphileWorkerError as error:  # the worker itself reports outages
            logger.debug("Could not count jobs without a worker: %s", error)
        await asyncio.sleep(max(_INTERVAL, _PAUSE_FACTOR * (monotonic() - started)))


async def _warn(utils: WorkerUtils, tasks: Collection[str], warned: set[str]) -> None:
    counts = (await utils.stats()).tasks
    waiting = {name: task.ready for name, task in counts.items() if task.ready and name not in tasks}
    if not waiting.keys() - warned:
        return
    workers = await utils.workers(include_locks=False)
    served = {task for worker in workers if worker.is_ours and worker.is_alive for task in worker.tasks or ()}
    for name in sorted(waiting.keys() - warned - served):
        warned.add(name)
        near = difflib.get_close_matches(name, {*tasks, *served}, n=1)
        hint = (
            f"Did you mean {near[0]!r}?" if near else f"This worker's tasks: {join_truncated(sorted(tasks))}."
        )
        jobs = pluralize(waiting[name], "job is", "jobs are")
        logger.warning("%s waiting for the task %r, which no Python worker has. %s", jobs, name, hint)
