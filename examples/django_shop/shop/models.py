"""What the shop stores."""

from django.db import models


class Order(models.Model):
    """An order, and whether it has an invoice."""

    item = models.TextField()
    email = models.EmailField()
    invoiced = models.BooleanField(default=False)

    class Meta:
        """The name of the table."""

        db_table = "orders"

    def __str__(self) -> str:
        return f"{self.item} for {self.email}"
