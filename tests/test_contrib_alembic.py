"""Alembic: revisions install, upgrade and drop the schema, online and as SQL, and autogenerate ignores it."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, make_url

from graphile_worker import ConfigurationError, SchemaError, SchemaTooOldError, WorkerUtils, run_migrations
from graphile_worker._db.queries.diagnostics import describe_schema
from graphile_worker._db.schema import contract
from graphile_worker._db.sql_files import Schema
from graphile_worker.embedded.binaries import Binaries

if TYPE_CHECKING:
    from collections.abc import Callable

ENV = """
import asyncio
from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from graphile_worker.contrib.alembic import include_name

url = context.config.attributes["url"]
chosen = context.config.attributes.get("options", {})

def run(connection):
    context.configure(connection=connection, transaction_per_migration=True, **chosen)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()

if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, dialect_opts={"paramstyle": "named"})
    with context.begin_transaction():
        context.run_migrations()
elif "asyncpg" in url:
    asyncio.run(run_async())
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        run(connection)
"""
TEMPLATE = """
revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}
def upgrade():
    ${upgrades}
"""
QUEUE = """
def upgrade():
    install_schema({schema})

def downgrade():
    drop_schema({schema})
"""
SHOP = """
def upgrade():
    op.execute("create table orders (id integer primary key)")
    op.execute("select graphile_worker.add_job('count_orders')")

def downgrade():
    op.execute("drop table orders")
