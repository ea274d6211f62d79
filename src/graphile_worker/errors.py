"""All errors that this library raises.

::

    GraphileWorkerError
    ├── ConfigurationError         a setting or an argument is missing or invalid
    │   ├── CrontabError           a crontab cannot be parsed
    │   └── MissingExtraError      a feature needs a package that is not installed
    ├── TaskError                  a task cannot be run
    │   ├── InvalidPayloadError    the payload does not match the task's parameters
    │   ├── TaskTimeoutError       the job exceeded its timeout
    │   ├── TaskProcessError       the task's process ended before the task did
    │   └── BatchError             some items of a batch failed
    ├── ShutdownError              a worker stopped before all outcomes were recorded
    ├── DatabaseError              the database cannot be reached or used
    │   ├── EmbeddedServerError    the embedded PostgreSQL does not start
    │   ├── PoolTimeoutError       no connection was free in time
    │   └── SchemaError            the schema is missing, or cannot be installed or adopted
    │       ├── SchemaMissingError the schema is not installed
    │       ├── SchemaTooOldError  the schema is older than this version can adopt
    │       └── SchemaTooNewError  the schema is newer than this version supports
    └── JobError                   a problem with a job
        ├── InvalidJobError        a job cannot be added or changed as requested
        ├── JobSkippedError        a middleware did not add the job
        ├── JobLostError           the worker does not hold the job any more
        ├── JobFailedError         the job whose result is awaited has failed permanently
        ├── JobCancelledError      the job whose result is awaited was cancelled
        ├── ResultUnknownError     the result of a job is not known, and never will be
        └── ResultTimeoutError     the job has not ended in time

A message names the problem and the next step. No message contains a password.

`AutocommitWarning` is a Python warning, not an error, because nothing failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class GraphileWorkerError(Exception):
    """Base class of all errors that this library raises."""


class ConfigurationError(GraphileWorkerError):
    """A setting or an argument is missing or invalid."""


class CrontabProblem(NamedTuple):
    """One problem in a crontab. Lines and columns start at 1."""

    line: int
    column: int
    text: str
    message: str


class CrontabError(ConfigurationError):
    """A crontab cannot be parsed.

    Attributes:
        problems: All problems in the crontab, each with its line, its column and the text there.
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
    """A payload does not match the parameters of its task.

    Attributes:
        path: The path of the invalid value in the payload, for example ``items[0].price``.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TaskTimeoutError(TaskError):
    """A job ran longer than its timeout."""


class TaskProcessError(TaskError):
    """The process of a task crashed or was killed before the task ended.

    Attributes:
        interrupted: Whether the worker ended the process, not the task. Then the attempt does not count.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted


