"""`App`: its tasks, its connections, and the workers that it runs."""

from __future__ import annotations

import asyncio
import dataclasses
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

from graphile_worker import (
    App,
    ConfigurationError,
    Events,
    InvalidJobError,
    JobContext,
    RunSummary,
    SchemaMissingError,
    WorkerUtils,
    task,
)
from graphile_worker._client.sync_bridge import SyncBridge
from graphile_worker._worker.options import NOT_WORKER_OPTIONS, WorkerOptions
from graphile_worker._worker.run_options import OPTIONS, AppRunOnceOptions, AppRunOptions, AppSettings
from support.programs import Program, program
from support.waiting import until
from support.workers import DEADLINE, Gate, locked

if TYPE_CHECKING:
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


def module(name: str, **attributes: Any) -> ModuleType:
    created = ModuleType(name)
    vars(created).update(attributes)
    return created


def unattached_task() -> Any:
    @task
    async def hello(name: str) -> None: ...

    return hello


async def sessions(db: asyncpg.Connection) -> int:
    found: int = await db.fetchval(
        "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"
        " and datname = current_database()"
    )
    return found


async def until_no_sessions(db: asyncpg.Connection) -> None:
    async def none_left() -> bool:
        gc.collect()
        return await sessions(db) == 0

    await until(none_left, "all sessions are closed")


def test_unknown_task_raises_key_error_with_a_suggestion() -> None:
    app = App()
    app.include(task("send_email")(lambda: None))
    with pytest.raises(KeyError, match=r"has no task 'send_mail'\. Did you mean 'send_email'\?"):
        app.tasks["send_mail"]
    with pytest.raises(KeyError, match=r"has no task 'xyz'\. Its tasks: send_email\."):
        app.tasks["xyz"]
    assert "xyz" not in app.tasks
    assert app.tasks.get("xyz") is None
    assert list(app.tasks) == ["send_email"]


