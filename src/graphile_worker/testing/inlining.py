"""Jobs that run where they are added."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from graphile_worker.testing.draining import LIMIT, lifespan_of, options_of, run_due
from graphile_worker.testing.places import INSIDE, Place, using

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

    It is stored, claimed, run and recorded as by `drain`, on the connection that it was added with. While it
    runs all that the app adds goes there, whoever adds it. The jobs that it adds run after it, also from
    threads of its own: then they do not wait. What is scheduled for later stays.

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
    more = False
    options = options_of(app)
    async with using(app, dsn=dsn, connection=connection, clock=clock), lifespan_of(options) as state:
        place = app.utils

        async def run(on: Connection | None) -> None:
            nonlocal more
            if turn.locked() and INSIDE.get() is None:
                # It may be a job that runs now who waits for this, by way of a thread that does not know it.
                more = True
                return
            async with turn:
                more = True
                while more:
                    more = False
                    if on is None:
                        await due(Place.over(place))
                    else:
                        async with using(app, connection=on):
                            await due(Place.over(app.utils))

        async def due(here: Place) -> None:
            await run_due(app, here, options, state, limit=limit, raise_errors=raise_errors)

        assert isinstance(place, Place)  # noqa: S101 - for the type checker
        place.on_added = run
        before = INSIDE.get()
        INSIDE.set(before or False)
        try:
            yield app
        finally:
            INSIDE.set(before)
