"""Checks of the connection and the server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING

from graphile_worker._base.text import pluralize
from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.connection.listen import listening
from graphile_worker._db.queries import diagnostics, workers
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from datetime import timedelta

    from graphile_worker.doctor.subject import Subject

_OLDEST_SERVER = 12
_SAMPLES = 5
_BYPASS_POOLER = (
    "Pass --listen-connection (listen_dsn) with a connection that bypasses the pooler, or --no-listen to "
    "only poll."
)


async def check_server(subject: Subject) -> Finding:
    """Check that the server is supported and writable."""
    subject.server = server = await subject.read(diagnostics.read_server)
    message = f"PostgreSQL {server.version}"
    details = {"version": server.version, "version_num": server.version_num}
    level, advice = Level.OK, None
    if server.version_num < _OLDEST_SERVER * 10_000:
        level, advice = (
            Level.ERROR,
            f"Upgrade it: Graphile Worker needs PostgreSQL {_OLDEST_SERVER} or newer.",
        )
    elif server.is_replica:
        level, message = Level.ERROR, f"{message}, a replica: jobs can be neither added nor run there"
        advice = "Connect to the primary. With several hosts, add target_session_attrs=read-write."
    elif server.is_read_only:
        level, message = Level.WARNING, f"{message}, where transactions are read-only by default"
        advice = (
            "Workers override this, but SQL that adds jobs fails. Set default_transaction_read_only "
            "to off, for the role or the database."
        )
    return Finding(check="server", level=level, message=message, advice=advice, details=details)


async def check_pooler(subject: Subject) -> Finding:
    """Check whether a pooler shares sessions between clients."""
    session = await subject.read(lambda connection: workers.identify_server(connection, subject.schema))
    details = {"is_session": session.is_session, "is_direct": session.is_direct}
    if session.is_session:
        route = "directly" if session.is_direct else "through a proxy, or with another address"
        return Finding(
            check="pooler",
            level=Level.OK,
            message=f"Sessions are not shared with other clients (connected {route})",
            details=details,
        )
    message = "The connection goes through a pooler such as PgBouncer"
    if not subject.prepares:
        message += "; prepared statements are off, as transaction mode requires"
        return Finding(check="pooler", level=Level.NOTE, message=message, details=details)
    return Finding(
        check="pooler",
        level=Level.WARNING,
        message=message,
        advice="If it is in transaction mode, pass --no-prepared-statements "
        "(prepared_statements=False). Workers turn them off by themselves only if the pooler rejects "
        "their settings, as PgBouncer does by default.",
        details=details,
    )


async def check_notifications(subject: Subject) -> Finding:
    """Check that LISTEN receives what NOTIFY sends."""
    if not subject.listens:
        return Finding(
            check="notifications", level=Level.OK, message="Workers do not listen, as configured; they poll"
        )
    try:
        is_received = await _probe_notification(subject)
    except DatabaseError as error:
        return Finding(
            check="notifications",
            level=Level.WARNING,
            message=f"Workers cannot listen: {error}",
            advice="Fix that connection (--listen-connection, listen_dsn), or pass --no-listen. "
            "Until then new jobs wait until a worker polls.",
        )
    if not is_received:
        return Finding(
            check="notifications",
            level=Level.WARNING,
            message="LISTEN receives nothing, so new jobs wait until a worker polls: 2 seconds by default",
            advice=_BYPASS_POOLER,
        )
    return Finding(check="notifications", level=Level.OK, message="LISTEN receives notifications")


async def _probe_notification(subject: Subject) -> bool:
    received, channel = asyncio.Event(), f"graphile-worker:doctor-{token_hex(6)}"
    with translate_errors(subject.schema):
        async with listening(subject.listen_on, [channel], lambda *_: received.set()):
            await subject.read(lambda connection: workers.notify(connection, subject.schema, channel, ""))
            with suppress(TimeoutError):
                async with asyncio.timeout(subject.limits.probe):
                    await received.wait()
    return received.is_set()


async def check_notification_queue(subject: Subject) -> Finding:
    """Check the notification queue: when it is full, transactions that send a notification cannot commit."""
    used = await subject.read(diagnostics.read_notification_queue)
    warning, error = subject.limits.notifications
    level = Level.ERROR if used >= error else Level.WARNING if used >= warning else Level.OK
    advice = None
    if level is not Level.OK:
        advice = (
            "A listening session keeps a transaction open. End it: see the oldest transaction, or "
            "select pid, xact_start, query from pg_stat_activity order by xact_start. When the queue is "
            "full, no job can be added."
        )
    message = f"The server's notification queue is {used:.0%} full"
    return Finding(
        check="notification queue", level=level, message=message, advice=advice, details={"usage": used}
    )


async def check_clock(subject: Subject) -> Finding:
    """Check that the clocks of this machine and the server agree."""
    ahead, uncertainty = await _clock_difference(subject)
    seconds = abs(ahead.total_seconds())
    warning, error = subject.limits.clock
    level = Level.OK
    if seconds - uncertainty > warning:
        level = Level.ERROR if seconds - uncertainty > error else Level.WARNING
    direction = "ahead of" if ahead.total_seconds() > 0 else "behind"
    message = (
        f"This machine's clock is {seconds:.3f} s {direction} the server's (give or take {uncertainty:.3f} s)"
    )
    advice = None
    if level is not Level.OK:
        advice = (
            "Synchronize both with NTP. Jobs run by the server's clock, even if this machine computed run_at."
        )
    details = {"seconds_ahead": ahead.total_seconds(), "give_or_take": uncertainty}
    return Finding(check="clock", level=level, message=message, advice=advice, details=details)


async def _clock_difference(subject: Subject) -> tuple[timedelta, float]:
    """Return how far this clock is ahead by the fastest of several queries, and the error in seconds."""
    samples = []
    for _ in range(_SAMPLES):
        async with subject.pool.connection() as connection:
            before = subject.clock()
            server_time = await diagnostics.read_clock(connection)
            after = subject.clock()
        duration = after - before
        samples.append((duration, before + duration / 2 - server_time))
    duration, ahead = min(samples)
    return ahead, duration.total_seconds() / 2


async def check_connections(subject: Subject) -> Finding:
    """Check that there are connections left for a worker."""
    found = await subject.read(diagnostics.read_connections)
    limits = {
        "the server": (found.of_server, found.used),
        "the database": (found.of_database, found.used_in_database),
        "the role": (found.of_role, found.used_by_role),
    }
    left = {owner: limit - used for owner, (limit, used) in limits.items() if limit >= 0}
    scarcest = min(left, key=left.__getitem__)
    remaining = max(0, left[scarcest])
    limit, used = limits[scarcest]
    enough, needed = subject.limits.connections
    level = Level.ERROR if remaining < needed else Level.WARNING if remaining < enough else Level.OK
    advice = None
    if level is not Level.OK:
        advice = (
            "A worker needs three, and one for each task that uses the database at the same time "
            "(max_pool_size, 10 by default). Raise the limit, or close unused connections: select "
            "application_name, state, count(*) from pg_stat_activity group by 1, 2."
        )
    unused = pluralize(remaining, "connection is", "connections are")
    message = f"{unused} left of the {limit} that {scarcest} allows"
    details = {"left": remaining, "limit": limit, "used": used, "whose": scarcest.removeprefix("the ")}
    return Finding(check="connections", level=level, message=message, advice=advice, details=details)


def unreachable(error: DatabaseError) -> Finding:
    """Return the finding that there is no connection."""
    return Finding(
        check="connection",
        level=Level.ERROR,
        message=str(error),
        advice="Fix the connection first: nothing else can be checked without it.",
    )
