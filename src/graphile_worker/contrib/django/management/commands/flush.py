"""``manage.py flush``, for all models and for the queue.

Django's own command leaves tables alone that it does not manage, so the jobs of a `TransactionTestCase` would
be there in the next test.
"""

from __future__ import annotations

from typing import Any

from django.core.management.commands.flush import Command as FlushCommand
from django.db import DEFAULT_DB_ALIAS, connections

from graphile_worker.contrib.django import app
from graphile_worker.contrib.django.emptying import empty_queue
from graphile_worker.contrib.django.operations import is_queue


class Command(FlushCommand):
    """Removes all data from the database, and all jobs from the queue if it is there."""

    def handle(self, **options: Any) -> None:
        """Remove the data, after Django has asked for a confirmation."""
        super().handle(**options)
        connection = connections[options.get("database") or DEFAULT_DB_ALIAS]
        if is_queue(connection):
            empty_queue(connection)
            app.close_sync()  # its connections would keep Django from dropping the test database
