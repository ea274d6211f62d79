"""A shop with Flask and Flask-SQLAlchemy. README.md says how to run it."""

import logging
import os
from typing import Any

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from graphile_worker import App, JobContext
from graphile_worker.contrib.flask import GraphileWorker

DSN = os.environ["DATABASE_URL"]

logging.basicConfig(level=logging.INFO)
web = Flask(__name__)
web.config["SQLALCHEMY_DATABASE_URI"] = make_url(DSN).set(drivername="postgresql+psycopg")
app = App()  # its connection string is that of db, without +psycopg
queue = GraphileWorker(app, web)


class Base(DeclarativeBase):
    """The base of all tables."""


db = SQLAlchemy(web, model_class=Base)


class Order(Base):
    """An order, and whether it has an invoice."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    email: Mapped[str]
    invoiced: Mapped[bool] = mapped_column(default=False)


@app.task
def write_invoice(ctx: JobContext, order: int) -> None:
    """Write the invoice, add the next job, and complete this one: all three in one transaction."""
    stored = db.session.get_one(Order, order)
    stored.invoiced = True
    queue.jobs.using(send_receipt).enqueue_sync(order=order, email=stored.email)
    ctx.complete_sync(connection=db.session)
    db.session.commit()


@app.task
def send_receipt(ctx: JobContext, order: int, email: str) -> None:
    """Send the receipt. The line in the log stands for an e-mail."""
    ctx.logger.info("Sent the receipt for order %s to %s", order, email)


@web.cli.command("create-tables")
def create_tables() -> None:
    """Create the tables of the shop and of the queue."""
    Base.metadata.create_all(db.engine)
    app.migrate_sync()


@web.post("/orders")
def place_order() -> tuple[dict[str, Any], int]:
    """Store the order and its job. A declined card rolls back both."""
    new = request.get_json()
    order = Order(item=new["item"], email=new["email"])
    db.session.add(order)
    db.session.flush()  # the order gets its id
    job = queue.jobs.using(write_invoice).enqueue_sync(order=order.id)
    if not charge(new["card"]):
        # Without a commit, Flask-SQLAlchemy rolls back at the end of the request.
        return {"error": "The card was declined."}, 402
    placed = {"order": order.id, "job": job.id}
    db.session.commit()
    return placed, 201


def charge(card: str) -> bool:
    """Return whether the card was charged. This stands for a call of the bank."""
    return card != "expired"
