"""One PostgreSQL server, a database for each schema, and the drivers that use them."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from benchmarks.contenders import driver_command
from benchmarks.driver import DriverBrokenError, DriverProcess, RequestRejectedError
from benchmarks.server import UsageMeter, environment
from graphile_worker._db.schema.databases import create_database, drop_database, dsn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.contenders import Contender

_LIMIT = 60.0
_STOP_TIMEOUT = 30.0


class Workbench:
    """The server, databases and drivers of a run. Databases and drivers are created on first use.

    Args:
        dsn: The connection string of the server.
        meter: Reads the server's resource usage.
        limit: The longest duration of one measurement, in seconds.
    """

    def __init__(self, dsn: str, meter: UsageMeter, *, limit: float = _LIMIT) -> None:
        self.meter = meter
        self.limit = limit
        self.best: dict[tuple[str, str], float] = {}
        """The best rate so far, by case and contender. Later cases may depend on it."""
        self.remarks: list[str] = []
        self._dsn = dsn
        self._prefix = f"benchmark_{secrets.token_hex(4)}"
        self._databases: set[str] = set()
        self._drivers: dict[tuple[str, int], DriverProcess] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str, *, limit: float = _LIMIT) -> AsyncIterator[Workbench]:
        """Open a workbench on a server, and remove it completely at the end."""
        meter = await UsageMeter.connect(dsn)
        workbench = cls(dsn, meter, limit=limit)
        try:
            yield workbench
        finally:
            await workbench.close()
            await meter.close()

    @asynccontextmanager
    async def another(self) -> AsyncIterator[Workbench]:
        """Open another workbench on the same server, with its own databases."""
        async with Workbench.open(self._dsn, limit=self.limit) as workbench:
            yield workbench

    async def close(self) -> None:
        """End the drivers and drop the databases."""
        for driver in self._drivers.values():
            await driver.close()
        connection = await asyncpg.connect(self._dsn)
        for database in self._databases:
            await drop_database(connection, database)
        await connection.close()

    def database(self, contender: Contender) -> str:
        """Return the name of the contender's database."""
        return f"{self._prefix}_{contender.database}"

    def dsn(self, contender: Contender) -> str:
        """Return the connection string of the contender's database."""
        return dsn_of(self._dsn, self.database(contender))

    async def feeder(self, contender: Contender) -> DriverProcess:
        """Return the driver that fills the contender's queue."""
        database = self.database(contender)
        if database in self._databases:
            return await self._driver(contender.feeder, 0, database)
        driver_command(contender.feeder)  # raises before a database is created
        connection = await asyncpg.connect(self._dsn)
        await create_database(connection, database)
        await connection.close()
        self._databases.add(database)
        driver = await self._driver(contender.feeder, 0, database)
        await driver.request("install")
        return driver

    async def driver(self, contender: Contender, number: int = 0) -> DriverProcess:
        """Return a driver of the contender, the same one for the same number."""
        await self.feeder(contender)
        return await self._driver(contender.program, number, self.database(contender))

    async def drivers(self, contender: Contender, count: int) -> list[DriverProcess]:
        """Return several drivers of the contender."""
        return [await self.driver(contender, number) for number in range(count)]

    async def _driver(self, program: str, number: int, database: str) -> DriverProcess:
        key = program, number
        driver = self._drivers.get(key)
        if driver is not None and not driver.alive:
            await driver.kill()  # it may have exited by itself
            driver = None
        if driver is None:
            variables = environment(dsn_of(self._dsn, database))
            driver = await DriverProcess.start(program, driver_command(program), variables)
            self._drivers[key] = driver
        return driver

    async def fill(self, contender: Contender, **jobs: Any) -> None:
        """Replace the jobs in the contender's queue with these, and analyse all tables."""
        driver = await self.feeder(contender)
        await driver.request("clear")
        if jobs.get("count"):
            await driver.request("enqueue", limit=self.limit, **jobs)
        connection = await asyncpg.connect(self.dsn(contender))
        await connection.execute("analyze")
        await connection.close()

    async def stop(self, drivers: list[DriverProcess]) -> None:
        """Stop the workers of the drivers. Kill a driver that cannot; the next use starts it again."""
        for driver in drivers:
            if not driver.alive:
                continue
            try:
                await driver.request("stop", limit=_STOP_TIMEOUT)
            except DriverBrokenError as broken:
                self.remarks.append(f"{broken}.")
            except RequestRejectedError as refused:
                self.remarks.append(f"{driver.name} did not stop: {refused}.")
                await driver.kill()
