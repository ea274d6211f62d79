"""What a worker loads: Django first, then the tasks."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from .tasks import app  # noqa: E402 - models need Django's settings

__all__ = ["app"]
