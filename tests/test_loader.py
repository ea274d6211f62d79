"""Tasks loaded from files and modules, and the errors for files that cannot be loaded."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphile_worker import ConfigurationError, run, run_once
from graphile_worker._tasks.executable import Executable
from graphile_worker._tasks.loader import load_object, load_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder. Modules imported from it are removed from `sys.modules`."""
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


def test_nested_folders_are_part_of_the_task_identifier(here: Path) -> None:
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
def test_handler_is_named_task_or_like_the_file_or_is_decorated(here: Path, text: str) -> None:
    write(here / "tasks/send-mail.py", text)
    tasks = load_tasks("tasks")
    assert list(tasks) == ["send-mail"]
    assert tasks["send-mail"](None) == "it"


def test_file_may_contain_several_named_tasks(here: Path) -> None:
    write(
        here / "tasks/mail.py",
        "from graphile_worker import task\n"
        "def mail(payload): ...\n"
        "@task('mail/later')\ndef later(payload): ...\n",
    )
    assert sorted(load_tasks("tasks")) == ["mail", "mail/later"]


def test_only_python_and_executable_files_are_tasks(here: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert (
        "Ignoring tasks/forgotten.sh: it is a script, but not executable. Run chmod +x tasks/forgotten.sh"
        in caplog.text
    )
    assert "Ignoring tasks/README.md: it is neither a Python file" in caplog.text
    assert "Ignoring tasks/what is this.sh: its name" in caplog.text


def test_tasks_can_import_each_other_and_modules_next_to_the_folder(here: Path) -> None:
    write(here / "shop.py", "PRICE = 7")
    write(here / "tasks/_shared.py", "def twice(n): return 2 * n")
    write(
        here / "tasks/pay.py",
        "from shop import PRICE\nfrom ._shared import twice\ndef pay(payload): return twice(PRICE)",
    )
    assert load_tasks("tasks")["pay"](None) == 14


def test_task_folder_may_be_a_package(here: Path) -> None:
    write(here / "tasks/__init__.py", "NAME = 'shop'")
    write(here / "tasks/name.py", "from tasks import NAME\ndef name(payload): return NAME")
    assert load_tasks("tasks")["name"](None) == "shop"


def test_folder_and_file_may_have_the_same_name(here: Path) -> None:
    write(here / "tasks/mail.py", "def mail(payload): return 1")
    write(here / "tasks/mail/send.py", "def send(payload): return 2")
    write(here / "tasks/v1.2/send.py", "1 / 0")
    tasks = load_tasks("tasks")
    assert {name: function(None) for name, function in tasks.items()} == {"mail": 1, "mail/send": 2}


def test_task_in_a_module_is_named_like_its_variable(here: Path) -> None:
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
    with pytest.raises(ConfigurationError, match=r"double.py has two tasks named 'x'"):
        load_tasks("double.py")


def test_two_folders_with_the_same_name_do_not_conflict(here: Path) -> None:
    write(here / "a/tasks/one.py", "def one(payload): return 1")
    write(here / "b/tasks/one.py", "def one(payload): return 2")
    assert [load_tasks(f"{folder}/tasks")["one"](None) for folder in "ab"] == [1, 2]


def test_module_instead_of_a_folder_may_have_several_tasks(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "Ignoring three" in caplog.text


def test_decorator_or_all_select_the_tasks_of_a_module(here: Path) -> None:
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
    ("text", "message"),
    [
        ("def task(payload:\n  pass", "tasks/bad.py, line 1: SyntaxError: "),
        ("\n\nimport nowhere", "tasks/bad.py, line 3: ModuleNotFoundError: No module named 'nowhere'"),
        ("\ndef f(): 1 / 0\nf()", "tasks/bad.py, line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "tasks/bad.py, line 2: the file exits the program"),
        ("", "tasks/bad.py has no task. Add a function bad(payload)"),
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
def test_file_that_cannot_be_loaded_is_named_with_its_line(here: Path, text: str, message: str) -> None:
    write(here / "tasks/bad.py", text)
    write(here / "broken.py", "def f(): return\\\n  1 / 0\nf()")
    write(here / "wrong.py", "def")
    for _ in range(2):  # a second attempt has the same error
        with pytest.raises(ConfigurationError) as caught:
            load_tasks("tasks")
        assert message in str(caught.value)


def test_missing_or_empty_task_folder_is_rejected_with_advice(here: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"{here}/tasks does not exist\. Create the folder"):
        load_tasks("tasks")
    (here / "tasks").mkdir()
    with pytest.raises(ConfigurationError, match=r"create hello\.py"):
        load_tasks("tasks")


@pytest.mark.parametrize("function", [run, run_once])
async def test_tasks_and_task_directory_are_mutually_exclusive(
    here: Path, function: Callable[..., Awaitable[object]]
) -> None:
    with pytest.raises(ConfigurationError, match="either tasks, or task_directory"):
        await function(dsn="embedded:")
    with pytest.raises(ConfigurationError, match="either tasks, or task_directory"):
        await function({"hello": print}, "embedded:", task_directory=here)
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        await function(dsn="embedded:", task_directory="nowhere")


def test_task_in_two_files_is_rejected(here: Path) -> None:
    write(here / "tasks/hello.py", "def hello(payload): ...")
    write(here / "tasks/hello.sh", "#!/bin/sh\n", executable=True)
    with pytest.raises(ConfigurationError, match=r"'hello' is in tasks/hello.py and in tasks/hello.sh"):
        load_tasks("tasks")


def test_named_mapping_is_loaded_from_a_module(here: Path) -> None:
    write(
        here / "shop/jobs.py", "def hello(payload): ...\nclass Mine:\n  tasks = {'hello': hello}\ntasks = 3"
    )
    assert list(load_object("shop.jobs:Mine.tasks")) == ["hello"]
    for target, message in {
        "shop.jobs": "it must have the form module:app",
        "shop.job:tasks": "There is no module shop.job.",
        "shop.jobs:task": "The module shop.jobs has no attribute task. Did you mean tasks?",
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            load_object(target)
        assert message in str(caught.value)
