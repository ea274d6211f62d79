"""What keeps the tables small, and what keeps it from doing so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._db import symptoms
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.durations import lasting
from graphile_worker.wording import counted, some

if TYPE_CHECKING:
    from graphile_worker.doctor.subject import Subject

_ADVICE = "see docs/operations.md, keeping the tables small"


async def check_dead_rows(subject: Subject) -> Finding:
    """Whether rows that are dead pile up; each look for jobs walks past them."""
    tables = await subject.look(lambda on: symptoms.read_tables(on, subject.schema))
    worst = max(tables, key=lambda table: table.dead)
    details = {table.name: {"live": table.live, "dead": table.dead} for table in tables}
    says = f"{counted(worst.dead, 'dead row')} in {worst.name}"
    if worst.seconds_since_vacuum is not None:
        says += f", vacuumed {lasting(worst.seconds_since_vacuum)} ago"
    if worst.dead < subject.limits.dead_rows:
        return Finding(check="dead rows", level=Level.OK, says=says, details=details)
    return Finding(
        check="dead rows",
        level=Level.WARNING,
        says=says,
        advice=f"Let autovacuum come more often ({_ADVICE}), and see the oldest transaction. Now: "
        f"vacuum {subject.schema.quoted}.{worst.name}",
        details=details,
    )


async def check_autovacuum(subject: Subject) -> Finding:
    """Whether it is on, and for these tables too."""
    settings = await subject.look(symptoms.read_vacuum_settings)
    off = [name for name, is_on in settings._asdict().items() if not is_on]
    if off:
        return Finding(
            check="autovacuum",
            level=Level.WARNING,
            says=f"{' and '.join(off)} is off on this server, so dead rows stay",
            advice="; ".join(f"alter system set {name} = on" for name in off) + "; select pg_reload_conf()",
        )
    tables = await subject.look(lambda on: symptoms.read_tables(on, subject.schema))
    left_out = [table.name for table in tables if table.is_left_out]
    if left_out:
        table = f"{subject.schema.quoted}.{left_out[0]}"
        return Finding(
            check="autovacuum",
            level=Level.WARNING,
            says=f"autovacuum is off for {some(left_out)}, so dead rows stay",
            advice=f"alter table {table} reset (autovacuum_enabled)",
            details={"tables": left_out},
        )
    return Finding(check="autovacuum", level=Level.OK, says="autovacuum is on")


async def check_transactions(subject: Subject) -> Finding:
    """Whether a transaction keeps dead rows from being removed."""
    found, hidden = await subject.look(symptoms.read_transactions)
    unseen = f"; {counted(hidden, 'session')} of others may not be looked into" if hidden else ""
    advice = "To see all sessions: grant pg_monitor to this role." if hidden else None
    oldest = found[0] if found else None
    details = {"oldest": oldest._asdict() if oldest else None, "hidden_sessions": hidden}
    warning, trouble = subject.limits.transaction
    if oldest is None or oldest.seconds < warning:
        seen = f"The oldest open transaction is {lasting(oldest.seconds)} old" if oldest else "None is open"
        says = seen + unseen
        level = Level.NOTE if hidden else Level.OK
        return Finding(check="oldest transaction", level=level, says=says, advice=advice, details=details)
    who = f"{oldest.name} of {oldest.role}" + (f" ({oldest.application})" if oldest.application else "")
    return Finding(
        check="oldest transaction",
        level=Level.TROUBLE if oldest.seconds >= trouble else Level.WARNING,
        says=f"A transaction has been open for {lasting(oldest.seconds)}: {who}, {oldest.state}{unseen}",
        advice="While it is open no dead row is removed, and serial queues get slower. End it: "
        f"{oldest.remedy}",
        details=details,
    )
