"""The way to the server, and the server itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING

from graphile_worker._db import exchange, symptoms, workers
from graphile_worker._db.failures import translated
from graphile_worker._db.listen import listening
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.errors import DatabaseError
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from datetime import timedelta

    from graphile_worker.doctor.subject import Subject

_OLDEST_SERVER = 12
_SAMPLES = 5
_PAST_THE_POOLER = (
    "Pass --listen-connection (listen_dsn) with a connection that leads past it, or --no-listen to only poll."
)


async def check_server(subject: Subject) -> Finding:
    """Whether it is a server that a queue can be on."""
    subject.server = server = await subject.look(symptoms.read_server)
    says = f"PostgreSQL {server.version}"
    details = {"version": server.version, "version_num": server.version_num}
    level, advice = Level.OK, None
    if server.version_num < _OLDEST_SERVER * 10_000:
        level, advice = Level.TROUBLE, f"Upgrade it: Graphile Worker needs {_OLDEST_SERVER} or newer."
    elif server.is_replica:
        level, says = Level.TROUBLE, f"{says}, a replica: no job can be added there, and none be run"
        advice = "Connect to the primary; with several hosts, add target_session_attrs=read-write."
    elif server.is_read_only:
        level, says = Level.WARNING, f"{says}, where transactions are read-only by default"
        advice = (
            "Workers set it for themselves, but SQL that adds jobs fails. Set default_transaction_read_only "
            "to off, for the role or the database."
        )
    return Finding(check="server", level=level, says=says, advice=advice, details=details)


async def check_pooler(subject: Subject) -> Finding:
    """Whether something hands out sessions between us and the server."""
    met = await subject.look(lambda on: workers.meet(on, subject.schema))
    details = {"is_session": met.is_session, "is_direct": met.is_direct}
    if met.is_session:
        way = (
            "directly"
            if met.is_direct
            else "through something that passes everything on, or an address changes"
        )
        return Finding(
            check="pooler", level=Level.OK, says=f"Sessions are ours alone ({way})", details=details
        )
    says = "A pooler such as PgBouncer stands between us and the server"
    if not subject.prepares:
        says += "; prepared statements are off, as it needs them to be in transaction mode"
        return Finding(check="pooler", level=Level.NOTE, says=says, details=details)
    return Finding(
        check="pooler",
        level=Level.WARNING,
        says=says,
        advice="If it is in transaction mode, pass --no-prepared-statements "
        "(prepared_statements=False). Workers do that by themselves only if the pooler refuses "
        "their settings, as PgBouncer does by default.",
        details=details,
    )


async def check_notifications(subject: Subject) -> Finding:
    """Whether LISTEN hears what NOTIFY says."""
    if not subject.listens:
        return Finding(check="notifications", level=Level.OK, says="Workers are told not to listen, and poll")
    try:
        hears = await _hears(subject)
    except DatabaseError as error:
        return Finding(
            check="notifications",
            level=Level.WARNING,
            says=f"Workers cannot listen: {error}",
            advice="Mend that connection (--listen-connection, listen_dsn), or pass --no-listen. "
            "Until then new jobs wait until a worker polls.",
        )
    if not hears:
        return Finding(
            check="notifications",
            level=Level.WARNING,
            says="LISTEN hears nothing, so new jobs wait until a worker polls: 2 seconds by default",
            advice=_PAST_THE_POOLER,
        )
    return Finding(check="notifications", level=Level.OK, says="LISTEN hears what NOTIFY says")


async def _hears(subject: Subject) -> bool:
    heard, channel = asyncio.Event(), f"graphile-worker:doctor-{token_hex(6)}"
    with translated(subject.schema):
        async with listening(subject.listen_on, [channel], lambda *_: heard.set()):
            await subject.look(lambda on: exchange.notify(on, subject.schema, channel, ""))
            with suppress(TimeoutError):
                async with asyncio.timeout(subject.limits.probe):
                    await heard.wait()
    return heard.is_set()


async def check_notification_queue(subject: Subject) -> Finding:
    """Whether there is room for notifications; without, no transaction that sends one can commit."""
    used = await subject.look(symptoms.read_notification_queue)
    warning, trouble = subject.limits.notifications
    level = Level.TROUBLE if used >= trouble else Level.WARNING if used >= warning else Level.OK
    advice = None
    if level is not Level.OK:
        advice = (
            "A session that listens has not ended its transaction. End it: see the oldest transaction, or "
            "select pid, xact_start, query from pg_stat_activity order by xact_start. When the queue is "
            "full, no job can be added."
        )
    says = f"The server's queue of notifications is {used:.0%} full"
    return Finding(check="notification queue", level=level, says=says, advice=advice, details={"usage": used})


async def check_clock(subject: Subject) -> Finding:
    """Whether this machine and the server agree on the time."""
    ahead, unsure = await _difference(subject)
    seconds = abs(ahead.total_seconds())
    warning, trouble = subject.limits.clock
    level = Level.OK
    if seconds - unsure > warning:
        level = Level.TROUBLE if seconds - unsure > trouble else Level.WARNING
    direction = "ahead of" if ahead.total_seconds() > 0 else "behind"
    says = f"This machine's clock is {seconds:.3f} s {direction} the server's (give or take {unsure:.3f} s)"
    advice = None
    if level is not Level.OK:
        advice = (
            "Let both keep time by NTP. Jobs run by the server's clock, so what is added here for 12:00 does."
        )
    details = {"seconds_ahead": ahead.total_seconds(), "give_or_take": unsure}
    return Finding(check="clock", level=level, says=says, advice=advice, details=details)


async def _difference(subject: Subject) -> tuple[timedelta, float]:
    """How far this clock is ahead, by the quickest of several answers; and by how much that may be wrong."""
    samples = []
    for _ in range(_SAMPLES):
        async with subject.pool.connection() as connection:
            before = subject.clock()
            there = await symptoms.read_clock(connection)
            after = subject.clock()
        took = after - before
        samples.append((took, before + took / 2 - there))
    took, ahead = min(samples)
    return ahead, took.total_seconds() / 2


async def check_connections(subject: Subject) -> Finding:
    """Whether there is room for a worker."""
    found = await subject.look(symptoms.read_connections)
    limits = {
        "the server": (found.of_server, found.used),
        "the database": (found.of_database, found.used_in_database),
        "the role": (found.of_role, found.used_by_role),
    }
    left = {whose: most - used for whose, (most, used) in limits.items() if most >= 0}
    scarcest = min(left, key=left.__getitem__)
    least = max(0, left[scarcest])
    most, used = limits[scarcest]
    enough, needed = subject.limits.connections
    level = Level.TROUBLE if least < needed else Level.WARNING if least < enough else Level.OK
    advice = None
    if level is not Level.OK:
        advice = (
            "A worker needs three, and one for each task that uses the database at the same time "
            "(max_pool_size, 10 by default). Raise the limit, or close what nobody needs: select "
            "application_name, state, count(*) from pg_stat_activity group by 1, 2."
        )
    says = f"{counted(least, 'connection is', 'connections are')} left of the {most} that {scarcest} allows"
    details = {"left": least, "limit": most, "used": used, "whose": scarcest.removeprefix("the ")}
    return Finding(check="connections", level=level, says=says, advice=advice, details=details)


def unreachable(error: DatabaseError) -> Finding:
    """There is nothing to examine."""
    return Finding(
        check="connection",
        level=Level.TROUBLE,
        says=str(error),
        advice="Nothing else can be looked at until that is mended.",
    )
