"""The verb `web`: its link, the ways to sign in, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from graphile_worker.cli.command import root
from graphile_worker.testing import Databases
from support.commands import COMMAND
from support.programs import program

TOKEN = "a-long-random-secret"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def environment(**more: str) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", **more}


async def test_command_prints_a_link_that_works_once_and_ends_by_its_signal(
    tmp_path: Path, database: str
) -> None:
    (tmp_path / "shop.py").write_text(
        "from graphile_worker import App\napp = App()\n"
        "@app.cron('0 4 * * *')\n@app.task\nasync def report(): ..."
    )
    async with program(
        COMMAND, "web", "shop:app", "--port", "0", "--root-path", "/queue", "--read-only",
        folder=tmp_path, environment=environment(DATABASE_URL=database), with_errors=True,
    ) as running:  # fmt: skip
        await running.until("Stop with Ctrl-C")
        [link] = re.findall(r"Dashboard: (\S+)", running.text)
        assert "/queue/?token=" in link
        async with httpx.AsyncClient() as browser, httpx.AsyncClient() as stranger:
            assert (await stranger.get(f"{link}x")).status_code == 401
            answer = await browser.get(link, follow_redirects=True)
            assert answer.status_code == 200
            assert "token" not in str(answer.url)
            assert (await stranger.get(link)).status_code == 401
            await running.until("Another browser: ")
            cron = await browser.get(f"{answer.url}api/v1/cron")
            assert [row["id"] for row in cron.json()["items"]] == ["report"]
            refused = await browser.post(
                f"{answer.url}api/v1/jobs", json={"task": "x"}, headers={"Sec-Fetch-Site": "same-origin"}
            )
            assert refused.status_code == 403
        running.send(signal.SIGINT)
        await running.end()
        assert "Traceback" not in running.text


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--host", "0.0.0.0"], {}, "users must sign in"),
        (["--trusted-proxy", "10.0.0.1"], {}, "--proxy-header"),
        (["--proxy-header", "X-User", "--trusted-proxy", "nowhere"], {}, "nowhere"),
        (["--permission", "fly"], {}, "fly"),
        ([], {"GRAPHILE_WORKER_WEB_TOKEN": "short"}, "16 characters"),
        ([], {"GRAPHILE_WORKER_WEB_USER": "ann"}, "a colon and a password"),
        ([], {"GRAPHILE_WORKER_WEB_USER": "a:b", "GRAPHILE_WORKER_WEB_TOKEN": TOKEN}, "only one of"),
        (["--port", "99999"], {}, "99999"),
        (["--host", "no such host"], {"GRAPHILE_WORKER_WEB_TOKEN": TOKEN}, "Invalid host"),
    ],
)
def test_wrong_use_of_the_command_is_explained(
    arguments: list[str], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(root, ["web", *arguments])
    assert done.exit_code != 0
    assert message in done.output + str(done.exception)