class TestIncluding:
    async def test_include_takes_tasks_modules_names_and_lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, two, three, four = (task(name)(lambda: None) for name in ("one", "two", "three", "four"))
        monkeypatch.setitem(sys.modules, "shop_tasks", module("shop_tasks", three=three, x=3, task=task))
        app = App()
        app.include(one)
        app.include([two, [one]], "shop_tasks")
        app.include(module("m", four=four, again=four))
        assert list(app.tasks) == ["one", "two", "three", "four"]

    def test_include_rejects_values_without_tasks(self) -> None:
        app = App()
        for thing, why in [
            (module("m", x=1), "module m "),
            (print, "@task"),
            (3, "not 3"),
            ({"audit": None}, "not {'audit': None}"),
            (b"audit", "not b'audit'"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                app.include(thing)  # type: ignore[arg-type]
        with pytest.raises(ModuleNotFoundError):
            app.include("no_such_module_anywhere")

    def test_two_tasks_with_one_identifier_are_rejected(self) -> None:
        app = App()
        app.include(unattached_task())
        with pytest.raises(ConfigurationError, match=r"two tasks .*'hello'"):
            app.include(unattached_task())

    async def test_several_apps_may_include_one_task(self, databases: Databases) -> None:
        hello = unattached_task()
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

    def test_task_of_one_app_cannot_be_included_in_another(self) -> None:
        app, other = App(), App()

        @app.task
        async def attached() -> None: ...

        free = task("free")(lambda: None)
        with pytest.raises(ConfigurationError, match="another app"):
            other.include(attached)
        with pytest.raises(ConfigurationError, match=r"\bm\b.*another app"):
            other.include(module("m", attached=attached))
        other.include(module("m", attached=attached, free=free))
        assert list(other.tasks) == ["free"]
        app.include(attached)
        assert list(app.tasks) == ["attached"]

    async def test_app_without_tasks_adds_jobs_but_runs_none(self, database: str) -> None:
        async with App(database) as app:
            assert (await app.add_job("unknown_task")).payload == {}
            for running in (app.run(), app.run_once()):
                with pytest.raises(ConfigurationError, match="no tasks"):
                    await running


class TestConnections:
    def test_closed_loops_are_forgotten_while_another_thread_opens_a_client(self) -> None:
        clients = App("postgresql://localhost:1/nowhere")._clients

        class Loop:
            def is_closed(self) -> bool:
                add()  # as another thread does
                return True

        def add() -> None:
            clients._by_loop[cast("Any", Loop())] = cast("Any", None)

        add()
        clients._forget_closed_loops()
        assert len(clients._by_loop) == 1, "the client of the other thread is left"

    def test_forked_child_does_not_wait_for_the_thread_of_its_parent(self) -> None:
        bridge = SyncBridge()
        assert bridge.run(asyncio.sleep(0, "done")) == "done"
        thread, at_exit = bridge._thread, bridge._at_exit
        assert thread is not None
        assert at_exit is not None
        bridge.reset()
        assert not at_exit.alive
        thread.end()

    async def test_connections_are_opened_on_first_use_and_closed_with_the_app(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        hello = unattached_task()
        app.include(hello)
        await until_no_sessions(db)
        async with app:
            await hello.enqueue("Ann")
            assert await sessions(db) == 1
        await until_no_sessions(db)
        await hello.enqueue("again")
        await app.close()
        await app.close()
        await until_no_sessions(db)

    async def test_each_event_loop_has_its_own_connections_and_closes_them(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        hello = unattached_task()
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
        await until_no_sessions(db)
        assert repr(app._clients._by_loop) == "{}"

    async def test_missing_schema_is_reported_until_migrate_installs_it(self, empty_database: str) -> None:
        async with App(empty_database) as app:
            with pytest.raises(SchemaMissingError):
                await app.add_job("x")
            await app.migrate()
            assert (await app.add_job("x")).id == 1

    def test_invalid_options_are_rejected_when_the_app_is_created(self) -> None:
        for options, why in [
            ({"dsn": "postgresql://localhost:x/y"}, "connection string"),
            ({"schema": ""}, "schema"),
            ({"max_pool_size": 0}, "max_pool_size 0"),
            ({"max_pool_size": 1.5}, "max_pool_size 1.5"),
            ({"pool": 3}, "pool="),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                App(**options)  # type: ignore[arg-type]

    async def test_configure_sets_the_database_before_the_first_connection(self, database: str) -> None:
        app = App("postgresql://localhost:1/nothing")
        app.configure(dsn=database)
        await app.add_job("x")
        with pytest.raises(ConfigurationError, match="connections"):
            app.configure(schema="other")
        await app.close()
        app.configure(schema="other")
        with pytest.raises(SchemaMissingError, match="other"):
            await app.add_job("x")
        await app.close()
        with pytest.raises(ConfigurationError, match="concurrency"):
            app.configure(concurrency=3)

    async def test_callers_pool_stays_open(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=6) as pool:
            app = App(pool=pool)
            app.include(unattached_task())
            await app.tasks["hello"].enqueue("Ann")
            assert await app.run_once() == RunSummary(1, 0)
            await app.close()
            assert await pool.fetchval("select 1") == 1

    async def test_callers_pool_is_not_used_on_another_event_loop(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=6) as pool:
            app = App(pool=pool)
            app.include(unattached_task())
            await app.tasks["hello"].enqueue("Ann")
            with pytest.raises(ConfigurationError, match="another event loop"):
                await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "Bob")
            await app.tasks["hello"].enqueue("Cid")
            await app.close()
            await asyncio.to_thread(app.close_sync)

    async def test_loop_closed_without_closing_the_app_is_forgotten(self, database: str) -> None:
        app = App(database)

        def careless() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(app.add_job("x"))
            [client] = app._clients._by_loop.values()
            loop.run_until_complete(client.utils.close())
            loop.close()

        await asyncio.to_thread(careless)
        app.configure(schema="graphile_worker")
        assert (await app.add_job("x")).id == 2
        assert list(app._clients._by_loop) == [asyncio.get_running_loop()]
        await app.close()

    async def test_close_sync_waits_for_calls_of_other_threads(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Every caller whose job was added gets the job."""
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

    async def test_call_after_a_failed_thread_start_succeeds(
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
    async def test_jobs_can_be_added_after_the_worker_has_stopped(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(database)
        app.include(unattached_task())
        async with app.running() as runner:
            adding = asyncio.create_task(self.keep_adding(app))
            await runner.stop()
            await app.tasks["hello"].enqueue("after the worker")
        await app.tasks["hello"].enqueue("after the block")
        adding.cancel()
        await asyncio.wait([adding])
        assert adding.cancelled()
        await app.close()
        # The cancelled call may have been connecting. The server takes a moment to notice the closed socket.
        await until_no_sessions(db)

    async def keep_adding(self, app: App) -> None:
        while True:
            await app.tasks["hello"].enqueue("x")

    async def test_context_adds_jobs_with_the_options_of_their_tasks(self, database: str) -> None:
        app = App(database)

        @app.task(queue_name="mail", priority=7, job_key="mail:{to}")
        async def send(to: str) -> None: ...

        @app.task
        async def welcome(ctx: JobContext) -> None:
            job = await ctx.add_job("send", {"to": "Ann"}, priority=3)
            assert (job.queue_name, job.priority, job.key) == ("mail", 3, "mail:Ann")
            assert (await ctx.add_job("unknown_task")).payload == {}
            with pytest.raises(InvalidJobError, match="to: Expected `str`"):
                await ctx.add_job("send", {"to": 3})

        async with app:
            await welcome.enqueue()
            assert await app.run_once() == RunSummary(2, 0)

    async def test_running_leaves_signal_handlers_and_shares_its_utils(
        self, db: asyncpg.Connection, database: str
    ) -> None:
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
            await gate.until_started()
            assert (await runner.utils.list_jobs())[0].locked_by == runner.id
        assert gate.cancelled == ["Ann"]
        assert await locked(db) == []
        await until_no_sessions(db)

    async def test_running_job_may_finish_within_the_shutdown_grace(self, database: str) -> None:
        app = App(database)
        gate = Gate()

        @app.task
        async def hello(name: str) -> None:
            await gate(name)

        async with app.running(shutdown_grace=DEADLINE):
            await hello.enqueue("Ann")
            await gate.until_started()
            asyncio.get_running_loop().call_soon(gate.open)
        assert gate.ended == ["Ann"]

    async def test_exception_inside_running_propagates(self, db: asyncpg.Connection, database: str) -> None:
        app = App(database)
        app.include(unattached_task())

        async def broken() -> None:
            async with app.running():
                raise RuntimeError("from the program")

        with pytest.raises(RuntimeError, match="from the program"):
            await broken()
        await until_no_sessions(db)

    async def test_run_continues_until_it_is_cancelled(self, db: asyncpg.Connection, database: str) -> None:
        app = App(database)
        gate = Gate()

        @app.task
        async def hello(name: str) -> None:
            await gate(name)

        await app.add_job("hello", {"name": "Ann"})
        await app.close()
        running = asyncio.create_task(app.run(handle_signals=False, shutdown_grace=0))
        await gate.until_started()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gate.cancelled == ["Ann"]
        assert await locked(db) == []
        await until_no_sessions(db)

    async def test_event_listeners_receive_events_of_all_workers_of_the_app(self, database: str) -> None:
        events = Events()
        received: list[str] = []
        app = App(database, events=events)
        app.include(unattached_task())
        app.events.on("job:complete", lambda event: received.append(event.job.payload["name"]))
        for name in ("Ann", "Bob"):
            await app.tasks["hello"].enqueue(name)
            await app.run_once()
        assert received == ["Ann", "Bob"]
        await app.close()

    async def test_invalid_payload_fails_the_job_permanently_if_configured(self, database: str) -> None:
        app = App(database, on_invalid_payload="fail")
        app.include(unattached_task())
        async with app, WorkerUtils(database) as utils:
            job = await utils.add_job("hello", {"name": 3})
            assert await app.run_once() == RunSummary(0, 1)
            found = await utils.get_job(id=job.id)
            assert found is not None
            assert found.attempts == 25

    async def test_context_has_cron_and_trace_of_the_payload(self, database: str) -> None:
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

    async def test_unknown_option_or_option_of_the_app_is_rejected(self, database: str) -> None:
        app = App(database)
        app.include(unattached_task())
        for options, message in [
            ({"concurency": 3}, "'concurency'.*concurrency"),
            ({"schema": "x"}, r"'schema'.*App\(schema=...\)"),
        ]:
            for running in (app.run(**options), app.run_once(**options)):  # type: ignore[arg-type]
                with pytest.raises(ConfigurationError, match=message):
                    await running

    def test_worker_options_are_the_declared_options(self) -> None:
        fields = {field.name for field in dataclasses.fields(WorkerOptions)} - {"once"}
        assert fields == OPTIONS.keys() - NOT_WORKER_OPTIONS

    def test_app_and_client_have_the_declared_defaults(self) -> None:
        for function in (App, WorkerUtils):
            for name, parameter in inspect.signature(function).parameters.items():
                assert parameter.default == OPTIONS[name].default, name

    def test_run_options_of_an_app_exclude_its_settings(self) -> None:
        settings = {*inspect.signature(App).parameters} - {"crontab", "crontab_file", "cron_items"}
        assert settings == {"dsn", *AppSettings.__annotations__}
        assert not settings & {*AppRunOptions.__annotations__, *AppRunOnceOptions.__annotations__}


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

    async def test_command_runs_an_app(self, db: asyncpg.Connection, database: str, folder: Path) -> None:
        async with self.run(folder, database, "-m", "graphile_worker", "run", "shop:app") as worker:
            await worker.until("Worker connected")
            await db.execute("select graphile_worker.add_job('on_thread', '{\"name\": \"Ann\"}')")
            await worker.until("Hello, Ann")
            worker.send(signal.SIGTERM)
            assert await worker.end() == -signal.SIGTERM
        assert await locked(db) == []

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("source", ["app", "flag"])
    async def test_connection_flag_overrides_the_dsn_of_the_app(
        self, db: asyncpg.Connection, database: str, folder: Path, source: str
    ) -> None:
        text = (folder / "shop.py").read_text()
        dsn = database if source == "app" else "postgresql://localhost:1/nothing"
        (folder / "shop.py").write_text(text.replace("App()", f"App({dsn!r}, max_pool_size=3)"))
        flags = ("-c", database) if source == "flag" else ()
        await db.execute("select graphile_worker.add_job('on_thread', '{\"name\": \"Ann\"}')")
        async with self.run(
            folder,
            "postgresql://localhost:2/nothing",
            "-m",
            "graphile_worker",
            "run",
            "shop:app",
            "--once",
            *flags,
        ) as worker:
            assert await worker.end() == 0
            assert "Hello, Ann" in worker.text

    async def test_schema_and_cleanup_flags_use_the_database_of_the_app(
        self, empty_database: str, folder: Path
    ) -> None:
        text = (folder / "shop.py").read_text()
        (folder / "shop.py").write_text(text.replace("App()", f"App({empty_database!r}, schema='mine')"))
        for flags, message in {
            ("--schema-only",): "Schema mine is up to date",
            ("--cleanup", "GC_TASK_IDENTIFIERS"): "Removed 0 jobs, 0 task identifiers and 0 queues",
        }.items():
            async with self.run(
                folder,
                "postgresql://localhost:2/nothing",
                "-m",
                "graphile_worker",
                "run",
                "shop:app",
                *flags,
            ) as worker:
                assert await worker.end() == 0
                assert message in worker.text

    @pytest.mark.slow
    async def test_script_on_an_embedded_server_needs_no_close(
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

    async def test_breaking_migration_ends_an_app_with_exit_code_57(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with self.run(folder, database, "-m", "graphile_worker", "run", "shop:app") as worker:
            await worker.until("Worker connected")
            await db.execute("insert into graphile_worker.migrations (id, breaking) values (1000000, true)")
            await db.execute("select pg_notify('worker:migrate', '{\"breaking\": true}')")
            assert await worker.end() == 57
            assert "Traceback" not in worker.text

    async def test_target_that_is_not_an_app_is_reported(self, folder: Path) -> None:
        async with self.run(
            folder, "postgresql://localhost/x", "-m", "graphile_worker", "run", "shop:asyncio"
        ) as worker:
            assert await worker.end() == 1
            assert "shop:asyncio" in worker.text
            assert "Traceback" not in worker.text

    async def test_tasks_of_a_folder_enqueue_each_other(
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

    async def test_script_needs_no_close(self, db: asyncpg.Connection, database: str, folder: Path) -> None:
        """Python would warn about open connections, and warnings are errors here."""
        (folder / "script.py").write_text(
            "from shop import *\n"
            # In development mode asyncio warns of slow callbacks, which are normal on a busy machine.
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
        await until_no_sessions(db)