"""


class Project:
    """An Alembic project whose revisions install the queue, and then create a table of the application."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "versions").mkdir()
        (folder / "env.py").write_text(ENV)
        (folder / "script.py.mako").write_text(TEMPLATE)

    def add(self, number: int, text: str) -> None:
        before = f'"{number - 1}"' if number > 1 else "None"
        heading = dedent(f"""
            from alembic import op
            from graphile_worker.contrib.alembic import drop_schema, install_schema
            revision, down_revision = "{number}", {before}
            """)
        (self.folder / "versions" / f"{number}_revision.py").write_text(heading + text)

    async def run(
        self,
        action: Callable[..., Any],
        *arguments: Any,
        dsn: str,
        driver: str = "psycopg",
        options: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> tuple[Any, str]:
        """Run a command of Alembic, and return its result and its output."""
        output = io.StringIO()
        config = Config(output_buffer=output, stdout=output)
        config.set_main_option("script_location", str(self.folder))
        config.set_main_option("path_separator", "os")
        url = make_url(dsn).set(drivername=f"postgresql+{driver}")
        config.attributes |= {
            "url": url.render_as_string(hide_password=False),
            "options": options or {},
        }
        result = await asyncio.to_thread(action, config, *arguments, **keywords)
        return result, output.getvalue()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.add(1, QUEUE.format(schema=""))
    made.add(2, SHOP)
    return made


@pytest.fixture(params=["psycopg", "asyncpg"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def fetch(dsn: str, statement: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def run_statements(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def differences(dsn: str, schema: str = "graphile_worker") -> list[contract.Difference]:
    """Compare the schema with the one that the library installs."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            return contract.differences(await describe_schema(connection, Schema(schema)))
    finally:
        await connection.close()


def psql(dsn: str, script: str) -> subprocess.CompletedProcess[str]:
    program = Binaries.from_extra().program("psql")
    return subprocess.run(
        [program, "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--quiet", "--file=-", dsn],
        input=script, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


VERSION = "select version_num from public.alembic_version"
QUEUE_EXISTS = "select to_regnamespace('graphile_worker') is not null"


class TestOnline:
    async def test_upgrade_installs_the_schema_that_migrate_installs(
        self, project: Project, empty_database: str, driver: str
    ) -> None:
        await project.run(command.upgrade, "head", dsn=empty_database, driver=driver)
        assert await differences(empty_database) == []
        assert await fetch(empty_database, VERSION) == "2"
        async with WorkerUtils(empty_database) as utils:
            [job] = await utils.list_jobs()
            assert job.task_identifier == "count_orders"
            await utils.migrate()  # nothing is left to do
        assert await differences(empty_database) == []

    async def test_downgrade_drops_the_schema_and_upgrade_installs_it_again(
        self, project: Project, empty_database: str, driver: str
    ) -> None:
        await project.run(command.upgrade, "head", dsn=empty_database, driver=driver)
        await project.run(command.downgrade, "base", dsn=empty_database, driver=driver)
        assert not await fetch(empty_database, QUEUE_EXISTS)
        await project.run(command.upgrade, "head", dsn=empty_database, driver=driver)
        assert await fetch(empty_database, QUEUE_EXISTS)

    async def test_schema_of_an_older_release_is_upgraded_with_indexes_built_concurrently(
        self, project: Project, database: str, driver: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await run_statements(
            database,
            "select graphile_worker.add_job('waiting')",
            "drop index graphile_worker._private_python_jobs_with_flags",
            "update pg_index set indisvalid = false "
            "where indexrelid = 'graphile_worker._private_python_jobs_with_queue'::regclass",
            "delete from graphile_worker._private_python_migrations where id > 1",
        )
        caplog.set_level(logging.INFO, "sqlalchemy.engine")
        await project.run(command.upgrade, "head", dsn=database, driver=driver)
        statements = [record.getMessage() for record in caplog.records]
        assert sum(text.startswith("create index concurrently") for text in statements) == 2
        assert await differences(database) == []
        assert await fetch(database, VERSION) == "2"
        assert await fetch(database, "select count(*) from graphile_worker.jobs") == 2

    async def test_current_schema_is_left_alone(self, project: Project, database: str) -> None:
        before = await fetch(
            database, "select max(applied_at) from graphile_worker._private_python_migrations"
        )
        await project.run(command.upgrade, "head", dsn=database)
        after = await fetch(
            database, "select max(applied_at) from graphile_worker._private_python_migrations"
        )
        assert after == before

    async def test_later_statements_of_the_revision_have_the_role_and_search_path_as_before(
        self, project: Project, empty_database: str, driver: str
    ) -> None:
        text = QUEUE.format(schema="").replace(
            "install_schema()\n",
            "op.execute(\"set local search_path = 'public'\")\n    install_schema()\n"
            '    op.execute("create table settings as '
            "select current_setting('search_path') as path, current_setting('role') as role\")\n",
        )
        project.add(1, text)
        await project.run(command.upgrade, "1", dsn=empty_database, driver=driver)
        assert await fetch(empty_database, "select path || ' ' || role from public.settings") == "public none"

    async def test_failed_revision_leaves_no_schema(self, project: Project, empty_database: str) -> None:
        project.add(1, QUEUE.format(schema="").replace("install_schema()", "install_schema(); 1 / 0"))
        with pytest.raises(ZeroDivisionError):
            await project.run(command.upgrade, "head", dsn=empty_database)
        assert not await fetch(empty_database, QUEUE_EXISTS)

    async def test_schema_may_have_any_name(self, project: Project, empty_database: str, driver: str) -> None:
        name = "odd %s :x $script$ \"'schema"
        project.add(1, QUEUE.format(schema=repr(name)))
        await project.run(command.upgrade, "1", dsn=empty_database, driver=driver)
        assert await differences(empty_database, name) == []
        await project.run(command.downgrade, "base", dsn=empty_database, driver=driver)
        assert await fetch(empty_database, "select count(*) from pg_namespace where nspname ~ '^odd'") == 0

    async def test_role_that_may_not_create_schemas_is_told_what_to_do(
        self, project: Project, empty_database: str
    ) -> None:
        role = f"clerk_{uuid4().hex}"
        await run_statements(
            empty_database, f"create role {role} login", f"grant all on schema public to {role}"
        )
        url = make_url(empty_database).set(username=role)
        try:
            with pytest.raises(SchemaError, match=r"create schema .* authorization YOUR_ROLE"):
                await project.run(command.upgrade, "head", dsn=url.render_as_string(hide_password=False))
        finally:
            await run_statements(empty_database, f"drop owned by {role}", f"drop role {role}")

    async def test_installation_in_autocommit_mode_is_refused(
        self, project: Project, empty_database: str, driver: str
    ) -> None:
        text = QUEUE.format(schema="").replace(
            "install_schema()", "\n    with op.get_context().autocommit_block():\n        install_schema()"
        )
        project.add(1, text)
        with pytest.raises(ConfigurationError, match="Leave out autocommit_block"):
            await project.run(command.upgrade, "head", dsn=empty_database, driver=driver)
        assert not await fetch(empty_database, QUEUE_EXISTS)

    async def test_worker_that_installs_the_schema_at_the_same_time_does_no_harm(
        self, project: Project, empty_database: str
    ) -> None:
        await asyncio.gather(
            run_migrations(dsn=empty_database),
            project.run(command.upgrade, "1", dsn=empty_database),
            run_migrations(dsn=empty_database),
        )
        assert await differences(empty_database) == []
        assert await fetch(empty_database, VERSION) == "1"

    async def test_schema_that_is_too_old_is_refused(self, project: Project, database: str) -> None:
        await run_statements(database, "delete from graphile_worker.migrations where id > 11")
        with pytest.raises(SchemaTooOldError, match="revision 11"):
            await project.run(command.upgrade, "head", dsn=database)


class TestOffline:
    async def script(self, project: Project, dsn: str, driver: str = "psycopg") -> str:
        _, text = await project.run(command.upgrade, "head", dsn=dsn, driver=driver, sql=True)
        return text

    async def test_script_installs_the_schema_with_psql(
        self, project: Project, empty_database: str, driver: str
    ) -> None:
        done = psql(empty_database, await self.script(project, empty_database, driver))
        assert done.returncode == 0, done.stderr
        assert await differences(empty_database) == []
        assert await fetch(empty_database, VERSION) == "2"
        async with WorkerUtils(empty_database) as utils:
            await utils.migrate()
        assert await differences(empty_database) == []

    async def test_script_skips_what_is_installed(self, project: Project, database: str) -> None:
        before = await fetch(
            database, "select max(applied_at) from graphile_worker._private_python_migrations"
        )
        done = psql(database, await self.script(project, database))
        assert done.returncode == 0, done.stderr
        assert await differences(database) == []
        after = await fetch(
            database, "select max(applied_at) from graphile_worker._private_python_migrations"
        )
        assert after == before

    async def test_second_revision_that_installs_the_schema_changes_nothing(
        self, project: Project, empty_database: str
    ) -> None:
        project.add(3, QUEUE.format(schema=""))
        done = psql(empty_database, await self.script(project, empty_database))
        assert done.returncode == 0, done.stderr
        assert await differences(empty_database) == []
        assert await fetch(empty_database, "select count(*) from graphile_worker.jobs") == 1

    async def test_script_fails_on_a_schema_that_needs_an_upgrade(
        self, project: Project, database: str
    ) -> None:
        await run_statements(database, "delete from graphile_worker.migrations where id = 20")
        done = psql(database, await self.script(project, database))
        assert done.returncode != 0
        assert "Upgrade it with: graphile-worker migrate" in done.stderr

    async def test_downgrade_script_drops_the_schema(self, project: Project, empty_database: str) -> None:
        await project.run(command.upgrade, "head", dsn=empty_database)
        _, text = await project.run(command.downgrade, "2:base", dsn=empty_database, sql=True)
        done = psql(empty_database, text)
        assert done.returncode == 0, done.stderr
        assert not await fetch(empty_database, QUEUE_EXISTS)

    async def test_script_works_for_a_schema_with_any_name(
        self, project: Project, empty_database: str
    ) -> None:
        name = "odd %s :x $graphile_worker$ \"'schema"
        project.add(1, QUEUE.format(schema=repr(name)))
        _, text = await project.run(command.upgrade, "1", dsn=empty_database, sql=True)
        done = psql(empty_database, text)
        assert done.returncode == 0, done.stderr
        assert await differences(empty_database, name) == []


class TestAutogenerate:
    @pytest.mark.parametrize("is_filtered", [True, False])
    async def test_autogenerate_drops_the_tables_of_the_queue_only_without_the_filter(
        self, project: Project, database: str, *, is_filtered: bool
    ) -> None:
        from graphile_worker.contrib.alembic import include_name  # noqa: PLC0415

        await run_statements(
            database,
            "create schema sales",
            "create table sales.orders (id integer primary key)",
            "create table sales.old (id integer primary key)",
        )
        await project.run(command.stamp, "head", dsn=database)

        def keep_old(name: str | None, kind: Any, _parents: Any) -> bool:
            return (kind, name) != ("table", "old")

        options = {"target_metadata": MetaData(), "include_schemas": True, "include_name": keep_old}
        if is_filtered:
            options["include_name"] = include_name(also=keep_old)
        script, _ = await project.run(
            command.revision, autogenerate=True, dsn=database, options=options, message="check"
        )
        text = Path(script.path).read_text()
        assert "drop_table('orders', schema='sales')" in text
        assert "drop_table('old'" not in text
        assert ("graphile_worker" in text) is not is_filtered
