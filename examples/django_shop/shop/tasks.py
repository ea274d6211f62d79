"""The tasks of the shop, and the app that runs them."""

import logging
import os

from django.db import close_old_connections, transaction

from graphile_worker import App, JobContext

from .models import Order

logging.basicConfig(level=logging.INFO)
app = App(os.environ["DATABASE_URL"])


@app.task
def write_invoice(ctx: JobContext, order: int) -> None:
    """Write the invoice, add the next job, and complete this one: all three in one transaction."""
    close_old_connections()  # a thread keeps its connection, which may be lost since the last job
    with transaction.atomic():
        stored = Order.objects.get(pk=order)
        stored.invoiced = True
        stored.save()
        send_receipt.using(connection="default").enqueue_sync(order=order, email=stored.email)
        ctx.complete_sync(connection="default")


@app.task
def send_receipt(ctx: JobContext, order: int, email: str) -> None:
    """Send the receipt. The line in the log stands for an e-mail."""
    ctx.logger.info("Sent the receipt for order %s to %s", order, email)
