"""One PostgreSQL server, a database for each schema, and the drivers that use them."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from benchmarks.contenders import driver_command
from benchmarks.driver import Broken, DriverProcess, Refused
from benchmarks.server import Gauge, environment
from graphile_worker._db.databases import create_database, drop_database, dsn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.contenders import Contender

_LIMIT = 60.0
_STOPPING = 30.0


class Arena:
    """Where contenders meet; databases and drivers are made when they are first needed.

    Args:
        dsn: The server's.
        gauge: What the server spends.
        limit: For how many seconds one measurement may go on.
    """

    def __init__(self, dsn: str, gauge: Gauge, *, limit: float = _LIMIT) -> None:
        self.gauge = gauge
        self.limit = limit
        self.best: dict[tuple[str, str], float] = {}
        """The best rate so far, by case and contender: what comes later may depend on it."""
        self.remarks: list[str] = []
        self._dsn = dsn
        self._prefix = f"benchmark_{secrets.token_hex(4)}"
        self._databases: set[str] = set()
        self._drivers: dict[tuple[str, int], DriverProcess] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str, *, limit: float = _LIMIT) -> AsyncIterator[Arena]:
        """An arena on that server; nothing is left of it at the end."""
        gauge = await Gauge.connect(dsn)
        arena = cls(dsn, gauge, limit=limit)
        try:
            yield arena
        finally:
            await arena.close()
            await gauge.close()

    @asynccontextmanager
    async def another(self) -> AsyncIterator[Arena]:
        """Another one on the same server, with databases of its own."""
        async with Arena.open(self._dsn, limit=self.limit) as arena:
            yield arena

    async def close(self) -> None:
        """End the drivers and drop the databases."""
        for driver in self._drivers.values():
            await driver.close()
        connection = await asyncpg.connect(self._dsn)
        for database in self._databases:
            await drop_database(connection, database)
        await connection.close()

    def database(self, contender: Contender) -> str:
        """The name of the contender's database."""
        return f"{self._prefix}_{contender.database}"

    def dsn(self, contender: Contender) -> str:
        """The connection string of the contender's database."""
        return dsn_of(self._dsn, self.database(contender))

    async def feeder(self, contender: Contender) -> DriverProcess:
        """The driver that fills the contender's queue."""
        database = self.database(contender)
        if database in self._databases:
            return await self._driver(contender.feeder, 0, database)
        driver_command(contender.feeder)  # without it, no database is needed
        connection = await asyncpg.connect(self._dsn)
        await create_database(connection, database)
        await connection.close()
        self._databases.add(database)
        driver = await self._driver(contender.feeder, 0, database)
        await driver.ask("install")
        return driver

    async def driver(self, contender: Contender, number: int = 0) -> DriverProcess:
        """A driver of the contender: the same one for the same number."""
        await self.feeder(contender)
        return await self._driver(contender.program, number, self.database(contender))

    async def drivers(self, contender: Contender, count: int) -> list[DriverProcess]:
        """So many of them."""
        return [await self.driver(contender, number) for number in range(count)]

    async def _driver(self, program: str, number: int, database: str) -> DriverProcess:
        key = program, number
        driver = self._drivers.get(key)
        if driver is not None and not driver.alive:
            await driver.kill()  # it may have ended without our doing
            driver = None
        if driver is None:
            variables = environment(dsn_of(self._dsn, database))
            driver = await DriverProcess.start(program, driver_command(program), variables)
            self._drivers[key] = driver
        return driver

    async def fill(self, contender: Contender, **jobs: Any) -> None:
        """Have these jobs in the contender's queue and no others, and all tables analysed."""
        driver = await self.feeder(contender)
        await driver.ask("clear")
        if jobs.get("count"):
            await driver.ask("enqueue", limit=self.limit, **jobs)
        connection = await asyncpg.connect(self.dsn(contender))
        await connection.execute("analyze")
        await connection.close()

    async def stop(self, drivers: list[DriverProcess]) -> None:
        """Have them stop working; one that cannot is killed, and started anew when it is needed."""
        for driver in drivers:
            if not driver.alive:
                continue
            try:
                await driver.ask("stop", limit=_STOPPING)
            except Broken as broken:
                self.remarks.append(f"{broken}.")
            except Refused as refused:
                self.remarks.append(f"{driver.name} did not stop: {refused}.")
                await driver.kill()
