"""What is done to the workers, to their connections, and to the server."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import asyncpg

from chaos.feeder import NUISANCES, ROLE
from chaos.fleet import role_of
from chaos.ledger import now
from chaos.scene import Strike
from chaos.server import MOST_CONNECTIONS, Unreachable
from chaos.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chaos.scene import Scene
    from chaos.schedule import Planned

_LONGEST_STOP = 40.0
_MOST_SESSIONS = 4
_HOUR = 3600
_BETWEEN = 0.2
_REFUSING = """
    create or replace function refuse_some() returns trigger language plpgsql as $$
    begin
      if {} and old.id % 5 = 0 and (tg_op = 'DELETE' or new.locked_by is distinct from old.locked_by) then
        raise exception 'not this one';
      end if;
      return coalesce(new, old);
    end $$"""
# It stays: to drop it would lock the table.
_TRIGGER = """
    create or replace trigger refuse_some before update or delete on graphile_worker._private_jobs
    for each row execute function refuse_some()"""
_FARTHEST = 6
"""Hours that a wall clock jumps, at most, into the past or the future."""


async def kill(scene: Scene, planned: Planned) -> None:
    """`kill -9`."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            pid = slot.pid
            slot.send(signal.SIGKILL)
            strike.locks = await scene.server.locks()
            # If that took long there is another one by now, which nobody is going to kill.
            await until(lambda: not slot.alive or slot.pid != pid)


async def term(scene: Scene, planned: Planned) -> None:
    """Have it stop in order."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            pid = slot.pid
            slot.send(signal.SIGTERM)
            strike.locks = await scene.server.locks()
            if not await until(lambda: not slot.alive or slot.pid != pid, _LONGEST_STOP):
                strike.note = "it did not stop, and was killed"
                slot.send(signal.SIGKILL)


async def freeze(scene: Scene, planned: Planned) -> None:
    """Stop it in the middle of anything, and let it go on."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            slot.send(signal.SIGSTOP)
            try:
                strike.locks = await scene.server.locks()
                await asyncio.sleep(planned.seconds - (now() - strike.at))
            finally:
                slot.send(signal.SIGCONT)


async def jump(scene: Scene, planned: Planned) -> None:
    """Set its wall clock, and back."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            ahead = round((2 * planned.chance - 1) * _FARTHEST * _HOUR)
            strike.note = f"{ahead:+} s"
            slot.order(f"clock {ahead}")
            await asyncio.sleep(planned.seconds)
            slot.order("clock 0")


async def nuisance(scene: Scene, planned: Planned) -> None:
    """Have a job run that is a fault; which worker takes it shows later."""
    strike = Strike(planned.kind, [], [])
    if token := await scene.feeder.nuisance(NUISANCES[planned.kind], planned.seconds):
        await asyncio.sleep(planned.seconds)
        strike.note = token
        scene.write(strike)


async def cut(scene: Scene, planned: Planned) -> None:
    """Cut all its connections."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            slot.proxy.cut_all()
            strike.locks = await scene.server.locks()


async def stall(scene: Scene, planned: Planned) -> None:
    """Let nothing pass, and then all of it."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            slot.proxy.frozen = True
            try:
                strike.locks = await scene.server.locks()
                await asyncio.sleep(planned.seconds)
            finally:
                slot.proxy.frozen = False


async def darken(scene: Scene, planned: Planned) -> None:
    """Let it believe that it is connected."""
    if slot := await scene.target(planned):
        async with scene.strike(planned, slot) as strike:
            slot.proxy.go_dark()
            try:
                strike.locks = await scene.server.locks()
                await asyncio.sleep(planned.seconds)
            finally:
                slot.proxy.light_up()


async def restart(scene: Scene, planned: Planned) -> None:
    """Restart the server."""
    mode = "immediate" if planned.kind == "restart immediate" else "fast"
    async with scene.server.changing, scene.strike(planned):
        await scene.server.restart(mode, away=planned.seconds)


async def terminate(scene: Scene, planned: Planned) -> None:
    """End some sessions, of the workers that may be hit and of whoever adds jobs."""
    slots = scene.fleet.of(*scene.programs)
    roles = [role_of(slot.number) for slot in slots]
    with suppress(*Unreachable):
        sessions = await scene.server.sessions([*roles, ROLE])
        chance = random.Random(planned.chance)
        chosen = chance.sample(sessions, min(len(sessions), chance.randint(1, _MOST_SESSIONS)))
        hit = [slot for slot, role in zip(slots, roles, strict=True) if role in {role for _, role in chosen}]
        strike = Strike(planned.kind, hit, [slot.pid for slot in hit if slot.alive])
        strike.note = f"{len(chosen)} sessions"
        await scene.server.ask(
            "select pg_terminate_backend(pid) from unnest($1::int[]) as pid", [pid for pid, _ in chosen]
        )
        strike.locks = await scene.server.locks()
        if strike.pids:  # only who adds jobs was hit otherwise
            scene.write(strike)


async def exhaust(scene: Scene, planned: Planned) -> None:
    """Take all connections that the server has to give."""
    async with scene.server.changing, scene.strike(planned) as strike, AsyncExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            try:
                connection = await asyncpg.connect(scene.server.dsn())
            except Unreachable:
                break
            stack.callback(connection.terminate)
        await asyncio.sleep(planned.seconds - (now() - strike.at))


async def stay_in_transaction(scene: Scene, planned: Planned) -> None:
    """Keep a snapshot, and with it every dead row."""
    async with scene.strike(planned):
        with suppress(*Unreachable):
            connection = await asyncpg.connect(scene.server.dsn())
            try:
                async with connection.transaction(isolation="repeatable_read"):
                    await connection.execute("select count(*) from graphile_worker._private_jobs")
                    await asyncio.sleep(planned.seconds)
            finally:
                connection.terminate()


async def refuse(scene: Scene, planned: Planned) -> None:
    """Have a trigger refuse what is done to some jobs."""
    async with scene.strike(planned):
        with suppress(*Unreachable):
            await scene.server.ask(_REFUSING.format("true"))
            await scene.server.ask(_TRIGGER)
            await asyncio.sleep(planned.seconds)
        while True:  # or no job would ever end
            with suppress(*Unreachable):
                await scene.server.ask(_REFUSING.format("false"))
                return
            await asyncio.sleep(_BETWEEN)


FAULTS: dict[str, Callable[[Scene, Planned], Awaitable[None]]] = {
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
    "dark": darken,
    "long dark": darken,
    "clock": jump,
    "hold gil": nuisance,
    "fork": nuisance,
    "exhaust": exhaust,
    "idle transaction": stay_in_transaction,
    "refuse": refuse,
}
