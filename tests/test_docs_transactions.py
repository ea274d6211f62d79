"""The examples of the page about the caller's transaction run, on each stack."""

from __future__ import annotations

import asyncio
import inspect
import re
import textwrap
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import asyncpg
import flask
import flask_sqlalchemy
import pg8000.dbapi
import psycopg
import psycopg2
import pytest
import sqlmodel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tortoise.transactions import in_transaction

from graphile_worker import App
from support import stacks
from support.pages import Page
from support.postgres import ROOT
from support.tortoise_models import Order as TortoiseOrder

PAGE = ROOT / "docs" / "guides" / "transactions.md"
TABS: dict[str, str] = {
    name: textwrap.dedent(code)
    for name, code in re.findall(r'=== "(.+?)"\n\n    ```python\n(.*?)    ```', PAGE.read_text(), re.DOTALL)
}


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class ModelOrder(sqlmodel.SQLModel, table=True):
    __tablename__ = "orders"
    id: int | None = sqlmodel.Field(default=None, primary_key=True)
    customer: str


@asynccontextmanager
async def sqlalchemy_async(dsn: str) -> AsyncIterator[dict[str, Any]]:
    engine = stacks.async_engine(dsn)
    yield {"engine": engine, "AsyncSession": AsyncSession, "Order": Order}
    await engine.dispose()


@asynccontextmanager
async def sqlalchemy(dsn: str) -> AsyncIterator[dict[str, Any]]:
    engine = stacks.sync_engine(dsn)
    yield {"engine": engine, "Session": Session, "Order": Order}
    engine.dispose()


@asynccontextmanager
async def sqlmodel_(dsn: str) -> AsyncIterator[dict[str, Any]]:
    engine = stacks.sync_engine(dsn)
    yield {"engine": engine, "Session": sqlmodel.Session, "Order": ModelOrder}
    engine.dispose()


@asynccontextmanager
async def flask_sqlalchemy_(dsn: str) -> AsyncIterator[dict[str, Any]]:
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"creator": lambda: psycopg.connect(dsn)}
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        yield {"db": db, "Order": Order}
        db.session.remove()
        db.engine.dispose()


@cache
def django_order(models: Any) -> Any:
    """Return the model. Django warns if it is declared twice in one process."""

    class DjangoOrder(models.Model):  # type: ignore[misc]
        customer = models.TextField()

        class Meta:
            app_label = "shop"
            db_table = "orders"

    return DjangoOrder


@asynccontextmanager
async def django(dsn: str) -> AsyncIterator[dict[str, Any]]:
    db = stacks.configure_django(dsn)
    yield {"transaction": db.transaction, "Order": django_order(db.models), "django_db": db}


@asynccontextmanager
async def asyncpg_(dsn: str) -> AsyncIterator[dict[str, Any]]:
    async with asyncpg.create_pool(dsn, min_size=1) as pool:
        yield {"pool": pool}


@asynccontextmanager
async def tortoise(dsn: str) -> AsyncIterator[dict[str, Any]]:
    async with stacks.tortoise_connected(dsn):
        yield {"in_transaction": in_transaction, "Order": TortoiseOrder}


@asynccontextmanager
async def driver(dsn: str) -> AsyncIterator[dict[str, Any]]:
    given = {"dsn": dsn, "settings": stacks.pg8000_arguments(dsn)}
    yield {**given, "psycopg": psycopg, "psycopg2": psycopg2, "pg8000": pg8000}


STACKS: dict[str, Callable[[str], Any]] = {
    "SQLAlchemy async": sqlalchemy_async,
    "SQLAlchemy": sqlalchemy,
    "Django": django,
    "Flask-SQLAlchemy": flask_sqlalchemy_,
    "SQLModel": sqlmodel_,
    "psycopg async": driver,
    "psycopg": driver,
    "asyncpg": asyncpg_,
    "Tortoise": tortoise,
    "psycopg2": driver,
    "pg8000": driver,
}


def test_every_tab_of_the_page_has_a_test() -> None:
    assert list(TABS) == list(STACKS)


@pytest.mark.sample(4)
@pytest.mark.parametrize("stack", STACKS)
async def test_example_adds_a_job_with_the_order(database: str, db: asyncpg.Connection, stack: str) -> None:
    await db.execute("create table orders (id serial primary key, customer text not null)")
    page = Page("guides/transactions.md", app=App("postgresql://ann@127.0.0.1:1/none"))
    names = await page.run()
    async with STACKS[stack](database) as given:
        names |= given
        code = compile(TABS[stack], stack, "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if stack == "Django":
            await asyncio.to_thread(lambda: (eval(code, names), given["django_db"].connection.close()))
        elif inspect.iscoroutine(result := eval(code, names)):
            await result
        if stack in {"psycopg2", "pg8000"}:
            names["connection"].close()
    [order] = await db.fetch("select id from orders")
    [job] = await db.fetch("select payload::jsonb ->> 'order' as order from graphile_worker._private_jobs")
    assert job["order"] == str(order["id"])


async def test_the_other_examples_run(database: str, db: asyncpg.Connection) -> None:
    page = Page("guides/transactions.md", app=App(), dsn=database, Session=Session)
    names = await page.run()
    for _ in TABS:
        page.skip()
    names = await page.run()
    engine = stacks.sync_engine(database)
    with Session(engine) as session, session.begin():
        names["checkout"](session, 5)
    engine.dispose()
    assert await db.fetchval("select count(*) from graphile_worker.jobs") == 3
    await asyncio.to_thread(exec, page.skip(), names)
    page.assert_done()
