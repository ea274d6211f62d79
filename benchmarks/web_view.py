"""How long the dashboard's pages take on a large queue, and what they cost the worker beside them.

The queue has a million ready jobs, 100,000 failed ones and 100,000 queue names. Each page is asked for once,
and then several times; the first answer may take longer, because it fills what viewers share. Then a worker
runs jobs, in turns alone and next to a browser that refreshes the overview and the list of jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from time import monotonic

import asyncpg
import httpx

from graphile_worker import App
from graphile_worker.testing import running_server
from graphile_worker.web import Dashboard

PAGES = (
    "/",
    "/jobs",
    "/jobs?state=ready",
    "/jobs?state=scheduled",
    "/jobs?state=retrying",
    "/jobs?state=running",
    "/jobs?state=failed",
    "/jobs?state=blocked",
    "/jobs?q=task:t1",
    "/jobs?q=task:t1&state=failed",
    "/jobs?q=queue:q77",
    "/jobs?q=error:ValueError",
    "/jobs?q=needle",
    "/jobs?q=payload.n:77",
    "/failures",
    "/queues",
    "/queues?search=q77",
    "/tasks",
    "/tasks/t1",
    "/workers",
    "/cron",
    "/operations",
    "/jobs/77",
)
LIMIT = 0.3
TOKEN = "a-token-of-the-benchmark"


async def fill(db: asyncpg.Connection, ready: int, failed: int, queues: int) -> None:
    """Add the jobs, as a queue has them that was filled over time."""
    schema = "graphile_worker"
    await db.execute(
        f"insert into {schema}._private_tasks (identifier) select 't' || n from generate_series(1, 20) n"
    )
    await db.execute(
        f"insert into {schema}._private_job_queues (queue_name) "
        "select 'q' || n from generate_series(1, $1) n",
        queues,
    )
    await db.execute(
        f"""insert into {schema}._private_jobs
          (task_id, job_queue_id, payload, run_at, attempts, max_attempts, last_error, priority)
        select 1 + n % 20,
          case when $3::int > 0 and n % 2 = 0 then
            (select min(id) from {schema}._private_job_queues) + n % $3::int
          end,
          json_build_object('n', n, 'text', md5(n::text)), now() - interval '1 hour',
          case when n <= $2 then 3 else 0 end, 3,
          case when n <= $2 then 'order ' || n || ': error of kind ' || chr(65 + n % 12) end, (n + 1) % 2
        from generate_series(1, $1::int + $2::int) as n""",
        ready,
        failed,
        queues,
    )
    for table in ("jobs", "job_queues", "tasks"):
        await db.execute(f"vacuum analyze {schema}._private_{table}")


async def look(browser: httpx.AsyncClient, page: str, times: int) -> tuple[float, list[float], int]:
    """Return how long the first answer took, and the others, and the worst status."""
    took, status = [], 0
    for _ in range(times + 1):
        started = monotonic()
        answer = await browser.get(page)
        took.append(monotonic() - started)
        status = max(status, answer.status_code)
        await asyncio.sleep(0)
    return took[0], took[1:], status


async def measure_pages(app: App, times: int) -> bool:
    """Print a line for each page; return whether all are quick enough."""
    dashboard = Dashboard(app)
    transport = httpx.ASGITransport(app=dashboard, client=("127.0.0.1", 1))
    are_quick = True
    print(f"{'page':34} {'first':>8} {'median':>8} {'p95':>8}  ms")
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"Accept": "text/html"}, timeout=60
    ) as browser:
        for page in PAGES:
            first, others, status = await look(browser, page, times)
            p95 = sorted(others)[min(len(others) - 1, round(0.95 * len(others)))]
            median = statistics.median(others)
            mark = "" if p95 <= LIMIT and status == 200 else f"  TOO SLOW, or status {status}"  # noqa: PLR2004
            are_quick = are_quick and not mark
            print(f"{page:34} {first * 1000:8.0f} {median * 1000:8.0f} {p95 * 1000:8.0f}{mark}", flush=True)
    await dashboard.close()
    return are_quick


async def measure_worker(app: App, dsn: str, rounds: int, seconds: float) -> None:
    """Print the throughput of a worker, alone and next to a dashboard that a browser refreshes every 5 s."""
    done = 0

    def count(_event: object) -> None:
        nonlocal done
        done += 1

    async def refresh(browser: httpx.AsyncClient) -> None:
        while True:
            for page in ("/", "/jobs?state=ready"):
                await browser.get(page)
            await asyncio.sleep(5)

    app.events.on("job:complete", count)
    rates: dict[bool, list[float]] = {True: [], False: []}
    environment = {**os.environ, "DATABASE_URL": dsn, "GRAPHILE_WORKER_WEB_TOKEN": TOKEN}
    command = (sys.executable, "-m", "graphile_worker", "web", "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    address = (await server.stdout.readline()).decode().split()[-1]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        app.running(concurrency=20),
        httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as browser,
    ):
        for watched in [False, True] * rounds:
            refreshing = asyncio.create_task(refresh(browser)) if watched else None
            before, started = done, monotonic()
            await asyncio.sleep(seconds)
            rates[watched].append((done - before) / (monotonic() - started))
            if refreshing is not None:
                refreshing.cancel()
                await asyncio.wait([refreshing])
    server.terminate()
    await server.wait()
    if not min(rates[False] + rates[True]):
        print("the jobs ran out before the last round: give more --ready, or fewer --seconds")
        return
    alone, beside = statistics.median(rates[False]), statistics.median(rates[True])
    print(f"worker alone {alone:,.0f} jobs/s, watched {beside:,.0f} jobs/s: {beside / alone:.3f}")


async def run(ready: int, failed: int, queues: int, times: int, rounds: int, seconds: float) -> bool:
    """Measure everything on a server of its own."""
    with running_server() as dsn:
        app = App(dsn=dsn)
        for number in range(1, 21):

            @app.task(f"t{number}")
            async def task(n: int, text: str) -> None:
                pass

        await app.migrate()
        db = await asyncpg.connect(dsn)
        await fill(db, ready, failed, queues)
        await db.close()
        print(f"{ready:,} ready, {failed:,} failed, {queues:,} queue names")
        are_quick = not times or await measure_pages(app, times)
        if rounds:
            await measure_worker(app, dsn, rounds, seconds)
        await app.close()
        return are_quick


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready", type=int, default=1_000_000)
    parser.add_argument("--failed", type=int, default=100_000)
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=20, help="0 measures only the worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10, help="of a round")
    given = parser.parse_args()
    asyncio.run(run(given.ready, given.failed, given.queues, given.times, given.rounds, given.seconds))


if __name__ == "__main__":
    main()
