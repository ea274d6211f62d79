"""A shop with Litestar and SQLAlchemy's async sessions. README.md says how to run it."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from litestar import Litestar, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.status_codes import HTTP_402_PAYMENT_REQUIRED
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from graphile_worker import App, JobContext
from graphile_worker.contrib.litestar import BoundApp, GraphileWorkerPlugin

DSN = os.environ["DATABASE_URL"]

logging.basicConfig(level=logging.INFO)
engine = create_async_engine(make_url(DSN).set(drivername="postgresql+asyncpg"))
new_session = async_sessionmaker(engine, expire_on_commit=False)
app = App(DSN)


class Base(DeclarativeBase):
    """The base of all tables."""


class Order(Base):
    """An order, and whether it has an invoice."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    email: Mapped[str]
    invoiced: Mapped[bool] = mapped_column(default=False)


@app.task
async def write_invoice(ctx: JobContext, order: int) -> None:
    """Write the invoice, add the next job, and complete this one: all three in one transaction."""
    async with new_session.begin() as session:
        stored = await session.get_one(Order, order)
        stored.invoiced = True
        await send_receipt.using(connection=session).enqueue(order=order, email=stored.email)
        await ctx.complete(connection=session)


@app.task
async def send_receipt(ctx: JobContext, order: int, email: str) -> None:
    """Send the receipt. The line in the log stands for an e-mail."""
    ctx.logger.info("Sent the receipt for order %s to %s", order, email)


@asynccontextmanager
async def open_database(_web: Litestar) -> AsyncIterator[None]:
    """Create the tables of the shop, and close the connections at the end."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


async def open_session() -> AsyncIterator[AsyncSession]:
    """Give a request its session and transaction. An exception rolls back what the request did."""
    async with new_session.begin() as session:
        yield session


@dataclass
class NewOrder:
    """An order as a customer sends it."""

    item: str
    email: str
    card: str


@post("/orders")
async def place_order(
    data: NewOrder, db_session: NamedDependency[AsyncSession], jobs: NamedDependency[BoundApp]
) -> dict[str, int]:
    """Store the order and its job. A declined card rolls back both."""
    order = Order(item=data.item, email=data.email)
    db_session.add(order)
    await db_session.flush()  # the order gets its id
    job = await jobs.using(write_invoice).enqueue(order=order.id)
    if not charge(data.card):
        raise HTTPException("The card was declined.", status_code=HTTP_402_PAYMENT_REQUIRED)
    return {"order": order.id, "job": job.id}


def charge(card: str) -> bool:
    """Return whether the card was charged. This stands for a call of the bank."""
    return card != "expired"


web = Litestar(
    [place_order],
    lifespan=[open_database],
    dependencies={"db_session": Provide(open_session)},
    plugins=[GraphileWorkerPlugin(app, session="db_session", health_path="/health")],
)
