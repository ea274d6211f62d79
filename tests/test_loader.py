"""Tasks from files: which there are, and what is said about those that cannot be loaded."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphile_worker import ConfigurationError, run, run_once
from graphile_worker.executable import Executable
from graphile_worker.loader import load_named, load_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what is imported from it is forgotten."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tasks"]:
        del sys.modules[name]
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name.startswith("tasks"):
            del sys.modules[name]


def write(path: Path, text: str, *, executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)
    return path


def test_nested_folders_are_part_of_the_identifier(here: Path) -> None:
    write(here / "tasks/hello.py", "def hello(payload): ...")
    write(here / "tasks/mail/send/now.py", "async def now(payload, ctx): ...")
    assert list(load_tasks("tasks")) == ["hello", "mail/send/now"]


@pytest.mark.parametrize(
    "text",
    [
        "def task(payload): return 'it'\ndef other(payload): return 'not it'",
        "def send_mail(payload): return 'it'",
        "from graphile_worker import task\n@task\ndef other(payload): return 'it'\ndef more(payload): ...",
        "from graphile_worker import task\ndef send_mail(payload): return 'it'",
        "class Sender:\n  def __call__(self, payload): return 'it'\ntask = Sender()",
    ],
)
def test_the_handler_is_task_or_named_like_the_file_or_has_the_decorator(here: Path, text: str) -> None:
    write(here / "tasks/send-mail.py", text)
    tasks = load_tasks("tasks")
    assert list(tasks) == ["send-mail"]
    assert tasks["send-mail"](None) == "it"


def test_a_file_may_have_more_tasks_if_they_are_named(here: Path) -> None:
    write(
        here / "tasks/mail.py",
        "from graphile_worker import task\n"
        "def mail(payload): ...\n"
        "@task('mail/later')\ndef later(payload): ...\n",
    )
    assert sorted(load_tasks("tasks")) == ["mail", "mail/later"]


def test_files_that_can_be_executed_are_tasks_and_others_are_not(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "graphile_worker")
    script = write(here / "tasks/backup.sh", "#!/bin/sh\n", executable=True)
    write(here / "tasks/README.md", "")
    write(here / "tasks/what is this.sh", "", executable=True)
    write(here / "tasks/.hidden.py", "1 / 0")
    write(here / "tasks/_shared.py", "1 / 0")
    write(here / "tasks/__pycache__/x.py", "1 / 0")
    (here / "tasks/linked").symlink_to(here / "tasks/backup.sh")
    tasks = load_tasks("tasks")
    assert list(tasks) == ["backup", "linked"]
    assert isinstance(tasks["backup"], Executable)
    assert tasks["backup"].path == script
    write(here / "tasks/forgotten.sh", "#!/bin/sh")
    assert list(load_tasks("tasks")) == ["backup", "linked"]
    assert "forgotten.sh is ignored: it cannot be executed. Try: chmod +x tasks/forgotten.sh" in caplog.text
    assert "README.md is ignored: it is neither Python" in caplog.text
    assert "what is this.sh is ignored: its name cannot be that of a task" in caplog.text


def test_tasks_can_import_each_other_and_what_is_beside_the_folder(here: Path) -> None:
    write(here / "shop.py", "PRICE = 7")
    write(here / "tasks/_shared.py", "def twice(n): return 2 * n")
    write(
        here / "tasks/pay.py",
        "from shop import PRICE\nfrom ._shared import twice\ndef pay(payload): return twice(PRICE)",
    )
    assert load_tasks("tasks")["pay"](None) == 14


def test_the_folder_may_be_a_package(here: Path) -> None:
    write(here / "tasks/__init__.py", "NAME = 'shop'")
    write(here / "tasks/name.py", "from tasks import NAME\ndef name(payload): return NAME")
    assert load_tasks("tasks")["name"](None) == "shop"


def test_a_folder_may_stand_beside_a_file_of_its_name(here: Path) -> None:
    write(here / "tasks/mail.py", "def mail(payload): return 1")
    write(here / "tasks/mail/send.py", "def send(payload): return 2")
    write(here / "tasks/v1.2/send.py", "1 / 0")
    tasks = load_tasks("tasks")
    assert {name: function(None) for name, function in tasks.items()} == {"mail": 1, "mail/send": 2}


def test_in_a_module_a_task_has_the_name_that_it_has_there(here: Path) -> None:
    write(
        here / "tasks.py",
        "from graphile_worker import task\n"
        "def twice(function):\n  def wrapper(payload): return 2 * function(payload)\n  return wrapper\n"
        "one = task(lambda payload: 1)\n"
        "@task\n@twice\ndef two(payload): return 1\n"
        "class Three:\n  def __call__(self, payload): return 3\n"
        "three = task(Three())\n",
    )
    tasks = load_tasks("tasks")
    assert {name: function(None) for name, function in tasks.items()} == {"one": 1, "two": 2, "three": 3}
    write(
        here / "double.py",
        "from graphile_worker import task\n@task('x')\ndef a(p): ...\n@task('x')\ndef b(p): ...",
    )
    with pytest.raises(ConfigurationError, match=r"double.py has two tasks 'x'\. Rename one"):
        load_tasks("double.py")


def test_two_folders_of_the_same_name_do_not_get_in_each_others_way(here: Path) -> None:
    write(here / "a/tasks/one.py", "def one(payload): return 1")
    write(here / "b/tasks/one.py", "def one(payload): return 2")
    assert [load_tasks(f"{folder}/tasks")["one"](None) for folder in "ab"] == [1, 2]


def test_a_module_in_place_of_the_folder_has_many(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(
        here / "tasks.py",
        "from os.path import join\n"
        "def one(payload): ...\n"
        "async def two(payload, ctx): ...\n"
        "def _hidden(payload): ...\n"
        "def three(a, b, c): ...\n"
        "class Four: ...\n",
    )
    assert list(load_tasks("tasks")) == ["one", "two"]
    assert "three is ignored" in caplog.text


def test_in_a_module_the_decorator_and_all_choose(here: Path) -> None:
    write(
        here / "marked.py",
        "from graphile_worker import task\n"
        "def helper(payload): ...\n"
        "@task\ndef one(payload): ...\n"
        "@task('a/two')\ndef two(payload): ...\n",
    )
    write(here / "listed.py", "__all__ = ['one']\ndef one(payload): ...\ndef helper(payload): ...\n")
    assert list(load_tasks("marked.py")) == ["one", "a/two"]
    assert list(load_tasks("listed.py")) == ["one"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def task(payload:\n  pass", "tasks/bad.py, line 1: SyntaxError: "),
        ("\n\nimport nowhere", "tasks/bad.py, line 3: ModuleNotFoundError: No module named 'nowhere'"),
        ("\ndef f(): 1 / 0\nf()", "tasks/bad.py, line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "tasks/bad.py, line 2: it ends the program when it is imported."),
        ("", "tasks/bad.py has no task: give it a function bad(payload), or one with @task."),
        ("bad = 3", "tasks/bad.py has no task"),
        (
            "from graphile_worker import task\n@task\ndef a(p): ...\n@task\ndef b(p): ...",
            'tasks/bad.py has more than one task without a name. Name the others: @task("bad/other").',
        ),
        ("from graphile_worker import task\n@task\ndef a(p): ...\ndef bad(p): ...", "more than one task"),
        (
            "\nimport broken",
            "tasks/bad.py, line 2, in broken.py, line 2: ZeroDivisionError: division by zero",
        ),
        ("import wrong", "tasks/bad.py, line 1, in wrong.py, line 1: SyntaxError: "),
        (
            "from graphile_worker import CronItem\nCronItem('bad', '* * * * *', tz='Mars')",
            "tasks/bad.py, line 2: ConfigurationError: The cron item 'bad': There is no time zone 'Mars'",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(here: Path, text: str, says: str) -> None:
    write(here / "tasks/bad.py", text)
    write(here / "broken.py", "def f(): return\\\n  1 / 0\nf()")
    write(here / "wrong.py", "def")
    for _ in range(2):  # and it is no better the second time
        with pytest.raises(ConfigurationError) as caught:
            load_tasks("tasks")
        assert says in str(caught.value)


def test_nothing_to_load_says_what_to_do(here: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"{here}/tasks does not exist\. Make that folder"):
        load_tasks("tasks")
    (here / "tasks").mkdir()
    with pytest.raises(ConfigurationError, match=r"For a task hello, add hello\.py to it"):
        load_tasks("tasks")


@pytest.mark.parametrize("function", [run, run_once])
async def test_tasks_come_from_one_place(here: Path, function: Callable[..., Awaitable[object]]) -> None:
    with pytest.raises(ConfigurationError, match="one of the two"):
        await function(dsn="embedded:")
    with pytest.raises(ConfigurationError, match="one of the two"):
        await function({"hello": print}, "embedded:", task_directory=here)
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        await function(dsn="embedded:", task_directory="nowhere")


def test_one_task_in_two_files_is_refused(here: Path) -> None:
    write(here / "tasks/hello.py", "def hello(payload): ...")
    write(here / "tasks/hello.sh", "#!/bin/sh\n", executable=True)
    with pytest.raises(ConfigurationError, match=r"'hello' is in tasks/hello.py and in tasks/hello.sh"):
        load_tasks("tasks")


def test_a_mapping_of_a_module(here: Path) -> None:
    write(
        here / "shop/jobs.py", "def hello(payload): ...\nclass Mine:\n  tasks = {'hello': hello}\ntasks = 3"
    )
    assert list(load_named("shop.jobs:Mine.tasks")) == ["hello"]
    for target, says in {
        "shop.jobs": "it must look like module:app",
        "shop.job:tasks": "There is no module shop.job.",
        "shop.jobs:task": "The module shop.jobs has no task. Did you mean tasks?",
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            load_named(target)
        assert says in str(caught.value)
