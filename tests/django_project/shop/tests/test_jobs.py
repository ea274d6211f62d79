"""Jobs in tests: in the test's transaction, run by the test, and gone at its end."""

import asyncio
import doctest
import io
from typing import Any

from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections, transaction
from django.test import TestCase, TransactionTestCase, override_settings

from graphile_worker import InvalidJobError, JobSpec
from graphile_worker.contrib.django import app, backend, configuration, django_app, models, testing
from graphile_worker.contrib.django.models import Attempt, Job, ReadOnlyError, Task
from graphile_worker.contrib.django.testing import GraphileWorkerMixin, arun_jobs
from graphile_worker.errors import ConfigurationError
from graphile_worker.testing import Clock
from shop import tasks
from shop.models import Order


class JobsInTransactions(GraphileWorkerMixin, TestCase):
    def test_rolled_back_block_leaves_no_job_and_a_committed_one_does(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            tasks.fail.enqueue_sync("rolled back")
            self.assertEqual(Job.objects.count(), 1)
            raise ZeroDivisionError
        self.assertEqual(Job.objects.count(), 0)
        with transaction.atomic():
            tasks.fail.using(priority=-3).enqueue_sync("kept")
        self.assertEqual(Job.objects.get().priority, -3)
        self.assert_enqueued(tasks.fail, text="kept")
        self.assert_not_enqueued(tasks.fail, text="rolled back")

    def test_many_jobs_are_added_and_one_is_cancelled_on_djangos_connection(self) -> None:
        first, _ = app.add_jobs_sync([JobSpec("fail", {"text": "a"}), JobSpec("fail", {"text": "b"})])
        tasks.fail.enqueue_many_sync({"text": text} for text in "cd")
        app.add_job_sync("elsewhere", [1, 2])
        self.assertEqual(Job.objects.count(), 5)
        app.cancel_job_sync(first.id, "not needed")
        self.assertEqual(Job.objects.get(pk=first.id).state, "failed")

    def test_refused_job_does_not_abort_the_transaction(self) -> None:
        with self.assertRaises(InvalidJobError):
            app.add_job_sync("x" * 200)
        self.assertEqual(Order.objects.count(), 0)

    def test_jobs_run_in_the_transaction_of_the_test_with_the_jobs_that_they_add(self) -> None:
        order = Order.objects.create(item="tea")
        tasks.invoice.enqueue_sync(order=order.pk)
        tasks.remind.enqueue_sync(order=order.pk)
        tasks.shared.enqueue_sync(order=order.pk)
        summary = self.run_jobs()
        self.assertEqual(summary.succeeded, 5)
        order.refresh_from_db()
        self.assertCountEqual(order.notes, ["invoiced", "reminded", "shared", "receipt", "receipt"])
        self.assertEqual(Job.objects.count(), 0)
        self.assertEqual(Attempt.objects.filter(task__identifier="receipt").count(), 2)

    def test_failure_is_raised_or_else_recorded(self) -> None:
        tasks.fail.enqueue_sync("no")
        with self.assertRaisesMessage(ValueError, "no"):
            self.run_jobs()
        job = Job.objects.get()
        self.assertEqual((job.attempts, job.last_error, job.state), (1, "no", "scheduled"))
        clock = Clock()
        clock.move(minutes=1)
        self.assertEqual(self.run_jobs(clock=clock, raise_errors=False).failed, 1)
        self.assertEqual(Job.objects.get().state, "failed")

    async def test_async_tests_add_and_run_jobs_in_their_transaction(self) -> None:
        order = await Order.objects.acreate(item="tea")
        await tasks.invoice.enqueue(order=order.pk)
        await tasks.receipt.enqueue(order=order.pk)
        self.assertEqual((await arun_jobs()).succeeded, 3)
        await order.arefresh_from_db()
        self.assertCountEqual(order.notes, ["receipt", "invoiced", "receipt"])

    def test_call_in_a_transaction_is_refused_instead_of_waiting_forever(self) -> None:
        with self.assertRaisesMessage(ConfigurationError, "would wait forever"):
            tasks.fail.call_sync("never")

    def test_models_read_any_json_and_change_nothing(self) -> None:
        for payload in ({"n": 12345678901234567890123}, "5", ["ü"], None, 0):
            job = app.add_job_sync("elsewhere", payload)
            self.assertEqual(Job.objects.get(pk=job.id).payload, {} if payload is None else payload)
        self.assertEqual(Task.objects.get().identifier, "elsewhere")
        job = Job.objects.first()
        for change in (job.save, job.delete, Job.objects.all().delete, Job.objects.create):
            self.assertRaises(ReadOnlyError, change)
        self.assertRaises(ReadOnlyError, lambda: Job.objects.update(priority=1))

    def test_states_of_models_are_those_of_the_library(self) -> None:
        tasks.fail.enqueue_sync("ready")
        tasks.fail.using(delay=60).enqueue_sync("scheduled")
        for state in ("ready", "scheduled"):
            job = Job.objects.in_state(state).get()
            self.assertEqual((job.state, job.payload), (state, {"text": state}))

    def test_migrations_are_current_and_the_schema_is_checked(self) -> None:
        call_command("makemigrations", check=True, dry_run=True, stdout=io.StringIO())
        call_command("check", databases=["default"], fail_level="WARNING", stderr=io.StringIO())
        with connection.cursor() as cursor:
            cursor.execute("alter schema graphile_worker rename to moved")
        with self.assertRaisesMessage(SystemCheckError, "graphile_worker.W001"):
            call_command("check", databases=["default"], fail_level="WARNING", stderr=io.StringIO())

    def test_mistakes_in_the_settings_are_found(self) -> None:
        for given, text in (
            ({"HISTRY": "all"}, "Did you mean HISTORY?"),
            ({"DATABASE": "nope"}, "settings.DATABASES has no 'nope'"),
            (["SCHEMA"], "it must be a dictionary"),
            ({"HISTORY": "al"}, "al"),
            ({"MIDDLEWARE": ["no.such.Middleware"]}, "no"),
        ):
            with (
                self.subTest(given),
                self.assertRaisesMessage(SystemCheckError, text),
                override_settings(GRAPHILE_WORKER=given),
            ):
                call_command("check", stderr=io.StringIO())


class Docstrings(TestCase):
    def test_examples_in_docstrings_run(self) -> None:
        for module in (backend, configuration, django_app, models, testing):
            with self.subTest(module.__name__):
                result = doctest.testmod(module)
                self.assertGreater(result.attempted, 0)
                self.assertEqual(result.failed, 0)
                for name in getattr(module, "__all__", ()):
                    self.assertTrue(getattr(module, name).__doc__, name)


class JobsThatAreCommitted(TransactionTestCase):
    """Without the mixin: Django's own way to end a test removes the jobs."""

    def test_jobs_of_another_test_are_gone(self) -> None:
        self.assertEqual((Job.objects.count(), Attempt.objects.count()), (0, 0))
        tasks.fail.enqueue_sync("left behind")

    test_jobs_of_another_test_are_gone_too = test_jobs_of_another_test_are_gone

    def test_worker_runs_the_jobs_in_the_test_database(self) -> None:
        order = Order.objects.create(item="tea")
        tasks.invoice.enqueue_sync(order=order.pk)
        self.assertEqual(app.run_once_sync().succeeded, 2)
        order.refresh_from_db()
        self.assertEqual(order.notes, ["invoiced", "receipt"])

    def test_lost_connection_fails_no_later_job(self) -> None:
        for task in (tasks.remember_pid, tasks.remember_pid_async):
            with self.subTest(task.identifier):
                tasks.PIDS.clear()
                asyncio.run(self._run_and_terminate(task))
                self.assertEqual(len(set(tasks.PIDS)), 3, tasks.PIDS)

    async def _run_and_terminate(self, task: Any) -> None:
        """Run three jobs. After each, the server ends the session that its ORM has used."""
        errors: list[BaseException] = []
        async with app.running(concurrency=1, poll_interval=0.05) as runner:
            ended: asyncio.Queue[None] = asyncio.Queue()
            runner.events.on("job:complete", lambda _: ended.put_nowait(None))
            runner.events.on("job:error", lambda event: errors.append(event.error))
            for _ in range(3):
                await app.utils.add_job(task.identifier)
                async with asyncio.timeout(30):
                    await ended.get()
                async with app.utils.connection() as admin:
                    await admin.execute("select pg_terminate_backend($1, 10000)", tasks.PIDS[-1])
        await sync_to_async(connections.close_all)()
        self.assertEqual(errors, [])
