"""A Tortoise model. Tortoise does not start without one."""

from tortoise import fields
from tortoise.models import Model


class Order(Model):
    id = fields.IntField(primary_key=True)
    customer = fields.TextField()

    class Meta:
        table = "orders"
