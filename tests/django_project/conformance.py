"""Django's own tests of ``django.tasks``, with the backend of the queue instead of Django's dummy."""

from typing import Any

from django.test import TestCase, override_settings
from tasks.test_tasks import TaskTestCase

from graphile_worker.contrib.django.backend import GraphileWorkerBackend


class RecordingBackend(GraphileWorkerBackend):
    """The backend, with what Django's tests read from its dummy backend."""

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.results: list[Any] = []

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        self.results.append(result)
        return result

    def clear(self) -> None:
        self.results.clear()


@override_settings(
    TASKS={
        "default": {"BACKEND": "conformance.RecordingBackend", "QUEUES": ["default", "queue_1"]},
        "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
        "missing": {"BACKEND": "does.not.exist"},
    },
    USE_TZ=True,
)
class DjangosOwnTests(TestCase, TaskTestCase):
    """Left out are tests that check for Django's own class, and that block in a coroutine."""

    test_get_backend = test_get_missing_result = test_refresh_result = test_using_correct_backend = None


del TaskTestCase  # otherwise it would run too
