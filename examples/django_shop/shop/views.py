"""What requests do."""

import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import write_invoice


class CardDeclinedError(Exception):
    """The bank declined the card."""


@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Store the order and its job. A declined card rolls back both."""
    new = json.loads(request.body)
    try:
        with transaction.atomic():
            order = Order.objects.create(item=new["item"], email=new["email"])
            job = write_invoice.enqueue_sync(order=order.pk)
            charge(new["card"])
    except CardDeclinedError:
        return JsonResponse({"error": "The card was declined."}, status=402)
    return JsonResponse({"order": order.pk, "job": job.id}, status=201)


def charge(card: str) -> None:
    """Charge the card. This stands for a call of the bank."""
    if card == "expired":
        raise CardDeclinedError
