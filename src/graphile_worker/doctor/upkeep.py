"""Checks of vacuum, which keeps the tables small, and of transactions that stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import join_truncated, pluralize
from graphile_worker._db.queries import diagnostics, history
from graphile_worker.doctor.finding import Finding, Level

if TYPE_CHECKING:
    from graphile_worker.doctor.subject import Subject

_DOCS = "see docs/production/maintenance.md"
_HISTORY_DOCS = "see docs/guides/history.md"
_MOST_DAYS = 400


async def check_dead_rows(subject: Subject) -> Finding:
    """Check the number of dead rows, which each query for jobs has to skip."""
    tables = await subject.read(lambda connection: diagnostics.read_tables(connection, subject.schema))
    worst = max(tables, key=lambda table: table.dead)
    details = {table.name: {"live": table.live, "dead": table.dead} for table in tables}
    message = f"{pluralize(worst.dead, 'dead row')} in {worst.name}"
    if worst.seconds_since_vacuum is not None:
        message += f", vacuumed {format_duration(worst.seconds_since_vacuum)} ago"
    if worst.dead < subject.limits.dead_rows:
        return Finding(check="dead rows", level=Level.OK, message=message, details=details)
    return Finding(
        check="dead rows",
        level=Level.WARNING,
        message=message,
        advice=f"Make autovacuum run more often ({_DOCS}), and check the oldest transaction. To vacuum now: "
        f"vacuum {subject.schema.quoted}.{worst.name}",
        details=details,
    )


async def check_autovacuum(subject: Subject) -> Finding:
    """Check that autovacuum is on, for these tables too."""
    settings = await subject.read(diagnostics.read_vacuum_settings)
    off = [name for name, is_on in settings._asdict().items() if not is_on]
    if off:
        return Finding(
            check="autovacuum",
            level=Level.WARNING,
            message=f"{' and '.join(off)} is off on this server, so dead rows are not removed",
            advice="; ".join(f"alter system set {name} = on" for name in off) + "; select pg_reload_conf()",
        )
    tables = await subject.read(lambda connection: diagnostics.read_tables(connection, subject.schema))
    excluded = [table.name for table in tables if table.is_left_out]
    if excluded:
        table = f"{subject.schema.quoted}.{excluded[0]}"
        return Finding(
            check="autovacuum",
            level=Level.WARNING,
            message=f"autovacuum is off for {join_truncated(excluded)}, so dead rows are not removed",
            advice=f"alter table {table} reset (autovacuum_enabled)",
            details={"tables": excluded},
        )
    return Finding(check="autovacuum", level=Level.OK, message="autovacuum is on")


async def check_transactions(subject: Subject) -> Finding:
    """Check for a long transaction, which keeps dead rows from being removed."""
    found, hidden = await subject.read(diagnostics.read_transactions)
    hidden_note = f"; {pluralize(hidden, 'session')} of other roles cannot be examined" if hidden else ""
    advice = "To see all sessions: grant pg_monitor to this role." if hidden else None
    oldest = found[0] if found else None
    details = {"oldest": oldest._asdict() if oldest else None, "hidden_sessions": hidden}
    warning, error = subject.limits.transaction
    if oldest is None or oldest.seconds < warning:
        message = (
            f"The oldest transaction has been open for {format_duration(oldest.seconds)}"
            if oldest
            else "No transaction is open"
        )
        message += hidden_note
        level = Level.NOTE if hidden else Level.OK
        return Finding(
            check="oldest transaction", level=level, message=message, advice=advice, details=details
        )
    session = f"{oldest.name} of {oldest.role}" + (f" ({oldest.application})" if oldest.application else "")
    return Finding(
        check="oldest transaction",
        level=Level.ERROR if oldest.seconds >= error else Level.WARNING,
        message=f"A transaction has been open for {format_duration(oldest.seconds)}: {session}, "
        f"{oldest.state}{hidden_note}",
        advice="While it is open, dead rows are not removed, and serial queues become slower. End it: "
        f"{oldest.remedy}",
        details=details,
    )


async def check_history(subject: Subject) -> Finding:
    """Check that workers can keep the partitions of the history."""
    schema = subject.schema
    found = await subject.read(lambda connection: history.inspect_partitions(connection, schema))
    if found is None or not await subject.read(lambda connection: history.can_read(connection, schema)):
        return Finding(check="history", level=Level.NOTE, message="This role cannot read the history")
    stray = await subject.read(lambda connection: history.count_stray_rows(connection, schema))
    days = len(found.days)
    details = {"days": days, "stray_rows": stray.total, "owner": found.owner}
    message, advice = f"{pluralize(days, 'day')} of history", None
    if stray.total and not found.may_create:
        message = f"The role {found.role!r} may not create partitions of the history, so old attempts are "
        message += "deleted row by row"
        advice = f"Let the workers connect as {found.owner!r}, or as a member of it: {_HISTORY_DOCS}"
    elif stray.total and days and found.missing():
        message = f"{pluralize(len(found.missing()), 'partition')} of the history are missing for today and "
        message += "the next days, so attempts go to the default partition"
        advice = f"Check the workers' logs for 'history': {_HISTORY_DOCS}"
    elif days > _MOST_DAYS:
        message = f"The history has {days} days, so old ones may not be removed"
        advice = f"Set history_keep, or run: graphile-worker history prune --older-than 30d ({_HISTORY_DOCS})"
    level = Level.OK if advice is None else Level.WARNING
    return Finding(check="history", level=level, message=message, advice=advice, details=details)
