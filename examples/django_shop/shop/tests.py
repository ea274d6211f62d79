"""Tests of the shop: the jobs run in the transaction of the test."""

import json

from django.test import TestCase

from graphile_worker.contrib.django.testing import GraphileWorkerMixin

from .models import Order
from .tasks import write_invoice


class OrderTests(GraphileWorkerMixin, TestCase):
    """Orders, with and without money."""

    def place(self, card: str) -> int:
        """Place an order, and return the status of the response."""
        order = {"item": "tea", "email": "ann@example.com", "card": card}
        return int(self.client.post("/orders", json.dumps(order), "application/json").status_code)

    def test_order_is_invoiced(self) -> None:
        """An order adds a job, which writes the invoice and adds another one."""
        self.assertEqual(self.place("4242"), 201)
        order = Order.objects.get()
        self.assert_enqueued(write_invoice, order=order.pk)
        self.assertEqual(self.run_jobs().succeeded, 2)
        order.refresh_from_db()
        self.assertTrue(order.invoiced)

    def test_declined_card_adds_no_job(self) -> None:
        """A declined card rolls back the order and its job."""
        self.assertEqual(self.place("expired"), 402)
        self.assert_not_enqueued(write_invoice)
