"""Install the queue's schema, and tell Django about the models of its tables."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from graphile_worker.contrib.django.models import table
from graphile_worker.contrib.django.operations import InstallSchema


def _model(name: str, key: Any, db_table: str, **options: Any) -> migrations.CreateModel:
    """Return the operation for a model that Django does not manage: it compares only names and options."""
    options = {"managed": False, "default_permissions": ("view",), "db_table": table(db_table), **options}
    return migrations.CreateModel(name, [key], options)


def _key(kind: Any, name: str = "id") -> Any:
    return name, kind(primary_key=True, serialize=False)


class Migration(migrations.Migration):
    """Not atomic, because on a schema in use the indexes are built concurrently."""

    initial = True
    atomic = False

    operations = (
        InstallSchema(14),
        _model("Task", _key(models.IntegerField), "_private_tasks"),
        _model("JobQueue", _key(models.IntegerField), "_private_job_queues", verbose_name="queue"),
        _model(
            "Job",
            _key(models.BigIntegerField),
            "_private_jobs",
            default_permissions=("view", "change", "delete"),
        ),
        _model("Worker", _key(models.TextField), "_private_workers"),
        _model(
            "Crontab",
            _key(models.TextField, "identifier"),
            "_private_known_crontabs",
            verbose_name="recurring task",
        ),
        _model(
            "Attempt",
            _key(models.BigIntegerField, "job_id"),
            "_private_python_runs",
            verbose_name="attempt",
            verbose_name_plural="history",
        ),
    )
