"""The example that ``graphile-worker web --demo`` shows: the queue of a shop that is always busy."""

from __future__ import annotations

import asyncio
import math
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._base.histogram import LAST, bucket_of, trimmed
from graphile_worker._db.queries.web_demo import add_past
from graphile_worker.app import App
from graphile_worker.context import JobContext  # noqa: TC001 - tasks read their annotations
from graphile_worker.outcome import Fail

if TYPE_CHECKING:
    from collections.abc import Iterator

_DAYS = 8
_MINUTE, _FIVE_MINUTES = 60, 300
_CONCURRENCY = 8
_NAMES = ("ann", "bobby", "chidi", "dolores", "eiko", "farid", "grace", "hanna", "ines", "jorge")
_WAREHOUSES = ("lyon", "porto", "oslo")


class Kind(NamedTuple):
    """How often jobs of a task are added, how many attempts fail, and how long they run."""

    per_minute: float
    failing: float
    seconds: float


KINDS = {
    "send_email": Kind(40.0, 0.02, 0.12),
    "charge_card": Kind(12.0, 0.08, 0.4),
    "create_invoice": Kind(12.0, 0.05, 0.25),
    "resize_image": Kind(20.0, 0.01, 0.8),
    "sync_inventory": Kind(4.0, 0.12, 1.6),
    "build_report": Kind(0.4, 0.03, 14.0),
}


class CardDeclinedError(Exception):
    """The bank refuses the card."""


class StockServiceError(Exception):
    """The stock service does not answer."""


class Pace:
    """How fast the example runs: at once while it is seeded, and later like a shop."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - an example
        self.is_hurried = True

    async def work(self, kind: str) -> bool:
        """Take the time of a job; return whether it fails."""
        found = KINDS[kind]
        if not self.is_hurried:
            await asyncio.sleep(found.seconds * self.random.lognormvariate(0, 0.5))
        return self.random.random() < found.failing


def make_app(  # noqa: C901 - a function for each task
    dsn: str, *, schema: str | None = None, seed: int = 7
) -> tuple[App, Pace]:
    """Return the example's app, and its pace."""
    app, pace = App(dsn=dsn, schema=schema, history="all"), Pace(seed)

    @app.task(max_attempts=5)
    async def send_email(to: str, template: str = "welcome") -> None:
        if await pace.work("send_email"):
            raise TimeoutError(f"smtp.example.com: no answer for {to} ({template}) within 30 s")

    @app.task(max_attempts=2)
    async def charge_card(order: int, cents: int) -> None:
        if await pace.work("charge_card"):
            raise CardDeclinedError(f"order {order}: the bank declined {cents} cents")

    @app.task(max_attempts=3)
    async def create_invoice(order: int, lines: list[dict[str, Any]]) -> None:
        fails = await pace.work("create_invoice")
        if order % 11 == 0:
            raise Fail(f"order {order} has no billing address")
        if fails:
            raise ValueError(f"order {order}: the sum of {len(lines)} lines is not the total")

    @app.task
    async def resize_image(image: str, width: int) -> None:
        if await pace.work("resize_image"):
            raise OSError(f"{image}: not an image ({width} px)")

    @app.task
    async def sync_inventory(warehouse: str) -> None:
        if await pace.work("sync_inventory"):
            raise StockServiceError(f"GET /stock/{warehouse}: 503 Service Unavailable")

    @app.cron("0 4 * * *", payload={"month": "2030-01"}, tz="Europe/Paris", identifier="nightly report")
    @app.cron("*/10 9-17 * * MON-FRI", payload={"month": "2030-01"}, identifier="sales of the day")
    @app.task
    async def build_report(month: str, ctx: JobContext) -> None:
        for page in range(20):
            ctx.progress(page / 20, f"page {page + 1} of 20 of {month}")
            if not pace.is_hurried:
                await asyncio.sleep(0.7)

    app.cron("*/5 * * * *", payload={"warehouse": "lyon"}, identifier="stock of Lyon")(sync_inventory)
    return app, pace


async def seed_queue(app: App, pace: Pace) -> None:
    """Install the schema, and fill it: a past of eight days, and jobs in every state."""
    await app.migrate()
    await _seed_past(app, pace.random)
    for number in range(240):
        await _add(app, pace, number)
    pace.is_hurried = True
    await app.run_once(concurrency=_CONCURRENCY)
    for number in range(18):
        await app.add_job(
            "send_email",
            {"to": f"{_NAMES[number % 10]}@example.com", "template": "reminder"},
            delay=3600 * (1 + number),
        )
    await app.add_job("archive_orders", {"before": "2029-01-01"})  # no worker serves it
    for number in range(6):
        await app.add_job(
            "sync_inventory", {"warehouse": "oslo"}, queue_name="warehouse oslo", priority=number
        )


