"""The options of a worker, each declared once.

A key of the classes below is a keyword argument of `run`, `run_once`, `App.run`, `App.running` or
`App.run_once`, with the type that it accepts. The `Option` in its annotation has the rest: the default, the
allowed values, the description, and the key and flags of the command. Signatures, checks, the command's
settings and help texts, and docs/reference/settings.md are all made from these declarations.

To add an option, declare it here and add its checked value to `WorkerOptions`; then run ``make
settings-page`` and ``make command-pages``.
"""

# No `from __future__ import annotations` here: the annotations are read at run time.

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from graphile_worker._base.durations import Duration
from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._worker.option_kinds import Address, Age, Count, Keeping, Kind, Seconds, Size, Switch
from graphile_worker.history import DEFAULT_KEEP_FOR

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager
    from os import PathLike
    from typing import TypeAlias

    import asyncpg

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._tasks.options import OnInvalidPayload
    from graphile_worker.cron import CronItem
    from graphile_worker.events.emitter import Events
    from graphile_worker.history import History, Keep
    from graphile_worker.middleware import Middleware
    from graphile_worker.workers import OnRecovery

    CronItems: TypeAlias = Iterable[CronItem | Mapping[str, Any]]
    CurrentFlags: TypeAlias = Iterable[str] | None
    FlagsOption: TypeAlias = CurrentFlags | Callable[[], CurrentFlags | Awaitable[CurrentFlags]]


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of an option, without its name and type."""

    help: str
    """One sentence: a noun or verb phrase, without the default."""
    default: Any = None
    default_text: str = ""
    """What None means as the default, for the documentation."""
    kind: Kind = field(default_factory=Kind)
    details: str = ""
    """Further sentences for the documentation."""
    key: str = ""
    """The key in a configuration file, and in upper case the end of the environment variable; empty if only
    Python has the option."""
    flags: tuple[str, ...] = ()
    """Empty for settings that few people change. These can be set in the file and the environment."""
    flag_help: str = ""
    """The help of the flag, if it turns something off or is shorter than in the documentation."""


class AppSettings(TypedDict, total=False):
    """Options of `run` and `run_once` that an `App` has itself."""

    pool: Annotated[
        "asyncpg.Pool | None",
        Option(
            help="An asyncpg pool to use instead of `dsn`.",
            details="The worker keeps two of its connections, and one or two more that tasks cannot hold: "
            "the pool needs at least four. The worker does not close the pool.",
        ),
    ]
    schema: Annotated[
        str | None,
        Option(
            help="Schema of the queue.",
            default_text="`GRAPHILE_WORKER_SCHEMA`, or `graphile_worker`",
            kind=Kind(metavar="NAME"),
            key="schema",
            flags=("-s", "--schema"),
        ),
    ]
    max_pool_size: Annotated[
        int,
        Option(
            default=10,
            help="Number of connections that tasks can use at once.",
            flag_help="Connections that tasks can use at once.",
            details="The worker itself opens three more, and up to two to add jobs and to recover the jobs "
            "of dead workers while tasks hold all of these.",
            kind=Count(1),
            key="max_pool_size",
            flags=("-m", "--max-pool-size"),
        ),
    ]
    pool_timeout: Annotated[
        Duration | None,
        Option(
            help="Time to wait for a connection before a `PoolTimeoutError`.",
            default_text="no limit",
            details="See [connections](../guides/running-workers.md#connections).",
            kind=Seconds(optional=True),
            key="pool_timeout",
        ),
    ]
    prepared_statements: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to use prepared statements.",
            details="Turn this off for [PgBouncer in transaction mode](../production/pgbouncer.md).",
            kind=Switch(),
            key="prepared_statements",
            flags=("--no-prepared-statements",),
            flag_help="Don't use prepared statements, for PgBouncer.",
        ),
    ]
    use_local_time: Annotated[
        bool,
        Option(
            default=False,
            help="Whether to take the current time from this machine's clock instead of the database's.",
            kind=Switch(),
        ),
    ]
    max_payload_size: Annotated[
        int,
        Option(
            default=MAX_PAYLOAD_SIZE,
            help="Largest payload of a new job, in bytes of JSON.",
            details="In a setting, a number can have the unit `KB` or `MB`. See "
            "[limits](../guides/enqueueing.md#limits).",
            kind=Size(),
            key="max_payload_size",
        ),
    ]
    require_transaction: Annotated[
        bool,
        Option(
            default=False,
            help="Whether to refuse a `connection=` that is not in a transaction.",
            details="Otherwise a job that is added on such a connection is committed at once, with a "
            "warning. See [in your transaction](../guides/transactions.md).",
            kind=Switch(),
        ),
    ]
    on_invalid_payload: Annotated[
        "OnInvalidPayload",
        Option(
            default="retry",
            help="Outcome of a job whose payload does not fit the parameters of its `@task` function.",
            details='`"retry"` treats it as any failure, because a newer deployment may understand the '
            'payload; `"fail"` fails the job permanently.',
        ),
    ]
    history: Annotated[
        "History | Keep",
        Option(
            default="none",
            help="Attempts to keep in the history: none, failures or all.",
            details="Tasks can choose with `history=`. In Python, a `History` object can also keep payloads. "
            "See [history](../guides/history.md).",
            kind=Keeping(),
            key="history",
            flags=("--history",),
            flag_help="History: none, failures or all attempts.",
        ),
    ]
    history_keep: Annotated[
        Duration | str,
        Option(
            default=DEFAULT_KEEP_FOR,
            help="Time after which attempts are removed from the history.",
            details="Workers drop whole days, so a day is kept until its last attempt is this old.",
            kind=Age(),
            key="history_keep",
        ),
    ]
    lifespan: Annotated[
        "Callable[[], AbstractAsyncContextManager[Any]] | None",
        Option(
            help="Function that returns an async context manager, entered before the first job and exited "
            "after the last.",
            details="Its value is `ctx.state`.",
        ),
    ]
    middleware: Annotated[
        "Iterable[Middleware] | None",
        Option(
            help="Middleware around running jobs and around adding jobs from tasks.",
            details="See [middleware](../guides/middleware.md).",
        ),
    ]
    events: Annotated[
        "Events | None",
        Option(
            help="Emitter that already has listeners, so that they receive the events of the start too.",
        ),
    ]
    logger: Annotated[
        "AnyLogger | None",
        Option(help="Logger of the worker.", default_text="the logger `graphile_worker`"),
    ]


class AppRunOnceOptions(TypedDict, total=False):
    """Options of `App.run_once`."""

    concurrency: Annotated[
        int,
        Option(
            default=1,
            help="Number of jobs to run at once.",
            kind=Count(1),
            key="jobs",
            flags=("-j", "--jobs"),
        ),
    ]
    max_task_processes: Annotated[
        int | None,
        Option(
            help='Maximum number of processes for tasks with `executor="process"`.',
            default_text="number of processors",
            details="Each worker process has as many. See [processes](../guides/processes.md).",
            kind=Count(1, optional=True),
            key="max_task_processes",
        ),
    ]
    max_jobs_per_task_process: Annotated[
        int | None,
        Option(
            help="Number of jobs after which a task process is replaced by a new one.",
            default_text="no limit",
            details="For code that leaks memory.",
            kind=Count(1, optional=True),
            key="max_jobs_per_task_process",
        ),
    ]
    prefetch: Annotated[
        int | Literal["auto"],
        Option(
            default="auto",
            help="Jobs to claim beyond the free slots.",
            details="See [prefetch](../guides/running-workers.md#prefetch).",
            kind=Count(0, auto=True, metavar="N|auto"),
            key="prefetch",
            flags=("--prefetch",),
        ),
    ]
    prefetch_ttl: Annotated[
        Duration | None,
        Option(
            help="Time after which prefetched jobs that did not start are returned.",
            default_text='0.05 s with `prefetch="auto"`, otherwise 300 s',
            kind=Seconds(optional=True),
        ),
    ]
    forbidden_flags: Annotated[
        "FlagsOption",
        Option(
            help="Flags of jobs that the worker does not claim.",
            details="A list, or a function, sync or async, that returns one each time the worker claims "
            "jobs.",
        ),
    ]
    interrupted_delay: Annotated[
        Duration,
        Option(
            default=0.0,
            help="Time until a job that was interrupted at shutdown is available again.",
            kind=Seconds("0 or more"),
        ),
    ]
    shutdown_grace: Annotated[
        Duration,
        Option(
            default=5.0,
            help="Time that running jobs have after a signal before they are interrupted.",
            flag_help="Time for running jobs to end after a signal.",
            details="The same applies after a breaking migration.",
            kind=Seconds("0 or more"),
            key="shutdown_grace",
            flags=("--shutdown-grace",),
        ),
    ]
    recovery: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to send heartbeats and to recover the jobs of dead workers.",
            details="Without recovery, jobs of a killed worker stay locked for four hours. See "
            "[reliability](../production/reliability.md).",
            kind=Switch(),
            key="recovery",
            flags=("--no-recovery",),
            flag_help="Send no heartbeats, and recover no jobs.",
        ),
    ]
    heartbeat_interval: Annotated[
        Duration,
        Option(default=3.0, help="Time between two heartbeats.", kind=Seconds(), key="heartbeat_interval"),
    ]
    lease: Annotated[
        Duration,
        Option(
            default=38.0,
            help="Time without a heartbeat after which other workers run this worker's jobs.",
            flag_help="Time until a silent worker counts as dead.",
            details="At most three hours. See [reliability](../production/reliability.md).",
            kind=Seconds(),
            key="lease",
            flags=("--lease",),
        ),
    ]
    fast_lease: Annotated[
        Duration,
        Option(
            default=8.0,
            help="The lease of a worker whose connections are visibly gone.",
            details="At least twice `heartbeat_interval`, and at most half of `lease`.",
            kind=Seconds(),
            key="fast_lease",
        ),
    ]
    task_leases: Annotated[
        "Mapping[str, Duration] | None",
        Option(
            help="Longer leases for the jobs of some tasks, by task identifier.",
            details="For work that must not run twice without need.",
        ),
    ]
    recovery_delay: Annotated[
        Duration,
        Option(
            default=0.0,
            help="Time until a job whose worker died runs again.",
            details="After a second death in a row the job waits as long as after a failure.",
            kind=Seconds("0 or more"),
            key="recovery_delay",
        ),
    ]
    refund_attempt_on_recovery: Annotated[
        bool,
        Option(
            default=False,
            help="Whether a job whose worker died gets its attempt back.",
            details="A job that kills its worker then does so forever.",
            kind=Switch(),
        ),
    ]
    on_recovery: Annotated[
        "OnRecovery | None",
        Option(
            help="Function that chooses the outcome of a job whose worker died.",
            details="It is called with the job and a `WorkerInfo`, and returns a `RecoveryAction`, or None "
            "for the default. It may be async.",
        ),
    ]
    exit_if_stuck: Annotated[
        bool,
        Option(
            default=False,
            help="Whether to end the process if other workers may claim its jobs and these cannot be "
            "stopped.",
            details="Jobs on threads and jobs that block the event loop cannot be stopped. The command "
            "always exits in this case.",
            kind=Switch(),
        ),
    ]
    statistics: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to write statistics about the jobs that the worker runs.",
            details="See [statistics and progress](../guides/statistics.md).",
            kind=Switch(),
            key="statistics",
            flags=("--no-statistics",),
            flag_help="Write no statistics.",
        ),
    ]
    handle_signals: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to stop on SIGINT, SIGTERM, SIGHUP and SIGUSR2.",
            details="After the worker has stopped, the signal has its usual effect. `App.running` leaves "
            "signals to the program by default.",
            kind=Switch(),
        ),
    ]
    migrate: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to install or update the schema at the start.",
            details="Turn this off if something else installs the schema.",
            kind=Switch(),
        ),
    ]


class AppRunOptions(AppRunOnceOptions, total=False):
    """Options of `App.run` and `App.running`."""

    poll_interval: Annotated[
        Duration,
        Option(
            default=2.0,
            help="Polling interval when no notification arrives.",
            flag_help="Polling interval without notifications.",
            details="In a setting, a number without a unit is milliseconds, as in Graphile Worker.",
            kind=Seconds(may_be_milliseconds=True),
            key="poll_interval",
            flags=("--poll-interval",),
        ),
    ]
    listen: Annotated[
        bool,
        Option(
            default=True,
            help="Whether to listen for notifications of new jobs.",
            details="Otherwise the worker only polls.",
            kind=Switch(),
            key="listen",
            flags=("--no-listen",),
            flag_help="Only poll: do not listen for notifications.",
        ),
    ]
    listen_dsn: Annotated[
        str | None,
        Option(
            help="Connection string for listening, if the connection goes through a pooler.",
            flag_help="Connection string for LISTEN, to bypass a pooler.",
            default_text="`connection`",
            details="Poolers in transaction mode do not deliver notifications. See "
            "[PgBouncer](../production/pgbouncer.md).",
            kind=Kind(metavar="DSN"),
            key="listen_connection",
            flags=("--listen-connection",),
        ),
    ]
    min_reset_locked_interval: Annotated[
        Duration,
        Option(
            default=480.0,
            help="Shortest time between two releases of locks that are older than four hours.",
            kind=Seconds(),
        ),
    ]
    max_reset_locked_interval: Annotated[
        Duration,
        Option(default=600.0, help="Longest time between two such releases.", kind=Seconds()),
    ]
    crontab: Annotated[
        str | None,
        Option(help="Recurring tasks, as the text of a crontab.", details="See [cron](../guides/cron.md)."),
    ]
    crontab_file: Annotated[
        "str | PathLike[str] | None", Option(help="Path of a crontab, instead of `crontab`.")
    ]
    cron_items: Annotated[
        "CronItems | None",
        Option(help="Recurring tasks as `CronItem` objects or dictionaries, instead of a crontab."),
    ]
    health: Annotated[
        str | int | None,
        Option(
            help="Port, or host:port, that serves /live and /ready over HTTP.",
            flag_help="Port, or host:port, of the HTTP health checks.",
            default_text="off",
            details="See [health checks](../production/monitoring.md#health-checks).",
            kind=Address(),
            key="health",
            flags=("--health",),
        ),
    ]


class _FunctionOptions(AppSettings, total=False):
    task_directory: Annotated[
        "str | PathLike[str] | None",
        Option(
            help="Folder with a file for each task, instead of `tasks`.",
            details="See [the command line](cli/index.md).",
        ),
    ]


class RunOnceOptions(_FunctionOptions, AppRunOnceOptions, total=False):
    """Options of `run_once`."""


class RunOptions(_FunctionOptions, AppRunOptions, total=False):
    """Options of `run`."""


OPTIONS: dict[str, Option] = {
    "tasks": Option(
        help="Functions by task identifier, or tasks made with `@task`.",
        details="A function is called with `(payload)` or `(payload, ctx)`. An `async def` runs on the event "
        "loop, a `def` on a thread.",
    ),
    "dsn": Option(
        help="Connection string of the database, or embedded: for a private PostgreSQL.",
        flag_help="Database, or embedded: for a private PostgreSQL.",
        default_text="`DATABASE_URL`, or the `PG*` variables",
        kind=Kind(metavar="DSN"),
        key="connection",
        flags=("-c", "--connection"),
    ),
    **{name: hint.__metadata__[0] for name, hint in RunOptions.__annotations__.items()},
}
"""Every argument of `run`, in the order of its declaration."""
