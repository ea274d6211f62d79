"""The pytest fixtures, as another project uses them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

APP = """
    from graphile_worker import App

    app, greeted = App(), []

    @app.task
    async def hello(name: str) -> None:
        greeted.append(name)
"""
STRICT = ("-W", "error", "--strict-markers", "--strict-config", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, graphile_worker_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a project whose tests use this test run's server."""
    monkeypatch.setenv("TEST_DATABASE_URL", graphile_worker_server)
    pytester.makepyfile(shop=APP)
    pytester.makeini("[pytest]\n")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*STRICT, "-p", "no:hypothesispytest", *arguments, timeout=60)


def test_fixtures_work_in_sync_tests_without_async_plugins(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        from shop import app, hello, greeted
        from graphile_worker import RunSummary
        from graphile_worker.testing import assert_enqueued, drain, override

        @pytest.fixture
        def queue(graphile_worker_dsn):
            with override(app, dsn=graphile_worker_dsn):
                yield app

        @pytest.mark.parametrize("name", ["Ann", "Bob"])
        def test_hello(queue, name):
            hello.enqueue_sync(name=name)
            queue.run_sync(lambda: assert_enqueued(hello, name=name))
            assert queue.run_sync(lambda: drain(queue)) == RunSummary(succeeded=1)
            assert greeted[-1] == name
    """)
    run(pytester, "-p", "no:asyncio", "-p", "no:anyio").assert_outcomes(passed=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_fixtures_work_with_pytest_asyncio(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makepyfile("""
        import pytest
        import pytest_asyncio
        from shop import app, hello
        from graphile_worker import RunSummary
        from graphile_worker.testing import drain, override

        @pytest_asyncio.fixture
        async def queue(graphile_worker_dsn):
            async with override(app, dsn=graphile_worker_dsn):
                yield app

        @pytest.mark.asyncio
        @pytest.mark.parametrize("name", ["Ann", "Bob"])
        async def test_hello(queue, name):
            await hello.enqueue(name=name)
            assert await drain(queue) == RunSummary(succeeded=1)

        @pytest.mark.asyncio
        async def test_drain_with_dsn_fixture(graphile_worker_dsn):
            assert await drain({"hello": print}, dsn=graphile_worker_dsn) == RunSummary()
    """)
    settings = ("-o", f"asyncio_mode={mode}", "-o", "asyncio_default_fixture_loop_scope=function")
    run(pytester, "-p", "no:anyio", *settings).assert_outcomes(passed=3)


@pytest.mark.slow
def test_fixtures_work_with_anyio(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        from shop import app, hello
        from graphile_worker import RunSummary
        from graphile_worker.testing import drain, override

        pytestmark = pytest.mark.anyio

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.fixture
        async def queue(graphile_worker_dsn, anyio_backend):
            async with override(app, dsn=graphile_worker_dsn):
                yield app

        @pytest.mark.parametrize("name", ["Ann", "Bob"])
        async def test_hello(queue, name):
            await hello.enqueue(name=name)
            assert await drain(queue) == RunSummary(succeeded=1)
    """)
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=2)


def test_server_fixture_can_be_redefined(
    pytester: pytest.Pytester, graphile_worker_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_DATABASE_URL", "postgresql://unused@nowhere.invalid/")
    pytester.makeconftest(f"""
        import pytest

        @pytest.fixture(scope="session")
        def graphile_worker_server():
            return {graphile_worker_server!r}
    """)
    pytester.makepyfile("""
        def test_dsn(graphile_worker_dsn):
            assert "/gw_test_" in graphile_worker_dsn
    """)
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=1)


def test_leaked_connection_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import asyncio
        import asyncpg

        loop = asyncio.new_event_loop()

        def test_leaks_connection(graphile_worker_dsn):
            global connection
            connection = loop.run_until_complete(asyncpg.connect(graphile_worker_dsn))

        def test_end():
            connection.terminate()
            loop.close()
    """)
    result = run(pytester, "-p", "no:asyncio")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*Connections were left open*"])


@pytest.mark.slow
def test_plugin_can_be_disabled_and_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_plugin_loaded(request):
            loaded = request.config.pluginmanager.has_plugin("graphile_worker")
            assert loaded == (not request.config.getoption("verbose"))
            heavy = {name for name in sys.modules if name.split(".")[0] in {"asyncpg", "msgspec"}}
            assert not heavy
    """)
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=1)
    run(pytester, "-p", "no:asyncio", "-p", "no:graphile_worker", "-v").assert_outcomes(passed=1)


def test_importing_the_plugin_imports_nothing_else() -> None:
    program = (
        "import sys; import graphile_worker.testing.plugin;"
        "print({name for name in sys.modules if name.startswith('graphile_worker')})"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    names = {"graphile_worker", "graphile_worker.testing", "graphile_worker.testing.plugin"}
    lazy_names = {"graphile_worker._base", "graphile_worker._base.lazy_names"}
    assert eval(done.stdout) == names | lazy_names
