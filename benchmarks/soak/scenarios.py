"""The scenarios of the soak test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_TUNED_SERVER = {"autovacuum_naptime": "10s"}
_TUNED_TABLES = ("alter table graphile_worker._private_jobs set (autovacuum_vacuum_scale_factor = 0.01);",)

_SCHEDULED = 1_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings of a server and its tables, and other load."""

    name: str
    server: Mapping[str, str] = field(default_factory=dict)
    """The settings that differ from those of `initdb`."""
    tables: tuple[str, ...] = ()
    """Statements that set storage parameters."""
    old_transaction: tuple[float, float] | None = None
    """The share of the jobs after which a transaction is opened, and the seconds that it stays open."""
    scheduled: int = 0
    """The number of other jobs, which are due in a day."""
    judged: bool = True
    """Whether dead rows and latency must stay within limits."""

    @property
    def settings(self) -> list[str]:
        """The settings as SQL."""
        system = [f"alter system set {name} = '{value}';" for name, value in self.server.items()]
        return [*system, *self.tables]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("default"),
        Scenario("tuned", _TUNED_SERVER, _TUNED_TABLES),
        Scenario("scheduled", scheduled=_SCHEDULED),
        Scenario("scheduled-tuned", _TUNED_SERVER, _TUNED_TABLES, scheduled=_SCHEDULED),
        Scenario("old-transaction", old_transaction=(0.3, 60.0), judged=False),
    )
}
