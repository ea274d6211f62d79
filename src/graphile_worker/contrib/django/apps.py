"""The configuration that Django reads when it loads the app."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import AppConfig, apps
from django.core.signals import setting_changed
from django.db import connections
from django.db.migrations.loader import MigrationLoader
from django.db.models.signals import post_migrate

from graphile_worker._tasks.task_reference import ImportState
from graphile_worker.contrib.django import app, configuration

_SETUP = "graphile_worker.contrib.django.setup"


class GraphileWorkerConfig(AppConfig):
    """Reads the settings, and imports the modules with tasks."""

    name = "graphile_worker.contrib.django"
    label = "graphile_worker"
    verbose_name = "Graphile Worker"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Prepare the app, when all models are loaded."""
        from graphile_worker.contrib.django import checks  # noqa: F401, PLC0415 - registers the checks

        if _SETUP not in ImportState.first:
            ImportState.first.append(_SETUP)
        app.read_settings()
        setting_changed.connect(_on_setting_changed)
        post_migrate.connect(_install_without_migrations, sender=self)
        discover_tasks()


def _install_without_migrations(*, using: str, **_: Any) -> None:
    """Install the schema in a test database that is made without migrations."""
    from graphile_worker.contrib.django.operations import install, is_queue  # noqa: PLC0415 - needs models

    module, _explicit = MigrationLoader.migrations_module(GraphileWorkerConfig.label)
    if module is None and is_queue(connections[using]):
        install(connections[using])


def discover_tasks() -> None:
    """Import the module ``tasks`` of each installed app, and add the tasks that belong to no app yet."""
    names = configuration.read_setting("TASK_MODULES", configuration.DEFAULT_TASK_MODULES)
    for config in apps.get_app_configs():
        for name in names:
            path = f"{config.name}.{name}"
            # An error inside the module is raised: it must not be taken for a module that does not exist.
            if find_spec(path) is not None:
                app.include_tasks(import_module(path))


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    """Read the settings again, when a test changes them."""
    if setting == configuration.SETTING:
        app.read_settings()