class BatchError(TaskError):
    """Some items of a batch failed.

    Attributes:
        errors: The errors of the failed items.
        indexes: The indexes of the failed items in the payload, starting at 0.
        final_indexes: The indexes of the failed items that must not be retried.
        final: Whether no failed item is retried.
    """

    def __init__(
        self,
        message: str,
        *,
        errors: Sequence[BaseException] = (),
        indexes: Sequence[int] = (),
        final_indexes: Sequence[int] = (),
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.errors = tuple(errors)
        self.indexes = tuple(int(index) for index in indexes)
        self.final_indexes = tuple(final_indexes)
        self.final = final


class ShutdownError(GraphileWorkerError):
    """A worker stopped before all outcomes were recorded.

    Attributes:
        jobs: The ids of the jobs whose outcomes are not recorded. They are still locked, and run again once
            their locks are released.
    """

    def __init__(self, message: str, jobs: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.jobs = tuple(jobs)


class DatabaseError(GraphileWorkerError):
    """The database cannot be reached or used."""


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL does not start."""


class PoolTimeoutError(DatabaseError):
    """No connection was free within `pool_timeout`."""


class SchemaError(DatabaseError):
    """The schema is missing, or cannot be installed or adopted."""


class SchemaMissingError(SchemaError):
    """The schema is not installed."""


class SchemaTooOldError(SchemaError):
    """The schema was created by a Graphile Worker that is older than this version can adopt."""


class SchemaTooNewError(SchemaError):
    """The schema was changed by a newer Graphile Worker in a way that this version does not support."""


class JobError(GraphileWorkerError):
    """Base class of errors about a job."""


class InvalidJobError(JobError):
    """A job cannot be added or changed as requested.

    Attributes:
        argument: The name of the invalid argument; None if the error is not about one.
        code: Graphile Worker's code for the problem, or None: ``GWBID`` (identifier), ``GWBQN`` (queue
            name), ``GWBJK`` (job key), ``GWBMA`` (max_attempts), ``GWBKM`` (job key mode). It is the same
            whether Python or PostgreSQL rejected the job.
    """

    def __init__(self, message: str, *, argument: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.code = code


class JobSkippedError(JobError):
    """A job was not added, because a middleware skipped it."""


class JobLostError(JobError):
    """A task tried to complete its job, but its worker does not hold the job any more.

    The transaction must be rolled back: another worker may run the job. `JobContext.transaction` does so.
    """


class JobFailedError(JobError):
    """The job whose result is awaited has failed permanently.

    Attributes:
        job_id: The job's id.
        task_identifier: The identifier of its task; empty if it is not known.
        error_type: The class of the error in the task, for example ``ValueError``; None if it is not known.
        error_message: The message of that error.
        traceback: Where the error was raised, in the worker; None if it is not known.
    """

    def __init__(
        self,
        job_id: int,
        task_identifier: str,
        error_message: str,
        *,
        error_type: str | None = None,
        traceback: str | None = None,
    ) -> None:
        self.job_id = job_id
        self.task_identifier = task_identifier
        self.error_type = error_type
        self.error_message = error_message
        self.traceback = traceback
        # A message that would say little by itself was stored with its type, for example "KeyError: 'to'".
        has_type = error_message.partition(":")[0] == (error_type or "").rpartition(".")[2]
        error = error_message if has_type else ": ".join(filter(None, (error_type, error_message)))
        super().__init__(f"{_describe_job(job_id, task_identifier)} failed: {error}")
        if traceback:
            self.add_note(f"In the worker:\n{traceback.rstrip()}")

    def __reduce__(self) -> tuple[Any, ...]:
        positional = self.job_id, self.task_identifier, self.error_message
        return partial(type(self), error_type=self.error_type, traceback=self.traceback), positional


class JobCancelledError(JobError):
    """The job whose result is awaited was cancelled, by its task or by `WorkerUtils.cancel_job`.

    Attributes:
        job_id: The job's id.
        task_identifier: The identifier of its task; empty if it is not known.
        reason: What was recorded about it.
    """

    def __init__(self, job_id: int, task_identifier: str = "", reason: str = "") -> None:
        self.job_id = job_id
        self.task_identifier = task_identifier
        self.reason = reason
        what = f"{_describe_job(job_id, task_identifier)} was cancelled"
        super().__init__(f"{what}: {reason}" if reason else f"{what}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job_id, self.task_identifier, self.reason)


class ResultUnknownError(JobError):
    """The result of a job is not known, and waiting longer would not help. The message gives the reason.

    Attributes:
        job_id: The job's id; None if the job was not added.
    """

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class ResultTimeoutError(JobError, TimeoutError):
    """A job has not ended in time. It is not cancelled: a worker runs it, or will do so.

    Attributes:
        job_id: The job's id. `Task.result_of` waits for it again, and `App.cancel_job` cancels it.
    """

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


def _describe_job(job_id: int, task_identifier: str) -> str:
    return f"Job {job_id} ({task_identifier})" if task_identifier else f"Job {job_id}"


class AutocommitWarning(UserWarning):
    """A job was added on the caller's connection outside of a transaction, so it is committed at once.

    Python shows the warning once for each line of code. If the commit is intended, leave ``connection=`` out,
    or ignore the warning: ``warnings.simplefilter("ignore", AutocommitWarning)``.
    """
