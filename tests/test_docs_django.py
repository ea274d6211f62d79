"""The Django guide, word for word: its commands, its files and its tests, in an empty folder."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from support import stacks
from support.postgres import ROOT
from support.programs import program

PAGE = (ROOT / "docs" / "guides" / "django.md").read_text()
DJANGO_6 = ROOT / ".cache" / "peers" / "django-6"
BLOCKS = re.findall(r"```(console|python)\n(.*?)```", PAGE, re.DOTALL)


class Project:
    """The folder of someone who reads the guide."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        given = conninfo_to_dict(dsn)
        names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
        self.database = {key: str(given.get(name) or "") for key, name in names.items()}

    async def run(self, *command: str, python: Path | None = None) -> str:
        scripts = Path(sys.executable).parent
        environment = {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "DJANGO_SETTINGS_MODULE": "mysite.settings",
        }
        path = python or scripts / command[0]
        async with program(
            path, *command[1:], folder=self.folder, environment=environment, with_errors=True
        ) as running:
            assert await running.end_at_any_time() == 0, running.text
            return running.text

    def write(self, code: str) -> None:
        """Write a block that begins with the path of a file. Settings are added to what is there."""
        name = code.partition("\n")[0].removeprefix("# ")
        path = self.folder / name
        if name == "mysite/settings.py":
            # The guide's server is on localhost.
            code = f"{code}\nDATABASES['default'] |= {self.database!r}\n"
            code = path.read_text() + code
        path.write_text(code)


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line.removeprefix("$ ")) for line in text.splitlines()]


@pytest.mark.slow
async def test_reader_of_the_guide_gets_a_project_that_works(empty_database: str, tmp_path: Path) -> None:
    stacks.skip_old_server_for_django(empty_database)
    project = Project(tmp_path, empty_database)
    blocks = iter(BLOCKS)
    consoles = 0
    printed = ""
    snippets = []
    for kind, text in blocks:
        if kind == "console":
            consoles += 1
            for command in commands(text):
                if command[0] != "pip":
                    printed = await project.run(*command)
        elif text.startswith("# "):
            project.write(text)
        else:
            snippets.append(text)
        if consoles == 2 and kind == "console":
            assert "Wrote the invoice of order 1" in printed
    await project.run("python", "manage.py", "check", "--fail-level", "WARNING")
    assert "\nOK" in await project.run("python", "manage.py", "test", "--noinput")
    # In this environment Django's tasks come from the backport.
    shell = "\n".join(snippets).replace("from django.tasks", "from django_tasks")
    shell += "\nassert result.status == 'READY' and result.task.serial == 'mails'"
    view = "from shop.views import *\nassert place_order(None).status_code == 200"
    await asyncio.gather(
        project.run("python", "manage.py", "shell", "-c", shell),
        project.run("python", "manage.py", "shell", "-c", view),
    )
    if (DJANGO_6 / ".done").exists():
        tests = ("pytest", "-m", "pytest", "-q", "-p", "no:cacheprovider", "shop/test_orders.py")
        assert "1 passed" in await project.run(*tests, python=DJANGO_6 / "bin" / "python")


@pytest.mark.parametrize("key", re.findall(r"^    \"([A-Z_]+)\": ", PAGE, re.MULTILINE))
def test_keys_of_the_guide_exist(key: str) -> None:
    known = (ROOT / "src/graphile_worker/contrib/django/configuration.py").read_text()
    assert f'"{key}"' in known or key in {"NAME", "USER", "HOST", "ENGINE"}
