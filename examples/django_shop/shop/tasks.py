"""The tasks of the shop. Django imports this module at its start, because it is called tasks."""

from django.db import transaction

from graphile_worker import JobContext
from graphile_worker.contrib.django import app

from .models import Order


@app.task
def write_invoice(ctx: JobContext, order: int) -> None:
    """Write the invoice, add the next job, and complete this one: all three in one transaction."""
    with transaction.atomic():
        stored = Order.objects.get(pk=order)
        stored.invoiced = True
        stored.save()
        send_receipt.enqueue_sync(order=order, email=stored.email)
        ctx.complete_sync(connection="default")


@app.task
def send_receipt(ctx: JobContext, order: int, email: str) -> None:
    """Send the receipt. The line in the log stands for an e-mail."""
    ctx.logger.info("Sent the receipt for order %s to %s", order, email)
