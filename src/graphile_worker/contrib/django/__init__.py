"""Django: ``INSTALLED_APPS += ["graphile_worker.contrib.django"]``.

`app` is the project's queue: tasks are declared with ``@app.task``, and their jobs are added on Django's own
connection, so ``transaction.atomic`` decides about them. `django_app` has its class, `configuration` reads
``settings.GRAPHILE_WORKER`` and ``settings.DATABASES``, and `connections` closes Django's connections around
jobs. `models`, `admin`, `checks`, ``migrations`` and ``management`` are what Django looks for in an app;
`operations` and `autoreload` serve them. `testing` runs jobs inside a test's transaction, and `backend` is a
backend of ``django.tasks``.

This module must not import models, because Django imports it before any model may be loaded.
"""

from __future__ import annotations

from graphile_worker.contrib.django.django_app import DjangoApp

__all__ = ["DjangoApp", "app"]

app = DjangoApp()
"""The queue of the project."""
