"""Warnings in ``graphile-worker dev`` about jobs that wait for a task no worker has."""

from __future__ import annotations

import asyncio
import difflib
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker.errors import GraphileWorkerError
from graphile_worker.logs import library_logger as logger
from graphile_worker.wording import counted, some

if TYPE_CHECKING:
    from collections.abc import Collection

    from graphile_worker.client import WorkerUtils

_INTERVAL = 2.0
_SHARE = 50
"""Counting the jobs takes at most this fraction of the time: a pass over a large table is not free."""


async def warn_of_unserved(utils: WorkerUtils, tasks: Collection[str]) -> None:
    """Warn, once for each task, of jobs that are due and that no Python worker runs. Runs until cancelled.

    Args:
        utils: The worker's, on its connections.
        tasks: The tasks of this worker.
    """
    warned: set[str] = set()
    while True:
        began = monotonic()
        try:
            await _warn(utils, tasks, warned)
        except GraphileWorkerError as error:  # the worker itself reports that the database is away
            logger.debug("Jobs without a worker could not be counted: %s", error)
        await asyncio.sleep(max(_INTERVAL, _SHARE * (monotonic() - began)))


async def _warn(utils: WorkerUtils, tasks: Collection[str], warned: set[str]) -> None:
    counts = (await utils.stats()).tasks
    waiting = {name: one.ready for name, one in counts.items() if one.ready and name not in tasks}
    if not waiting.keys() - warned:
        return
    workers = await utils.workers(and_locks=False)
    served = {task for worker in workers if worker.is_ours and worker.lives for task in worker.tasks or ()}
    for name in sorted(waiting.keys() - warned - served):
        warned.add(name)
        near = difflib.get_close_matches(name, {*tasks, *served}, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"This one has: {some(sorted(tasks))}."
        jobs = counted(waiting[name], "job waits", "jobs wait")
        logger.warning("%s for the task %r, which no Python worker has. %s", jobs, name, hint)
