"""The lifespan: opened before the first task and closed after the last."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import App, ConfigurationError, GraphileWorkerError, JobContext, run, run_once
from graphile_worker._worker import lifecycle, lifespan as lifespan_module
from graphile_worker.testing import drain
from support.commands import Cli
from support.jobs import existing
from support.workers import DEADLINE, EventRecorder, Gate, locked, nothing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import asyncpg

    from graphile_worker.testing import Databases


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@dataclass
class State:
    log: list[str] = field(default_factory=list)


async def test_lifespan_state_is_open_from_the_first_task_to_the_last(database: str) -> None:
    state = State()
    tasks: list[Any] = []

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[State]:
        tasks.append(asyncio.current_task())
        state.log.append(f"opened for {list(app.tasks)}")
        yield state
        tasks.append(asyncio.current_task())
        state.log.append("closed")

    app = App(database, lifespan=lifespan)

    @app.task
    async def hello(ctx: JobContext[State], name: str) -> None:
        ctx.state.log.append(name)

    @app.task
    def on_thread(ctx: JobContext[State]) -> None:
        ctx.state.log.append("thread")

    async with app:
        await hello.enqueue("Ann")
        await on_thread.enqueue()
        await app.run_once()
        async with app.running():
            state.log.append("running")
    opened = "opened for ['hello', 'on_thread']"
    assert state.log == [opened, "Ann", "thread", "closed", opened, "running", "closed"]
    assert tasks[0] is tasks[1] is not None, (
        "the lifespan must be entered and left in one asyncio task, because some libraries require it"
    )


async def test_lifespan_closes_after_interrupted_jobs_end(database: str) -> None:
    gate, log = Gate(), []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        log.append(list(gate.cancelled))

    runner = await run({"task": gate}, database, lifespan=lifespan, handle_signals=False)
    await runner.add_job("task", 1)
    await gate.until_started()
    await runner.stop(grace=0)
    assert log == [[1]]


async def test_worker_whose_lifespan_fails_does_not_start(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        raise OSError("no model")
        yield

    recorder = EventRecorder()
    with pytest.raises(OSError, match="no model") as caught:
        await run({"task": print}, database, lifespan=lifespan, handle_signals=False, events=recorder.events)
    line = unwrap(lifespan).__code__.co_firstlineno + 2
    here = Path(__file__).relative_to(Path.cwd())
    assert caught.value.__notes__ == [
        f"The lifespan failed before the first job, in lifespan ({here}, line {line})."
    ]
    fatal = recorder.named("pool:fatalError")[0]
    assert (fatal.action, fatal.error) == ("lifespan", caught.value)
    assert "failed while it was closed" not in caplog.text
    with pytest.raises(ConfigurationError, match="must be a function that returns an async context manager"):
        await run({"task": print}, database, lifespan=3)  # type: ignore[arg-type]


async def test_lifespan_that_fails_to_close_is_logged(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[int]:
        yield 3
        raise OSError("stuck")

    found: list[int] = []

    async def task(_payload: object, ctx: JobContext[int]) -> None:
        found.append(ctx.state)

    runner = await run({"task": task}, database, lifespan=lifespan, handle_signals=False)
    await runner.add_job("task")
    await runner.stop()
    assert found in ([], [3])
    assert "The lifespan failed while it was closed: OSError('stuck')" in caplog.text


@pytest.mark.parametrize("raises", [True, False])
async def test_lifespan_that_ends_early_stops_the_worker(
    database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture, *, raises: bool
) -> None:
    gate, recorder, lose = Gate(), EventRecorder(), asyncio.Event()

    async def background() -> None:
        await lose.wait()
        raise OSError("the other side is gone")

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(background())
                yield
        except BaseException:
            if raises:
                raise

    runner = await run(
        {"task": gate}, database, lifespan=lifespan, handle_signals=False, events=recorder.events
    )
    job = await runner.add_job("task", 1)
    await gate.until_started()
    lose.set()
    with pytest.raises(GraphileWorkerError, match="ended") as caught:
        async with asyncio.timeout(DEADLINE):
            await runner.wait()
    assert gate.cancelled == [1]
    assert (await existing(db, job.id))["attempts"] == 0, "the attempt must be given back"
    assert await locked(db) == []
    fatal = recorder.named("pool:fatalError")[0]
    assert fatal.action == "lifespan"
    assert f"in lifespan ({Path(__file__).relative_to(Path.cwd())}, line " in str(caught.value)
    if raises:
        assert isinstance(fatal.error, ExceptionGroup)
        assert caught.value.__cause__ is fatal.error
        assert "the other side is gone" in caplog.text
    assert "failed while it was closed" not in caplog.text


async def test_drain_raises_if_the_lifespan_ends_early(database: str) -> None:
    lose, lost = asyncio.Event(), asyncio.Event()

    async def background() -> None:
        await lose.wait()
        raise OSError("the other side is gone")

    @asynccontextmanager
    async def lifespan(_app: App) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(background())
                yield
        finally:
            lost.set()

    app = App(database, lifespan=lifespan)

    @app.task
    async def hello() -> None:
        lose.set()
        await lost.wait()

    async with app:
        await hello.enqueue()
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await drain(app)


@pytest.mark.parametrize("reacts", [True, False])
async def test_lifespan_that_does_not_close_is_cancelled_and_then_abandoned(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, reacts: bool
) -> None:
    monkeypatch.setattr(lifecycle, "GIVE_UP_AFTER", 2.0)
    monkeypatch.setattr(lifespan_module, "_MIN_CLOSE_TIME", 0.05)
    release, left = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        try:
            await asyncio.Event().wait()
        finally:
            if not reacts:
                await release.wait()
            left.set()

    runner = await run({"task": nothing}, database, lifespan=lifespan, handle_signals=False)
    async with asyncio.timeout(DEADLINE):
        await runner.stop(grace=0)
        assert "The lifespan takes too long to close" in caplog.text
        assert left.is_set() == reacts
        assert ("The lifespan does not end" in caplog.text) != reacts
        release.set()
        await left.wait()


async def test_state_is_none_without_a_lifespan(database: str) -> None:
    found: list[Any] = []

    async def task(_payload: object, ctx: JobContext) -> None:
        found.append(ctx.state)

    runner = await run({"task": task}, database, handle_signals=False)
    await runner.add_job("task")
    await runner.stop()
    await run_once({"task": task}, database, handle_signals=False)
    assert found == [None]


async def test_cancelled_start_closes_the_lifespan(database: str) -> None:
    opening, closed = asyncio.Event(), []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            opening.set()
            await asyncio.Event().wait()
            yield
        finally:
            closed.append(True)

    starting = asyncio.create_task(run({"task": print}, database, lifespan=lifespan, handle_signals=False))
    await opening.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert closed == [True]


def test_invalid_lifespan_is_rejected_at_once() -> None:
    async def yields(_app: App) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def takes_nothing() -> AsyncIterator[None]:
        yield

    with pytest.raises(ConfigurationError, match=r"lifespan.*one argument"):
        App("postgres://", lifespan=takes_nothing)  # type: ignore[arg-type]
    app = App("postgres://", lifespan=yields)  # type: ignore[arg-type]
    app.task(_nothing)
    with pytest.raises(ConfigurationError, match=r"lifespan yields .*@asynccontextmanager"):
        asyncio.run(app.run_once())


async def _nothing() -> None: ...


FAILING = """
from contextlib import asynccontextmanager
from graphile_worker import App, ConfigurationError

def connect():
    raise {error}

@asynccontextmanager
async def lifespan(app):
    connect()
    yield

app = App(lifespan=lifespan)

@app.task
async def hello(): ...
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", ["OSError('no')", "ValueError('no')", "ConfigurationError('no')"])
async def test_run_command_shows_where_the_lifespan_failed(database: str, tmp_path: Path, error: str) -> None:
    (tmp_path / "shop.py").write_text(FAILING.format(error=error))
    done = await Cli(database, tmp_path)("run", "shop:app")
    assert done.returncode == 1
    assert "Cannot start the worker: its lifespan failed\nTraceback" in done.stderr
    assert 'shop.py", line 6, in connect' in done.stderr
    assert done.stderr.endswith("The lifespan failed before the first job, in lifespan (shop.py, line 10).\n")
    assert "graphile_worker/" not in done.stderr, "the traceback must not show frames of the library"
