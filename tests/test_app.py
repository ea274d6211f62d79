"""`App`: which tasks it has, where its connections come from and go, and the workers it runs."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import pytest

import graphile_worker
from graphile_worker import (
    App,
    ConfigurationError,
    Drained,
    Events,
    InvalidJobError,
    JobContext,
    SchemaMissingError,
    WorkerUtils,
    task,
)
from graphile_worker.blocking import Blocking
from graphile_worker.options import OnceOptions, RunOptions
from support.programs import Program, program
from support.waiting import until
from support.workers import DEADLINE, Gate, locked

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from graphile_worker.testing import Databases

PROGRAM = """
import asyncio, os, sys
from graphile_worker import App
app = App()
@app.task
async def hello(name: str) -> None:
    print("Hello,", name, flush=True)
    if name == "wait":
        await asyncio.sleep(60)
@app.task
def on_thread(name: str) -> None:
    hello.enqueue_sync(name)
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def module(name: str, **things: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(things)
    return made


def shared() -> Any:
    @task
    async def hello(name: str) -> None: ...

    return hello


async def sessions(db: asyncpg.Connection) -> int:
    found: int = await db.fetchval(
        "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"
        " and datname = current_database()"
    )
    return found


class TestIncluding:
    async def test_tasks_modules_names_and_lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, two, three, four = (task(name)(lambda: None) for name in ("one", "two", "three", "four"))
        monkeypatch.setitem(sys.modules, "shop_tasks", module("shop_tasks", three=three, x=3, task=task))
        app = App()
        app.include(one)
        app.include([two, [one]], "shop_tasks")
        app.include(module("m", four=four, again=four))
        assert list(app.tasks) == ["one", "two", "three", "four"]

    def test_what_has_no_tasks_is_refused(self) -> None:
        app = App()
        for thing, why in [
            (module("m", x=1), "The module m has no tasks"),
            (print, "becomes a task by @task"),
            (3, "include takes tasks"),
            ({"audit": None}, "include takes tasks"),
            (b"audit", "include takes tasks"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                app.include(thing)  # type: ignore[arg-type]
        with pytest.raises(ModuleNotFoundError):
            app.include("no_such_module_anywhere")

    def test_two_of_one_name_are_refused(self) -> None:
        app = App()
        app.include(shared())
        with pytest.raises(ConfigurationError, match="There are two tasks 'hello'"):
            app.include(shared())

    async def test_several_apps_may_include_one(self, databases: Databases) -> None:
        hello = shared()
        async with (
            databases.fresh() as first,
            databases.fresh() as second,
            App(first) as one,
            App(second) as two,
        ):
            one.include(hello)
            await hello.enqueue("to one")
            two.include(hello)
            await hello.enqueue("to two")
            await one.tasks["hello"].enqueue("to one")
            await one.tasks["hello"].using(priority=1).enqueue("to one")
            assert {job.payload["name"] for job in await one.utils.list_jobs()} == {"to one"}
            assert {job.payload["name"] for job in await two.utils.list_jobs()} == {"to two"}

    def test_a_task_of_one_app_is_not_anothers(self) -> None:
        app, other = App(), App()

        @app.task
        async def theirs() -> None: ...

        mine = task("mine")(lambda: None)
        with pytest.raises(ConfigurationError, match=r"declared by another app"):
            other.include(theirs)
        with pytest.raises(ConfigurationError, match="m are all of another app"):
            other.include(module("m", theirs=theirs))
        other.include(module("m", theirs=theirs, mine=mine))
        assert list(other.tasks) == ["mine"]
        app.include(theirs)
        assert list(app.tasks) == ["theirs"]

    async def test_an_app_without_tasks_adds_jobs_but_runs_none(self, database: str) -> None:
        async with App(database) as app:
            assert (await app.add_job("somebody_elses")).payload == {}
            for running in (app.run(), app.run_once()):
                with pytest.raises(ConfigurationError, match="The app has no tasks"):
                    await running


class TestConnections:
    def test_other_threads_may_open_it_meanwhile(self) -> None:
        clients = App("postgresql://nobody@localhost:1/nowhere")._clients

        class Loop:
            def is_closed(self) -> bool:
                add()  # as another thread does
                return True

        def add() -> None:
            clients._of_loops[cast("Any", Loop())] = cast("Any", None)

        add()
        clients._forget_closed_loops()
        assert len(clients._of_loops) == 1, "that of the other thread"

    def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent(self) -> None:
        blocking = Blocking()
        assert blocking.run(asyncio.sleep(0, "done")) == "done"
        thread, at_exit = blocking._thread, blocking._at_exit
        assert thread is not None
        assert at_exit is not None
        blocking.forget()
        assert not at_exit.alive
        thread.end()

    async def test_they_are_opened_late_and_closed_early(self, db: asyncpg.Connection, database: str) -> None:
        app = App(database)
        hello = shared()
        app.include(hello)
        await until(lambda: _none(sessions(db)), "all sessions are gone")
        async with app:
            await hello.enqueue("Ann")
            assert await sessions(db) == 1
        await until(lambda: _none(sessions(db)), "all sessions are gone")
        await hello.enqueue("again")
        await app.close()
        await app.close()
        await until(lambda: _none(sessions(db)), "all sessions are gone")

    async def test_each_event_loop_has_its_own_and_closes_them(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        hello = shared()
        app.include(hello)

        async def work() -> None:
            await asyncio.gather(*[hello.enqueue(str(n)) for n in range(5)])

        def loops() -> None:
            asyncio.run(work())
            asyncio.run(work())

        threads = [threading.Thread(target=loops) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*[asyncio.to_thread(thread.join) for thread in threads])
        assert await db.fetchval("select count(*) from graphile_worker.jobs") == 30
        await until(lambda: _none(sessions(db)), "all sessions are gone")
        assert repr(app._clients._of_loops) == "{}"

    async def test_a_schema_that_is_not_there(self, empty_database: str) -> None:
        async with App(empty_database) as app:
            with pytest.raises(SchemaMissingError):
                await app.add_job("x")
            await app.migrate()
            assert (await app.add_job("x")).id == 1

    def test_what_is_wrong_is_said_when_the_app_is_made(self) -> None:
        for options, why in [
            ({"dsn": "postgresql://localhost:x/y"}, "connection string cannot be read"),
            ({"schema": ""}, "schema"),
            ({"max_pool_size": 0}, "max_pool_size is 0"),
            ({"max_pool_size": 1.5}, "max_pool_size is 1.5"),
            ({"pool": 3}, "takes a pool of asyncpg's"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                App(**options)  # type: ignore[arg-type]

    async def test_where_the_queue_is_may_be_said_later(self, database: str) -> None:
        app = App("postgresql://nobody@localhost:1/nothing")
        app.configure(dsn=database)
        await app.add_job("x")
        with pytest.raises(ConfigurationError, match="has connections already"):
            app.configure(schema="other")
        await app.close()
        app.configure(schema="other")
        with pytest.raises(SchemaMissingError, match="other"):
            await app.add_job("x")
        await app.close()
        with pytest.raises(ConfigurationError, match="concurrency: configure does not know that"):
            app.configure(concurrency=3)

    async def test_a_pool_of_the_callers_stays_open(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=6) as pool:
            app = App(pool=pool)
            app.include(shared())
            await app.tasks["hello"].enqueue("Ann")
            assert await app.run_once() == Drained(1, 0)
            await app.close()
            assert await pool.fetchval("select 1") == 1

    async def test_a_pool_is_not_used_on_another_loop(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=6) as pool:
            app = App(pool=pool)
            app.include(shared())
            await app.tasks["hello"].enqueue("Ann")
            with pytest.raises(ConfigurationError, match="The pool given belongs to another event loop"):
                await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "Bob")
            await app.tasks["hello"].enqueue("Cid")
            await app.close()
            await asyncio.to_thread(app.close_sync)

    async def test_a_loop_that_was_not_ended_properly_is_forgotten(self, database: str) -> None:
        app = App(database)

        def careless() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(app.add_job("x"))
            [client] = app._clients._of_loops.values()
            loop.run_until_complete(client.utils.close())
            loop.close()

        await asyncio.to_thread(careless)
        app.configure(schema="graphile_worker")
        assert (await app.add_job("x")).id == 2
        assert list(app._clients._of_loops) == [asyncio.get_running_loop()]
        await app.close()

    async def test_closing_waits_for_those_who_wait(self, db: asyncpg.Connection, database: str) -> None:
        """What was added is told to whoever added it."""
        app = App(database)
        added: list[int] = []
        stopped = threading.Event()

        def add() -> None:
            while not stopped.is_set():
                added.append(app.add_job_sync("x").id)

        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            await asyncio.to_thread(app.close_sync)
        stopped.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(app.close_sync)
        assert len(added) == await db.fetchval("select count(*) from graphile_worker.jobs")

    async def test_a_thread_that_cannot_begin_is_no_trap(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = App(database)

        def refuse(*_: Any) -> None:
            raise OSError("too many open files")

        monkeypatch.setattr(asyncio, "run", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="too many open files"):
                await asyncio.to_thread(app.add_job_sync, "x")
        monkeypatch.undo()
        assert (await asyncio.to_thread(app.add_job_sync, "x")).id == 1
        await asyncio.to_thread(app.close_sync)


class TestRunning:
    async def test_jobs_can_be_added_when_the_worker_has_stopped(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        app.include(shared())
        async with app.running() as runner:
            adding = asyncio.create_task(self.keep_adding(app))
            await runner.stop()
            await app.tasks["hello"].enqueue("after the worker")
        await app.tasks["hello"].enqueue("after the block")
        adding.cancel()
        await asyncio.wait([adding])
        assert adding.cancelled()
        await app.close()
        # It may have been about to connect, and the server takes a moment to see that nobody is there.
        await until(lambda: _none(sessions(db)), "all sessions are gone")

    async def keep_adding(self, app: App) -> None:
        while True:
            await app.tasks["hello"].enqueue("x")

    async def test_the_context_adds_jobs_as_their_tasks_say(self, database: str) -> None:
        app = App(database)

        @app.task(queue_name="mail", priority=7, job_key="mail:{to}")
        async def send(to: str) -> None: ...

        @app.task
        async def welcome(ctx: JobContext) -> None:
            job = await ctx.add_job("send", {"to": "Ann"}, priority=3)
            assert (job.queue_name, job.priority, job.key) == ("mail", 3, "mail:Ann")
            assert (await ctx.add_job("somebody_elses")).payload == {}
            with pytest.raises(InvalidJobError, match="to: Expected `str`"):
                await ctx.add_job("send", {"to": 3})

        async with app:
            await welcome.enqueue()
            assert await app.run_once() == Drained(2, 0)

    async def test_a_worker_inside_of_a_program(self, db: asyncpg.Connection, database: str) -> None:
        app = App(database)
        gate = Gate()

        @app.task
        async def hello(name: str) -> None:
            await gate(name)

        before = signal.getsignal(signal.SIGTERM)
        async with app.running(concurrency=3, shutdown_grace=0) as runner:
            assert signal.getsignal(signal.SIGTERM) is before
            assert app.utils is runner.utils
            await hello.enqueue("Ann")
            await gate.until_begun()
            assert (await runner.utils.list_jobs())[0].locked_by == runner.id
        assert gate.cancelled == ["Ann"]
        assert await locked(db) == []
        await until(lambda: _none(sessions(db)), "all sessions are gone")

    async def test_a_job_has_its_grace(self, database: str) -> None:
        app = App(database)
        gate = Gate()

        @app.task
        async def hello(name: str) -> None:
            await gate(name)

        async with app.running(shutdown_grace=DEADLINE):
            await hello.enqueue("Ann")
            await gate.until_begun()
            asyncio.get_running_loop().call_soon(gate.open)
        assert gate.ended == ["Ann"]

    async def test_what_went_wrong_in_the_program_gets_out(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        app.include(shared())

        async def broken() -> None:
            async with app.running():
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await broken()
        await until(lambda: _none(sessions(db)), "all sessions are gone")

    async def test_run_goes_on_until_it_is_cancelled(self, db: asyncpg.Connection, database: str) -> None:
        app = App(database)
        gate = Gate()

        @app.task
        async def hello(name: str) -> None:
            await gate(name)

        await app.add_job("hello", {"name": "Ann"})
        await app.close()
        running = asyncio.create_task(app.run(handle_signals=False, shutdown_grace=0))
        await gate.until_begun()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gate.cancelled == ["Ann"]
        assert await locked(db) == []
        await until(lambda: _none(sessions(db)), "all sessions are gone")

    async def test_listeners_hear_all_workers_of_the_app(self, database: str) -> None:
        events = Events()
        heard: list[str] = []
        app = App(database, events=events)
        app.include(shared())
        app.events.on("job:complete", lambda event: heard.append(event.job.payload["name"]))
        for name in ("Ann", "Bob"):
            await app.tasks["hello"].enqueue(name)
            await app.run_once()
        assert heard == ["Ann", "Bob"]
        await app.close()

    async def test_a_payload_that_does_not_fit_may_end_the_job(self, database: str) -> None:
        app = App(database, on_invalid_payload="fail")
        app.include(shared())
        async with app, WorkerUtils(database) as utils:
            job = await utils.add_job("hello", {"name": 3})
            assert await app.run_once() == Drained(0, 1)
            found = await utils.get_job(id=job.id)
            assert found is not None
            assert found.attempts == 25

    async def test_the_context_has_what_came_along(self, database: str) -> None:
        app = App(database)
        found: list[Any] = []

        @app.task
        async def hello(ctx: JobContext, name: str) -> None:
            found.append((name, ctx.cron, ctx.trace))

        async with app:
            await app.add_job("hello", {"name": "Ann", "_cron": {"ts": "x"}, "_trace": {"id": 1}})
            await app.add_job("hello", {"name": "Bob"})
            await app.run_once()
        assert found == [("Ann", {"ts": "x"}, {"id": 1}), ("Bob", None, None)]

    async def test_a_wrong_option_is_refused(self, database: str) -> None:
        app = App(database)
        app.include(shared())
        for options, says in [
            ({"concurency": 3}, "takes no 'concurency'. Did you mean concurrency"),
            ({"schema": "x"}, r"The app itself has schema: App\(schema=...\)"),
        ]:
            for running in (app.run(**options), app.run_once(**options)):  # type: ignore[arg-type]
                with pytest.raises(ConfigurationError, match=says):
                    await running

    def test_its_options_are_those_of_run(self) -> None:
        own = {*inspect.signature(App).parameters, "tasks", "task_directory"}
        own -= {"crontab", "crontab_file", "cron_items"}  # which a worker may have beside those of its app
        of: Callable[[Any], set[str]] = lambda function: {*inspect.signature(function).parameters} - own  # noqa: E731
        assert {*RunOptions.__annotations__} == of(graphile_worker.run)
        assert {*OnceOptions.__annotations__} == of(graphile_worker.run_once)


class TestPrograms:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "shop.py").write_text(PROGRAM)
        return tmp_path

    def environment(self, dsn: str | None = None) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error",
            "PYTHONDEVMODE": "1",
            **({"DATABASE_URL": dsn} if dsn else {}),
        }

    def run(
        self, folder: Path, dsn: str | None, *arguments: str, **more: str
    ) -> AbstractAsyncContextManager[Program]:
        return program(
            *(sys.executable, *arguments),
            folder=folder,
            environment={**self.environment(dsn), **more},
            with_errors=True,
        )

    async def test_the_command_runs_an_app(self, db: asyncpg.Connection, database: str, folder: Path) -> None:
        async with self.run(folder, database, "-m", "graphile_worker", "run", "shop:app") as worker:
            await worker.until("Worker connected")
            await db.execute("select graphile_worker.add_job('on_thread', '{\"name\": \"Ann\"}')")
            await worker.until("Hello, Ann")
            worker.send(signal.SIGTERM)
            assert await worker.end() == -signal.SIGTERM
        assert await locked(db) == []

    @pytest.mark.parametrize("says", ["app", "flag"])
    async def test_what_the_app_says_of_its_connection_holds_unless_a_flag_does(
        self, db: asyncpg.Connection, database: str, folder: Path, says: str
    ) -> None:
        text = (folder / "shop.py").read_text()
        own = database if says == "app" else "postgresql://nobody@localhost:1/nothing"
        (folder / "shop.py").write_text(text.replace("App()", f"App({own!r}, max_pool_size=3)"))
        flags = ("-c", database) if says == "flag" else ()
        await db.execute("select graphile_worker.add_job('on_thread', '{\"name\": \"Ann\"}')")
        async with self.run(
            folder,
            "postgresql://nobody@localhost:2/nothing",
            "-m",
            "graphile_worker",
            "run",
            "shop:app",
            "--once",
            *flags,
        ) as worker:
            assert await worker.end() == 0
            assert "Hello, Ann" in worker.text

    async def test_every_flag_is_about_the_apps_database(self, empty_database: str, folder: Path) -> None:
        text = (folder / "shop.py").read_text()
        (folder / "shop.py").write_text(text.replace("App()", f"App({empty_database!r}, schema='mine')"))
        for flags, says in {
            ("--schema-only",): "Schema mine is up to date",
            ("--cleanup", "GC_TASK_IDENTIFIERS"): "Removed 0 jobs, 0 task identifiers and 0 queues",
        }.items():
            async with self.run(
                folder,
                "postgresql://nobody@localhost:2/nothing",
                "-m",
                "graphile_worker",
                "run",
                "shop:app",
                *flags,
            ) as worker:
                assert await worker.end() == 0
                assert says in worker.text

    async def test_a_script_on_an_embedded_server_needs_to_close_nothing(
        self, folder: Path, short_folder: Path
    ) -> None:
        (folder / "script.py").write_text(
            "from shop import *\n"
            "async def main():\n    await app.migrate()\n    await hello.enqueue('async')\n"
            "asyncio.run(main())\n"
            "hello.enqueue_sync('sync')\n"
            "print('done')\n"
        )
        async with self.run(folder, f"embedded:{short_folder}", "script.py", PYTHONDEVMODE="") as script:
            assert await script.end() == 0
            assert script.text.strip() == "done"

    async def test_a_breaking_migration_ends_an_app_with_57_too(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with self.run(folder, database, "-m", "graphile_worker", "run", "shop:app") as worker:
            await worker.until("Worker connected")
            await db.execute("insert into graphile_worker.migrations (id, breaking) values (1000000, true)")
            await db.execute("select pg_notify('worker:migrate', '{\"breaking\": true}')")
            assert await worker.end() == 57
            assert "Traceback" not in worker.text

    async def test_what_is_no_app_is_said(self, folder: Path) -> None:
        async with self.run(
            folder, "postgresql://localhost/x", "-m", "graphile_worker", "run", "shop:asyncio"
        ) as worker:
            assert await worker.end() == 1
            assert "shop:asyncio must be an App, or a mapping of task identifiers" in worker.text
            assert "Traceback" not in worker.text

    async def test_tasks_of_a_folder_add_jobs_of_each_other(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "tasks/mail").mkdir(parents=True)
        (tmp_path / "tasks/mail/send.py").write_text(
            "from graphile_worker import task\n@task\nasync def send(to: str): print('to', to, flush=True)\n"
        )
        (tmp_path / "tasks/welcome.py").write_text(
            "from graphile_worker import task\nfrom tasks.mail.send import send\n"
            "@task\nasync def welcome(name: str): await send.enqueue(to=name)\n"
        )
        await db.execute("select graphile_worker.add_job('welcome', '{\"name\": \"Ann\"}')")
        async with self.run(tmp_path, database, "-m", "graphile_worker", "--once") as worker:
            assert await worker.end() == 0
            assert "to Ann" in worker.text
            assert "(mail/send," in worker.text

    async def test_a_script_needs_to_close_nothing(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        """Python would complain of what is left open: warnings are errors here."""
        (folder / "script.py").write_text(
            "from shop import *\n"
            # In its development mode asyncio warns of steps that take long, as on a busy machine they may.
            "import logging; logging.getLogger('asyncio').setLevel('ERROR')\n"
            "async def main():\n    await hello.enqueue('async')\n"
            "asyncio.run(main())\n"
            "hello.enqueue_sync('sync')\n"
            "child = os.fork()\n"
            "hello.enqueue_sync('child' if child == 0 else 'parent')\n"
            "if child == 0: os._exit(app.close_sync() or 0)\n"
            "os.waitpid(child, 0)\n"
            "print('done')\n"
        )
        async with program(
            sys.executable,
            "script.py",
            folder=folder,
            environment=self.environment(database),
            with_errors=True,
        ) as script:
            assert await script.end() == 0
            assert script.text.strip() == "done"
        names = await db.fetch(
            "select payload ->> 'name' as n from graphile_worker._private_jobs order by id"
        )
        assert {row["n"] for row in names} == {"async", "sync", "parent", "child"}
        await until(lambda: _none(sessions(db)), "all sessions are gone")


async def _none(counting: Any) -> bool:
    gc.collect()
    return bool(await counting == 0)
