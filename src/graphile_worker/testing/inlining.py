"""Jobs that run where they are added."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from graphile_worker.testing.draining import LIMIT, lifespan_of, options_of, run_due
from graphile_worker.testing.places import Place, using

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connect import Connection
    from graphile_worker.app import App
    from graphile_worker.testing.clocks import Clock


@asynccontextmanager
async def inline(
    app: App,
    *,
    dsn: str | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
    limit: int | None = LIMIT,
    raise_errors: bool = True,
) -> AsyncIterator[App]:
    """For a while, whoever adds a job waits until it has run.

    It is stored, claimed, run and recorded as by `drain`, on the connection that it was added with. The jobs
    that it adds run after it. What is scheduled for later stays.

    Args:
        app: The app.
        dsn: Another database.
        connection: A connection of asyncpg's: see `using`.
        clock: What time it is.
        limit: How many jobs may run for one that is added.
        raise_errors: Whether what a task raises is raised where its job was added, once it is recorded.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import inline
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def test():
        ...     await app.migrate()
        ...     async with inline(app):
        ...         await hello.enqueue(name="Ann")
        >>> asyncio.run(test())
        Hello, Ann
    """
    turn = asyncio.Lock()
    options = options_of(app)
    async with using(app, dsn=dsn, connection=connection, clock=clock), lifespan_of(options) as state:
        place = app.utils

        async def run(on: Connection | None) -> None:
            async with turn:
                if on is None:
                    here = Place.over(place)
                    await run_due(app, here, options, state, limit=limit, raise_errors=raise_errors)
                else:
                    async with using(app, connection=on):
                        here = Place.over(app.utils)
                        await run_due(app, here, options, state, limit=limit, raise_errors=raise_errors)

        assert isinstance(place, Place)  # noqa: S101 - for the type checker
        place.on_added = run
        yield app
