"""How fast jobs are added: ours against Node's, in one run on one database.

Usage: python benchmarks/enqueue.py [--rounds N] [--bulk N] [--single N]

Rounds of both sides take turns, so that a slow moment of the machine hits both. Needs npm's
graphile-worker, which `make test` fetches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import asyncpg

from graphile_worker import JobSpec, WorkerUtils
from graphile_worker.testing import Databases, running_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).parent.parent
NODE_PACKAGE = ROOT / ".cache/peers/graphile-worker-0.18.0/node_modules/graphile-worker/dist/index.js"


class Node:
    """Node's WorkerUtils in a process of its own, so that its start is not measured."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._process = subprocess.Popen(
            ["node", ROOT / "benchmarks" / "enqueue.mjs", NODE_PACKAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PGHOST": query.get("host") or parts.hostname or "localhost",
                "PGPORT": query.get("port") or str(parts.port or 5432),
                "PGUSER": parts.username or "postgres",
                "PGPASSWORD": parts.password or "",
                "PGDATABASE": parts.path.removeprefix("/"),
            },
        )

    def measure(self, case: str, count: int) -> float:
        """Jobs per second."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{case} {count}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


async def bulk(utils: WorkerUtils, count: int) -> None:
    """All in one call, from an iterator."""
    await utils.add_jobs(JobSpec("t", {"id": number}) for number in range(count))


async def single(utils: WorkerUtils, count: int) -> None:
    """One after another."""
    for number in range(count):
        await utils.add_job("t", {"id": number})


async def ten(utils: WorkerUtils, count: int) -> None:
    """Ten at a time."""

    async def lane() -> None:
        for number in range(count // 10):
            await utils.add_job("t", {"id": number})

    await asyncio.gather(*(lane() for _ in range(10)))


CASES: dict[str, Callable[[WorkerUtils, int], Awaitable[None]]] = {
    "bulk": bulk,
    "single": single,
    "ten": ten,
}


async def compare(dsn: str, counts: dict[str, int], rounds: int) -> None:
    """Print a line per case."""
    node = Node(dsn)
    table = await asyncpg.connect(dsn)
    print(f"{'case':8} {'jobs':>8} {'ours':>10} {'node':>10}  ours / node (best, median)")
    async with WorkerUtils(dsn=dsn) as utils:
        for case, count in counts.items():
            ours, theirs = [], []
            for round_ in range(rounds):
                print(f"{case}: round {round_ + 1} of {rounds}", end="\r", file=sys.stderr)
                await table.execute("truncate graphile_worker._private_jobs")
                start = time.perf_counter()
                await CASES[case](utils, count)
                ours.append(count / (time.perf_counter() - start))
                await table.execute("truncate graphile_worker._private_jobs")
                theirs.append(await asyncio.to_thread(node.measure, case, count))
            best = max(ours) / max(theirs)
            median = statistics.median(ours) / statistics.median(theirs)
            print(f"{case:8} {count:8} {max(ours):8.0f}/s {max(theirs):8.0f}/s  {best:.2f}, {median:.2f}")
    await table.close()
    node.close()


async def main(server_dsn: str, counts: dict[str, int], rounds: int) -> None:
    """Compare on a fresh database with the schema as we install it."""
    databases = Databases(server_dsn)
    async with databases.fresh() as dsn:
        await compare(dsn, counts, rounds)
    await databases.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Jobs added per second: ours against Node's.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bulk", type=int, default=100_000)
    parser.add_argument("--single", type=int, default=3_000)
    options = parser.parse_args()
    if not NODE_PACKAGE.exists():
        sys.exit("npm's graphile-worker is not here: run `make peers` first.")
    sizes = {"bulk": options.bulk, "single": options.single, "ten": options.single}
    with running_server() as server:
        asyncio.run(main(server, sizes, options.rounds))
