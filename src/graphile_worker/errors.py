"""Everything that goes wrong on purpose, in one tree.

::

    GraphileWorkerError
    ├── ConfigurationError         a setting or an argument is missing or wrong
    │   ├── CrontabError           a crontab cannot be read
    │   └── MissingExtraError      a feature needs a package that is not installed
    ├── TaskError                  a task cannot be run
    │   ├── InvalidPayloadError    its payload does not fit
    │   ├── TaskTimeoutError       it took longer than it may
    │   ├── TaskProcessError       the process that it ran in has ended
    │   └── BatchError             some items of a batch failed
    ├── ShutdownError              a worker stopped before everything was recorded
    ├── DatabaseError              the database cannot be reached, or cannot be used as it is
    │   ├── EmbeddedServerError    the embedded PostgreSQL does not start
    │   ├── PoolTimeoutError       no connection was free in time
    │   └── SchemaError            the schema is not there, or cannot be installed or adopted
    │       ├── SchemaMissingError it was not installed
    │       ├── SchemaTooOldError  made by a Graphile Worker older than we can adopt
    │       └── SchemaTooNewError  changed by a newer one in a way that we do not know
    └── JobError                   something about a job
        ├── InvalidJobError        a job cannot be added or changed like that
        └── JobSkippedError        a middleware left it out

A message says what happened and what to do next. None of them carries a password.

`AutocommitWarning` is a Python warning and not an error: nothing failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class GraphileWorkerError(Exception):
    """Base of all errors that this library raises."""


class ConfigurationError(GraphileWorkerError):
    """A setting or an argument is missing or wrong."""


class CrontabProblem(NamedTuple):
    """One thing that is wrong in a crontab. Lines and columns begin at 1."""

    line: int
    column: int
    text: str
    message: str


class CrontabError(ConfigurationError):
    """A crontab cannot be read.

    Attributes:
        problems: All that is wrong in it, each with its line, its column and the text there.
    """

    def __init__(self, problems: Sequence[CrontabProblem], source: str = "crontab") -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(
                f"{source}:{problem.line}:{problem.column}: {problem.message}" for problem in self.problems
            )
        )


class MissingExtraError(ConfigurationError):
    """A feature needs a package that is not installed."""


class TaskError(GraphileWorkerError):
    """A task cannot be run."""


class InvalidPayloadError(TaskError):
    """A payload does not fit the parameters of its task.

    Attributes:
        path: Where in the payload, for example ``items[0].price``.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TaskTimeoutError(TaskError):
    """A job took longer than its task's timeout."""


class TaskProcessError(TaskError):
    """The process that a task ran in ended before the task did: it crashed, or was killed.

    Attributes:
        interrupted: Whether the worker is the reason, and not the task: then the job's attempt is given back.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted


class BatchError(TaskError):
    """Some items of a batch failed.

    Attributes:
        errors: What they failed with.
        places: Which they are, in the payload; the first is 0.
        final_places: Those of them that are never to be tried again by themselves.
        final: Whether none of them is to be tried again.
    """

    def __init__(
        self,
        message: str,
        *,
        errors: Sequence[BaseException] = (),
        places: Sequence[int] = (),
        final_places: Sequence[int] = (),
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.errors = tuple(errors)
        self.places = tuple(int(place) for place in places)
        self.final_places = tuple(final_places)
        self.final = final


class ShutdownError(GraphileWorkerError):
    """A worker stopped before everything was recorded.

    Attributes:
        jobs: The ids of the jobs whose outcome is not in the database. They are locked still, and will run
            again once somebody frees them.
    """

    def __init__(self, message: str, jobs: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.jobs = tuple(jobs)


class DatabaseError(GraphileWorkerError):
    """The database cannot be reached, or cannot be used as it is."""


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL does not start."""


class PoolTimeoutError(DatabaseError):
    """No connection was free within `pool_timeout`."""


class SchemaError(DatabaseError):
    """The schema is not there, or cannot be installed or adopted."""


class SchemaMissingError(SchemaError):
    """The schema was not installed."""


class SchemaTooOldError(SchemaError):
    """The schema was made by a Graphile Worker that is older than we can adopt."""


class SchemaTooNewError(SchemaError):
    """The schema was changed by a newer Graphile Worker in a way that we do not know."""


class JobError(GraphileWorkerError):
    """Something about a job."""


class InvalidJobError(JobError):
    """A job cannot be added or changed like that.

    Attributes:
        argument: The argument that is wrong, if it is one.
        code: Graphile Worker's code for it, if it has one: ``GWBID`` (identifier), ``GWBQN`` (queue
            name), ``GWBJK`` (job key), ``GWBMA`` (max_attempts), ``GWBKM`` (job key mode). It is the same
            whether we or PostgreSQL refused it.
    """

    def __init__(self, message: str, *, argument: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.code = code


class JobSkippedError(JobError):
    """A job was not added, because a middleware left it out."""


class AutocommitWarning(UserWarning):
    """A job was added on a caller's connection that is not in a transaction, so it is committed at once.

    Python shows it once for each place in the code. If the commit is intended, leave ``connection=`` out, or
    ignore the warning: ``warnings.simplefilter("ignore", AutocommitWarning)``.
    """