async def keep_busy(app: App, pace: Pace) -> None:
    """Run a worker, and add jobs as customers do, until cancelled."""
    pace.is_hurried = False
    number = 1000
    per_second = sum(kind.per_minute for kind in KINDS.values()) / _MINUTE
    async with app.running(concurrency=_CONCURRENCY):
        while True:
            number += 1
            await _add(app, pace, number)
            await asyncio.sleep(pace.random.expovariate(per_second))


async def _add(app: App, pace: Pace, number: int) -> None:
    chance = pace.random
    [task] = chance.choices(list(KINDS), [kind.per_minute for kind in KINDS.values()])
    name = _NAMES[number % len(_NAMES)]
    match task:
        case "send_email":
            template = chance.choice(["welcome", "receipt", "password"])
            await app.add_job(task, {"to": f"{name}@example.com", "template": template})
        case "charge_card":
            payload = {"order": 48_000 + number, "cents": chance.randrange(900, 90_000)}
            await app.add_job(task, payload, queue_name=f"customer {name}", priority=-5)
        case "create_invoice":
            lines = [
                {"article": f"A-{chance.randrange(900)}", "quantity": 1 + line}
                for line in range(chance.randrange(1, 5))
            ]
            await app.add_job(
                task, {"order": 48_000 + number, "lines": lines}, job_key=f"invoice {48_000 + number}"
            )
        case "resize_image":
            await app.add_job(
                task,
                {"image": f"uploads/{number:06}.jpg", "width": chance.choice([320, 1280])},
                flags=["images"],
            )
        case "sync_inventory":
            place = chance.choice(_WAREHOUSES)
            await app.add_job(task, {"warehouse": place}, queue_name=f"warehouse {place}")
        case _:
            await app.add_job(task, {"month": f"2029-{chance.randrange(1, 13):02}"})


async def _seed_past(app: App, chance: random.Random) -> None:
    now = datetime.now(UTC)
    counts, depths = [], []
    for period, at in _periods(now):
        rush = _rush(at)
        for task, kind in KINDS.items():
            jobs = max(0, round(chance.gauss(kind.per_minute * rush * period / _MINUTE, 1.5)))
            if jobs:
                counts.append(_counted(chance, task, kind, period, at, jobs))
        waiting = max(0, round(chance.gauss(30 * rush**3, 4)))
        depths.append(
            {
                "period": period,
                "at": at.timestamp(),
                "ready": waiting,
                "scheduled": 18 + round(6 * rush),
                "running": min(_CONCURRENCY, 1 + round(5 * rush)),
                "failed": 20 + round((_DAYS * 86_400 - (now - at).total_seconds()) / 21_600),
            }
        )
    session = app.utils._session  # noqa: SLF001 - the library's own
    await session.call(lambda on: add_past(on, session.schema, counts, depths))


def _periods(now: datetime) -> Iterator[tuple[int, datetime]]:
    """Yield the beginnings of periods: of five minutes, and of a minute in the last two hours."""
    border = datetime.fromtimestamp((now.timestamp() - 7200) // _FIVE_MINUTES * _FIVE_MINUTES, UTC)
    at = border - timedelta(days=_DAYS)
    while at < border:
        yield _FIVE_MINUTES, at
        at += timedelta(seconds=_FIVE_MINUTES)
    while at < now - timedelta(seconds=_MINUTE):
        yield _MINUTE, at
        at += timedelta(seconds=_MINUTE)


def _rush(at: datetime) -> float:
    """Return how busy the shop is: most in the afternoon, less at the weekend."""
    hour = at.hour + at.minute / 60
    day = 0.45 + 0.55 * max(0.0, math.sin((hour - 7) / 15 * math.pi))
    return day * (0.6 if at.isoweekday() > 5 else 1.0)  # noqa: PLR2004 - Saturday and Sunday


def _counted(
    chance: random.Random, task: str, kind: Kind, period: int, at: datetime, jobs: int
) -> dict[str, Any]:
    runs, waits = [0] * (LAST + 1), [0] * (LAST + 1)
    run_seconds = wait_seconds = 0.0
    for _ in range(min(jobs, 40)):
        run = kind.seconds * chance.lognormvariate(0, 0.5)
        wait = 0.02 * chance.lognormvariate(0, 1.2) * (1 + 40 * _rush(at) ** 6)
        runs[bucket_of(run)] += 1
        waits[bucket_of(wait)] += 1
        run_seconds, wait_seconds = run_seconds + run, wait_seconds + wait
    failed = sum(chance.random() < kind.failing for _ in range(jobs))
    return {
        "period": period,
        "at": at.timestamp(),
        "task": task,
        "done": jobs - failed,
        "failed": failed,
        "run_seconds": run_seconds,
        "wait_seconds": wait_seconds,
        "runs": trimmed(runs),
        "waits": trimmed(waits),
    }
