"""A Node worker in its own process, which the test controls."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import node
from support.postgres import PEERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DEADLINE = 60.0
_SCRIPT = Path(__file__).with_suffix(".mjs")
_LONGEST_LINE = 2**24
_SPEC = {
    "queue_name": "queueName",
    "run_at": "runAt",
    "max_attempts": "maxAttempts",
    "job_key": "jobKey",
    "job_key_mode": "jobKeyMode",
}


class NodeError(Exception):
    """The error of a request in the Node process."""


class Peer:
    """A Node process with the npm package. It runs requests, and sends messages about its jobs."""

    def __init__(self, process: asyncio.subprocess.Process, version: str) -> None:
        self.version = version
        self.process = process
        self.messages: list[dict[str, Any]] = []
        """All messages that are not answers to requests."""
        self._numbers = iter(range(1, 2**31))
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def request(self, method: str, *given: object) -> Any:
        """Run a request of peer.mjs. Return its answer."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps([number, method, *given]).encode() + b"\n")
        async with asyncio.timeout(DEADLINE):
            return await answer

    async def utils(self, method: str, *given: object) -> Any:
        """Call a WorkerUtils method in Node."""
        return await self.request("utils", method, *given)

    async def add(self, task: str, payload: Any = None, **options: Any) -> int:
        """Add a job, with the names of Python's options. Return its id."""
        spec = {_SPEC.get(name, name): value for name, value in options.items()}
        if "runAt" in spec:
            spec["runAt"] = spec["runAt"].isoformat()
        return int((await self.utils("addJob", task, payload, spec))["id"])

    async def until_started(self, job_id: int) -> None:
        """Wait until the task `hold` runs a job."""
        await self.until("started", id=job_id)

    async def release(self, job_id: int, error: str | None = None) -> None:
        """End a held job, successfully or with an error."""
        await self.request("release", job_id, error)

    async def stop(self) -> None:
        """Stop the worker."""
        await self.request("stop")

    async def start(
        self, *tasks: str, concurrency: int = 1, forbidden_flags: list[str] | None = None, **worker: Any
    ) -> str:
        """Start a worker with these tasks of peer.mjs. Return the id with which it locks jobs."""
        options = {"concurrentJobs": concurrency, "pollInterval": 100, **worker}
        pool: str = await self.request("start", tasks, options, forbidden_flags)
        return pool

    async def once(self, *tasks: str, **worker: Any) -> None:
        """Run all available jobs."""
        await self.request("once", tasks, {"concurrentJobs": 1, **worker})

    async def until(self, what: str, count: int = 1, **about: object) -> dict[str, Any]:
        """Wait for a number of matching messages. Return the last one."""

        def found() -> list[dict[str, Any]]:
            wanted = {"what": what, **about}.items()
            return [one for one in self.messages if wanted <= _comparable(one).items()]

        await self._until(lambda: len(found()) >= count, f"{what} {about}, {count} times")
        return found()[count - 1]

    async def killed(self) -> None:
        """Kill the process."""
        self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        """Kill the process, and read the rest of its output."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"Node never sent {what}, only {self.messages}") from None

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            number, answer, *error = json.loads(line)
            if number == 0:
                async with self._changed:
                    self.messages.append(answer)
                    self._changed.notify_all()
            elif not (waiting := self._answers.pop(number)).done():
                waiting.set_exception(NodeError(error[0])) if error else waiting.set_result(answer)
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(NodeError("the process exited"))


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if not isinstance(value, dict | list)}


@contextlib.asynccontextmanager
async def started(version: str, dsn: str, *, schema: str = "graphile_worker") -> AsyncIterator[Peer]:
    """Start a Node process for a database. Skip the test if the npm package is not installed."""
    node.command(version)
    process = await asyncio.create_subprocess_exec(
        *("node", _SCRIPT, PEERS / f"graphile-worker-{version}", schema),
        env=node.environment(dsn),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
    )
    peer = Peer(process, version)
    try:
        yield peer
    finally:
        await peer.close()
