"""The faults: what the harness does to workers, to their connections and to the server."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import asyncpg

from chaos.feeder import DISRUPTIVE_TASKS, ROLE
from chaos.fleet import role_of
from chaos.harness import ActiveFault
from chaos.ledger import now
from chaos.server import MOST_CONNECTIONS, Unreachable
from chaos.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chaos.harness import Harness
    from chaos.schedule import PlannedFault

_LONGEST_STOP = 40.0
_MOST_SESSIONS = 4
_HOUR = 3600
_RETRY_DELAY = 0.2
_REFUSING = """
    create or replace function refuse_some() returns trigger language plpgsql as $$
    begin
      if {} and old.id % 5 = 0 and (tg_op = 'DELETE' or new.locked_by is distinct from old.locked_by) then
        raise exception 'refused by the chaos test';
      end if;
      return coalesce(new, old);
    end $$"""
# The trigger stays, because dropping it would lock the table.
_TRIGGER = """
    create or replace trigger refuse_some before update or delete on graphile_worker._private_jobs
    for each row execute function refuse_some()"""
_LONGEST_JUMP = 6
"""The most hours by which a wall clock jumps into the past or the future."""


async def kill(harness: Harness, planned: PlannedFault) -> None:
    """Send a worker SIGKILL."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            pid = slot.pid
            slot.send(signal.SIGKILL)
            active.locks = await harness.server.locks()
            # Reading the locks may take long. Then the slot may hold a replacement by now, which stays alive.
            await until(lambda: not slot.alive or slot.pid != pid)


async def term(harness: Harness, planned: PlannedFault) -> None:
    """Stop a worker gracefully, with SIGTERM."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            pid = slot.pid
            slot.send(signal.SIGTERM)
            active.locks = await harness.server.locks()
            if not await until(lambda: not slot.alive or slot.pid != pid, _LONGEST_STOP):
                active.note = "did not stop, and was killed"
                slot.send(signal.SIGKILL)


async def freeze(harness: Harness, planned: PlannedFault) -> None:
    """Freeze a worker with SIGSTOP, and continue it."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            slot.send(signal.SIGSTOP)
            try:
                active.locks = await harness.server.locks()
                await asyncio.sleep(planned.seconds - (now() - active.at))
            finally:
                slot.send(signal.SIGCONT)


async def shift_clock(harness: Harness, planned: PlannedFault) -> None:
    """Shift a worker's wall clock, and set it back."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            ahead = round((2 * planned.chance - 1) * _LONGEST_JUMP * _HOUR)
            active.note = f"{ahead:+} s"
            slot.send_command(f"clock {ahead}")
            await asyncio.sleep(planned.seconds)
            slot.send_command("clock 0")


async def add_disruptive_job(harness: Harness, planned: PlannedFault) -> None:
    """Add a job that is itself a fault. The ledgers show later which worker it hit."""
    active = ActiveFault(planned.kind, [], [])
    if token := await harness.feeder.add_disruptive(DISRUPTIVE_TASKS[planned.kind], planned.seconds):
        await asyncio.sleep(planned.seconds)
        active.note = token
        harness.write(active)


async def cut(harness: Harness, planned: PlannedFault) -> None:
    """Cut all connections of a worker."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            slot.proxy.cut_all()
            active.locks = await harness.server.locks()


async def stall(harness: Harness, planned: PlannedFault) -> None:
    """Hold back everything that a worker sends and receives, and then deliver it."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            slot.proxy.frozen = True
            try:
                active.locks = await harness.server.locks()
                await asyncio.sleep(planned.seconds)
            finally:
                slot.proxy.frozen = False


async def blackhole(harness: Harness, planned: PlannedFault) -> None:
    """Discard everything that a worker sends and receives, without closing its connections."""
    if slot := await harness.target(planned):
        async with harness.inject(planned, slot) as active:
            slot.proxy.start_blackhole()
            try:
                active.locks = await harness.server.locks()
                await asyncio.sleep(planned.seconds)
            finally:
                slot.proxy.end_blackhole()


async def restart(harness: Harness, planned: PlannedFault) -> None:
    """Restart the server."""
    mode = "immediate" if planned.kind == "restart immediate" else "fast"
    async with harness.server.whole_server_fault, harness.inject(planned):
        await harness.server.restart(mode, away=planned.seconds)


async def terminate(harness: Harness, planned: PlannedFault) -> None:
    """Terminate some sessions of the workers that may be hit, and of the feeder."""
    slots = harness.fleet.of(*harness.programs)
    roles = [role_of(slot.number) for slot in slots]
    with suppress(*Unreachable):
        sessions = await harness.server.sessions([*roles, ROLE])
        chance = random.Random(planned.chance)
        chosen = chance.sample(sessions, min(len(sessions), chance.randint(1, _MOST_SESSIONS)))
        hit = [slot for slot, role in zip(slots, roles, strict=True) if role in {role for _, role in chosen}]
        active = ActiveFault(planned.kind, hit, [slot.pid for slot in hit if slot.alive])
        active.note = f"{len(chosen)} sessions"
        await harness.server.fetch(
            "select pg_terminate_backend(pid) from unnest($1::int[]) as pid", [pid for pid, _ in chosen]
        )
        active.locks = await harness.server.locks()
        if active.pids:  # otherwise only the feeder was hit
            harness.write(active)


async def exhaust(harness: Harness, planned: PlannedFault) -> None:
    """Open all connections that the server allows."""
    async with (
        harness.server.whole_server_fault,
        harness.inject(planned) as active,
        AsyncExitStack() as stack,
    ):
        for _ in range(MOST_CONNECTIONS):
            try:
                connection = await asyncpg.connect(harness.server.dsn())
            except Unreachable:
                break
            stack.callback(connection.terminate)
        await asyncio.sleep(planned.seconds - (now() - active.at))


async def stay_in_transaction(harness: Harness, planned: PlannedFault) -> None:
    """Keep a snapshot open, and with it every dead row."""
    async with harness.inject(planned):
        with suppress(*Unreachable):
            connection = await asyncpg.connect(harness.server.dsn())
            try:
                async with connection.transaction(isolation="repeatable_read"):
                    await connection.execute("select count(*) from graphile_worker._private_jobs")
                    await asyncio.sleep(planned.seconds)
            finally:
                connection.terminate()


async def refuse(harness: Harness, planned: PlannedFault) -> None:
    """Reject updates and deletes of some jobs, with a trigger."""
    async with harness.inject(planned):
        with suppress(*Unreachable):
            await harness.server.fetch(_REFUSING.format("true"))
            await harness.server.fetch(_TRIGGER)
            await asyncio.sleep(planned.seconds)
        while True:  # the trigger must be disabled, or these jobs would never end
            with suppress(*Unreachable):
                await harness.server.fetch(_REFUSING.format("false"))
                return
            await asyncio.sleep(_RETRY_DELAY)


FAULTS: dict[str, Callable[[Harness, PlannedFault], Awaitable[None]]] = {
    "kill": kill,
    "term": term,
    "freeze": freeze,
    "long freeze": freeze,
    "restart fast": restart,
    "restart immediate": restart,
    "restart long": restart,
    "terminate": terminate,
    "cut": cut,
    "stall": stall,
    "blackhole": blackhole,
    "long blackhole": blackhole,
    "clock": shift_clock,
    "hold gil": add_disruptive_job,
    "fork": add_disruptive_job,
    "exhaust": exhaust,
    "idle transaction": stay_in_transaction,
    "refuse": refuse,
}
