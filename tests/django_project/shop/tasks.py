"""Tasks of the app, and Django's own tasks."""

from typing import Any

import django
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from graphile_worker import JobContext, task as shared_task
from graphile_worker.contrib.django import app
from graphile_worker.retry import Fixed

from .models import Order

if django.VERSION >= (6,):
    from django.tasks import TaskContext, task
else:
    from django_tasks import TaskContext, task


def note(order: int, text: str) -> None:
    with transaction.atomic():
        stored = Order.objects.select_for_update().get(pk=order)
        stored.notes.append(text)
        stored.save()


@app.task
def invoice(ctx: JobContext, order: int) -> None:
    with transaction.atomic():
        note(order, "invoiced")
        receipt.enqueue_sync(order=order)
        ctx.complete_sync(connection="default")


@app.task
async def receipt(order: int) -> None:
    await sync_to_async(note)(order, "receipt")


@app.task
def remind(ctx: JobContext, order: int) -> None:
    note(order, "reminded")
    ctx.add_job_sync("receipt", {"order": order})


@app.task(max_attempts=2)
def fail(text: str) -> None:
    raise ValueError(text)


def backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        [pid] = cursor.fetchone()
    return int(pid)


PIDS: list[int] = []


@app.task
def remember_pid() -> None:
    PIDS.append(backend_pid())


@app.task
async def remember_pid_async() -> None:
    PIDS.append(await sync_to_async(backend_pid)())


@shared_task
def shared(order: int) -> None:
    note(order, "shared")


@app.task(executor="process")
def in_a_process() -> None:
    with transaction.atomic():
        order = Order.objects.create(item="tea", notes=["made in a process"])
        receipt.enqueue_sync(order=order.pk)


@task
def add(left: int, right: int) -> int:
    return left + right


@task
async def add_async(left: int, right: int) -> int:
    return left + right


@task(takes_context=True)
def describe(context: TaskContext, text: str = "") -> list[Any]:
    return [context.attempt, context.task_result.status, text]


@task(max_attempts=2, retry=Fixed(0.001))
def break_(text: str) -> None:
    raise LookupError(text)


@task(job_key=lambda order: f"order:{order}", serial="orders", timeout=30)
def keyed(order: int) -> None:
    note(order, "keyed")
