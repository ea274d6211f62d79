"""What the project stores."""

from django.db import models


class Order(models.Model):
    """An order, and what tasks noted about it."""

    item = models.TextField()
    notes = models.JSONField(default=list)

    def __str__(self) -> str:
        return str(self.item)
