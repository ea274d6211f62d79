"""The admin of the queue: lists, filters, search and actions."""

from typing import Any

from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import TestCase
from django.urls import reverse
from django.utils import timezone

from graphile_worker.contrib.django import app
from graphile_worker.contrib.django.models import Job
from graphile_worker.contrib.django.testing import run_jobs
from shop import tasks

JOBS = reverse("admin:graphile_worker_job_changelist")


class AdminPages(TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        cls.admin = User.objects.create_superuser("ann")
        tasks.fail.enqueue_sync("ready")
        tasks.fail.using(delay=3600, job_key="later", queue_name="mails").enqueue_sync("scheduled")

    def setUp(self) -> None:
        self.client.force_login(self.admin)

    def act(self, action: str, *jobs: Job, follow: bool = True) -> str:
        chosen = {"action": action, "_selected_action": [job.pk for job in jobs]}
        return str(self.client.post(JOBS, chosen, follow=follow).content.decode())

    def test_every_list_and_page_can_be_read_and_nothing_can_be_added(self) -> None:
        run_jobs(raise_errors=False)
        for model in ("job", "jobqueue", "worker", "crontab", "attempt"):
            url = reverse(f"admin:graphile_worker_{model}_changelist")
            self.assertEqual(self.client.get(url).status_code, 200, model)
            self.assertEqual(self.client.get(f"{url}add/").status_code, 403, model)
        page = self.client.get(reverse("admin:graphile_worker_job_change", args=[Job.objects.first().pk]))
        self.assertContains(page, "ready")
        self.assertNotContains(page, 'name="_save"')

    def test_filters_and_search_find_jobs(self) -> None:
        for query, found in (
            ("state=ready", 1),
            ("state=scheduled", 1),
            ("state=running", 0),
            ("state=failed", 0),
            ("state=nonsense", 2),
            (f"task={Job.objects.first().task_id}", 2),
            ("task=x", 2),
            ("q=later", 1),
            (f"q={Job.objects.get(key='later').pk}", 1),
            ("q=99999999999999999999999", 0),
        ):
            page = self.client.get(f"{JOBS}?{query}")
            self.assertEqual(page.context["cl"].result_count, found, query)

    def test_actions_change_jobs_as_the_command_does(self) -> None:
        ready, later = Job.objects.order_by("pk")
        self.assertIn("1 job will run now", self.act("run_now", later))
        self.assertLessEqual(Job.objects.get(pk=later.pk).run_at, timezone.now())
        self.assertIn("1 job failed permanently", self.act("fail", ready))
        self.assertEqual(Job.objects.get(pk=ready.pk).last_error, "Failed by ann")
        self.assertIn("1 job will be retried", self.act("retry", ready))
        self.assertEqual(Job.objects.get(pk=ready.pk).attempts, 0)
        self.assertIn("2 jobs cancelled", self.act("cancel", ready, later))
        self.assertEqual(set(Job.objects.values_list("last_error", flat=True)), {"Cancelled: by ann"})
        self.assertIn("2 jobs removed", self.act("remove", ready, later))
        self.assertEqual(Job.objects.count(), 0)

    def test_changes_of_running_jobs_are_refused_with_a_message(self) -> None:
        job = Job.objects.get(key="later")
        with app_connection() as cursor:
            cursor.execute(
                "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'x' where id = %s",
                [job.pk],
            )
        self.assertIn("1 of the selected jobs were not changed", self.act("remove", job))

    def test_user_who_may_only_view_gets_no_actions(self) -> None:
        viewer = User.objects.create_user("bob", is_staff=True)
        viewer.user_permissions.add(Permission.objects.get(codename="view_job"))
        self.client.force_login(viewer)
        self.assertNotContains(self.client.get(JOBS), "Remove the selected jobs")
        self.act("remove", *Job.objects.all())
        self.assertEqual(Job.objects.count(), 2)

    def test_user_who_may_change_jobs_may_not_remove_them(self) -> None:
        changer = User.objects.create_user("eve", is_staff=True)
        changer.user_permissions.add(*Permission.objects.filter(codename__in=["view_job", "change_job"]))
        self.client.force_login(changer)
        page = self.client.get(JOBS)
        self.assertContains(page, "Retry the selected jobs")
        self.assertNotContains(page, "Remove the selected jobs")


def app_connection() -> Any:
    return connections[app.database].cursor()
