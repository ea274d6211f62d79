"""Django's tasks: the backend keeps the promises of its flags."""

import io
from datetime import timedelta
from typing import Any

import django
from django.core.management import call_command
from django.db import transaction
from django.test import TestCase, override_settings
from django.utils import timezone

from graphile_worker import JobSpec
from graphile_worker.contrib.django import app
from graphile_worker.contrib.django.backend import GraphileWorkerTask, identifier_of
from graphile_worker.contrib.django.models import Job
from graphile_worker.contrib.django.testing import arun_jobs, run_jobs
from graphile_worker.errors import ConfigurationError
from graphile_worker.testing import Clock
from shop import tasks
from shop.models import Order

if django.VERSION >= (6,):
    from django.tasks import TaskResultStatus, task_backends
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    from django_tasks import TaskResultStatus, task_backends
    from django_tasks.exceptions import (
        InvalidTaskError as InvalidTask,
        TaskResultDoesNotExist,
        TaskResultMismatch,
    )
    from django_tasks.signals import task_enqueued, task_finished, task_started

BACKEND = "graphile_worker.contrib.django.backend.GraphileWorkerBackend"


class DjangoTasks(TestCase):
    def test_flags_say_what_the_backend_supports(self) -> None:
        backend = task_backends["default"]
        flags = ("supports_defer", "supports_async_task", "supports_get_result", "supports_priority")
        self.assertEqual([getattr(backend, flag) for flag in flags], [True] * 4)

    def test_result_goes_from_ready_to_successful_with_the_value(self) -> None:
        result = tasks.add.enqueue(1, right=2)
        self.assertEqual((result.status, result.is_finished), (TaskResultStatus.READY, False))
        self.assertEqual((result.args, result.kwargs), ([1], {"right": 2}))
        result.refresh()
        self.assertEqual(
            (result.status, result.enqueued_at), (TaskResultStatus.READY, Job.objects.get().created_at)
        )
        run_jobs()
        result.refresh()
        self.assertEqual(
            (result.status, result.return_value, result.attempts), (TaskResultStatus.SUCCESSFUL, 3, 1)
        )
        self.assertIsNotNone(result.started_at)
        self.assertIsNotNone(result.finished_at)
        self.assertEqual(tasks.add.get_result(result.id).return_value, 3)
        with self.assertRaises(TaskResultMismatch):
            tasks.add_async.get_result(result.id)

    async def test_async_task_is_added_and_read_in_async_code(self) -> None:
        result = await tasks.add_async.aenqueue(3, 4)
        self.assertEqual((await arun_jobs()).succeeded, 1)
        await result.arefresh()
        self.assertEqual(result.return_value, 7)

    def test_failed_task_has_its_errors_and_is_retried_by_its_policy(self) -> None:
        result = tasks.break_.enqueue("text")
        clock = Clock()
        run_jobs(clock=clock, raise_errors=False)
        result.refresh()
        self.assertEqual((result.status, len(result.errors)), (TaskResultStatus.READY, 1))
        clock.move(seconds=1)
        run_jobs(clock=clock, raise_errors=False)
        result.refresh()
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.FAILED, 2))
        self.assertIs(result.errors[-1].exception_class, LookupError)
        self.assertIn("LookupError: text", result.errors[-1].traceback)
        self.assertIsNotNone(result.finished_at)
        with self.assertRaisesMessage(ValueError, "Task failed"):
            _ = result.return_value

    def test_running_task_has_that_status(self) -> None:
        result = tasks.describe.enqueue("now")
        run_jobs()
        result.refresh()
        self.assertEqual(result.return_value, [1, "RUNNING", "now"])

    def test_priority_and_time_are_those_of_django(self) -> None:
        later = timezone.now() + timedelta(hours=1)
        for priority in (-100, 0, 100):
            tasks.add.using(priority=priority, run_after=later).enqueue(1, 1)
        self.assertEqual(list(Job.objects.order_by("pk").values_list("priority", flat=True)), [100, 0, -100])
        self.assertEqual({job.run_at for job in Job.objects.all()}, {later})

    def test_key_serial_queue_attempts_and_timeout_are_options_of_a_task(self) -> None:
        for order in (1, 1, 2):
            tasks.keyed.enqueue(order)
        self.assertEqual(
            list(Job.objects.order_by("pk").values_list("key", flat=True)), ["order:1", "order:2"]
        )
        job = Job.objects.first()
        self.assertEqual((job.job_queue.queue_name, job.flags), ("orders", {"timeout:30": True}))
        tasks.keyed.using(max_attempts=3, serial="other", job_key=None, priority=5).enqueue(3)
        job = Job.objects.get(max_attempts=3)
        self.assertEqual((job.key, job.priority, job.job_queue.queue_name), (None, -5, "other"))
        self.assertIsInstance(tasks.keyed, GraphileWorkerTask)

    def test_rolled_back_task_is_not_added(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            tasks.add.enqueue(1, 2)
            raise ZeroDivisionError
        self.assertEqual(Job.objects.count(), 0)

    def test_signals_are_sent_when_a_task_is_added_starts_and_ends(self) -> None:
        seen: list[tuple[str, str]] = []

        def remember(name: str) -> Any:
            return lambda task_result, **_: seen.append((name, task_result.status))

        receivers = {
            signal: remember(name)
            for name, signal in (
                ("enqueued", task_enqueued),
                ("started", task_started),
                ("finished", task_finished),
            )
        }
        for signal, receiver in receivers.items():
            signal.connect(receiver)
            self.addCleanup(signal.disconnect, receiver)
        tasks.add.enqueue(1, 2)
        tasks.add_async.enqueue(1, 2)
        run_jobs()
        once = [("started", "RUNNING"), ("finished", "SUCCESSFUL")]
        self.assertEqual(seen, [("enqueued", "READY")] * 2 + once * 2)
        del seen[:]
        tasks.break_.using(max_attempts=2).enqueue("no")
        clock = Clock()
        run_jobs(clock=clock, raise_errors=False)
        clock.move(seconds=1)
        run_jobs(clock=clock, raise_errors=False)
        started = ("started", "RUNNING")
        self.assertEqual(seen, [("enqueued", "READY"), started, started, ("finished", "FAILED")])

    def test_unknown_results_do_not_exist(self) -> None:
        other = app.add_job_sync("elsewhere")
        for result_id in ("0", "x", "9" * 30, str(other.id)):
            with self.assertRaises(TaskResultDoesNotExist):
                task_backends["default"].get_result(result_id)

    def test_arguments_that_are_not_json_are_refused(self) -> None:
        with self.assertRaises(TypeError):
            tasks.add.enqueue(object(), 1)
        with self.assertRaises(InvalidTask):
            tasks.keyed.using(max_attempts=0).enqueue(1)
        self.assertEqual(Job.objects.count(), 0)

    def test_jobs_from_elsewhere_run_with_their_arguments(self) -> None:
        order = Order.objects.create(item="tea")
        name = identifier_of(tasks.keyed)
        self.assertEqual(name, "shop/tasks/keyed")
        app.add_jobs_sync(
            [JobSpec(name, {"kwargs": {"order": order.pk}}), JobSpec(name, {"args": [order.pk]})]
        )
        self.assertEqual(run_jobs().succeeded, 2)
        order.refresh_from_db()
        self.assertEqual(order.notes, ["keyed", "keyed"])

    def test_results_are_not_supported_without_history(self) -> None:
        no_results = {"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"results": False}}}
        with override_settings(TASKS=no_results):
            self.assertFalse(task_backends["default"].supports_get_result)
            with self.assertRaises(NotImplementedError):
                task_backends["default"].get_result("1")

    def test_unknown_option_is_named(self) -> None:
        with (
            override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"databse": "x"}}}),
            self.assertRaisesMessage(ConfigurationError, "has no databse"),
        ):
            task_backends["default"].check()

    def test_backend_passes_djangos_checks(self) -> None:
        call_command("check", stderr=io.StringIO(), fail_level="WARNING")
