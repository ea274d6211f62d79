"""When a job that failed is tried again: policies for ``@app.task(retry=...)``.

A policy is a function of a `Failure`. It returns seconds or a timedelta until the next attempt, or the moment
of it as an aware datetime, or None for Graphile Worker's own delay; or it raises `Fail`, and then there is
none. Those below are ready-made. How often a job is tried is its `max_attempts`, not the policy's business.

    >>> from graphile_worker.retry import Exponential, Failure
    >>> policy = Exponential(first=1, factor=2, cap=60)
    >>> [policy.delay(attempt) for attempt in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
"""

from __future__ import annotations

import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.durations import LONGEST, Duration, seconds, takes_one
from graphile_worker.errors import BatchError, ConfigurationError
from graphile_worker.job import as_utc
from graphile_worker.outcome import Fail, default_delay

if TYPE_CHECKING:
    from graphile_worker.job import Job

__all__ = [
    "ByException",
    "Delays",
    "Exponential",
    "Failure",
    "Fixed",
    "Linear",
    "never",
]

_LARGEST_FACTOR = 1000.0
_UNSAID = {"cap": LONGEST, "jitter": 0.0}
_GRAPHILES_LONGEST = default_delay(10)
Decision: TypeAlias = Duration | datetime | None


class Failure(msgspec.Struct, frozen=True):
    """An attempt that failed: what a policy decides by."""

    job: Job
    error: BaseException

    @property
    def attempt(self) -> int:
        """The first is 1."""
        return self.job.attempts


Policy: TypeAlias = Callable[[Failure], Decision]
RetryOption: TypeAlias = (
    "Policy | timedelta | Sequence[Duration] | Mapping[type[BaseException], RetryOption] | None"
)
"""What can be given as ``retry=``."""


class _Growing(ABC):
    """A delay that depends on the attempt, up to a cap, and shortened a bit at random.

    The random part only takes away, up to `jitter` of the whole: the cap holds, and jobs that failed together
    do not come back together.
    """

    def __init__(self, *, cap: Duration | None, jitter: float) -> None:
        self.cap = LONGEST if cap is None else min(seconds("cap", cap), LONGEST)
        self.jitter = _number("jitter", jitter, 0, 1)

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in vars(self).items() if value != _UNSAID.get(name)]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, vars(self).values())))

    def __call__(self, failure: Failure) -> float:
        delay = self.delay(failure.attempt)
        return delay - delay * self.jitter * random.random() if self.jitter else delay  # noqa: S311

    def delay(self, attempt: int) -> float:
        """Seconds after that attempt, without the random part."""
        try:
            return min(self._uncapped(attempt), self.cap)
        except OverflowError:
            return self.cap

    @abstractmethod
    def _uncapped(self, attempt: int) -> float: ...


class Exponential(_Growing):
    """Each delay is `factor` times the one before. The defaults are Graphile Worker's own delays.

    >>> round(Exponential().delay(1), 2), round(Exponential().delay(25), 1)
    (2.72, 22026.5)
    """

    def __init__(
        self,
        *,
        first: Duration = math.e,
        factor: float = math.e,
        cap: Duration | None = _GRAPHILES_LONGEST,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(cap=cap, jitter=jitter)
        self.first, self.factor = seconds("first", first), _number("factor", factor, 1, _LARGEST_FACTOR)

    def _uncapped(self, attempt: int) -> float:
        return self.first * self.factor ** (attempt - 1)


class Fixed(_Growing):
    """Always the same delay.

    >>> Fixed(30).delay(7)
    30.0
    """

    def __init__(self, delay: Duration, *, jitter: float = 0.0) -> None:
        super().__init__(cap=None, jitter=jitter)
        self.every = seconds("delay", delay)

    def _uncapped(self, attempt: int) -> float:  # noqa: ARG002
        return self.every


class Linear(_Growing):
    """Each delay is `step` longer than the one before.

    >>> [Linear(10, cap=25).delay(attempt) for attempt in (1, 2, 3)]
    [10.0, 20.0, 25.0]
    """

    def __init__(
        self,
        step: Duration,
        *,
        first: Duration | None = None,
        cap: Duration | None = None,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(cap=cap, jitter=jitter)
        self.step = seconds("step", step)
        self.first = self.step if first is None else seconds("first", first)

    def _uncapped(self, attempt: int) -> float:
        return self.first + self.step * (attempt - 1)


class Delays(_Growing):
    """These delays, one after another; the last one again and again.

    >>> [Delays([1, 10]).delay(attempt) for attempt in (1, 2, 3)]
    [1.0, 10.0, 10.0]
    """

    def __init__(self, delays: Sequence[Duration], *, jitter: float = 0.0) -> None:
        super().__init__(cap=None, jitter=jitter)
        self.delays = tuple(seconds(f"delays[{place}]", delay) for place, delay in enumerate(delays))
        if not self.delays:
            raise ConfigurationError("A list of delays needs at least one.")

    def _uncapped(self, attempt: int) -> float:
        return self.delays[min(attempt, len(self.delays)) - 1]


class ByException:
    """The policy of the exception's type, or of the nearest type that it derives from.

    What is none of these is tried again as Graphile Worker has it.

    >>> ByException({TimeoutError: Fixed(5), OSError: Linear(60), ValueError: never}).of(ConnectionError())
    Linear(step=60.0, first=60.0)
    """

    def __init__(self, policies: Mapping[type[BaseException], Any]) -> None:
        kinds: Iterable[Any] = policies
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ConfigurationError(
                    f"A mapping for retry= has types of exceptions as keys, not {kind!r}."
                )
        self.policies = {
            kind: read_policy(policy, f"retry[{kind.__name__}]") for kind, policy in policies.items()
        }

    def __repr__(self) -> str:
        return f"ByException({self.policies!r})"

    def __call__(self, failure: Failure) -> Decision:
        policy = self.of(failure.error)
        return None if policy is None else policy(failure)

    def of(self, error: BaseException) -> Policy | None:
        """The policy for that exception. One of a group counts alone, and items of a batch that agree."""
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            return self.of(error.exceptions[0])
        if isinstance(error, BatchError) and BatchError not in self.policies:
            first, *others = [self.of(one) for one in error.errors] or [None]
            if first is not None and all(other is first for other in others):
                return first
        return next((self.policies[kind] for kind in type(error).__mro__ if kind in self.policies), None)


def never(failure: Failure) -> Decision:
    """Do not try again."""
    raise Fail from failure.error


def read_policy(given: object, name: str = "retry") -> Policy | None:
    """What was given as `retry`: a function, a timedelta, a list of delays, or a mapping by exception."""
    match given:
        case None:
            return None
        case Mapping() if given:
            return ByException(given)
        case int() | float():  # people of other queues would read that as a number of attempts
            raise ConfigurationError(
                f"{name} is {given!r}. For seconds between attempts: Fixed({given!r}), of "
                "graphile_worker.retry, or a timedelta. For how many there are: max_attempts."
            )
        case timedelta():
            return Fixed(given)
        case list() | tuple():
            return Delays(given)
        case _ if inspect.iscoroutinefunction(given) or isinstance(given, type):
            pass
        case _ if callable(given) and takes_one(given):
            return given
    raise ConfigurationError(
        f"{name} is {given!r}; it must be a policy of graphile_worker.retry, seconds or a timedelta, a "
        "list of them, a mapping of types of exceptions to any of these, or a plain function of a Failure."
    )


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigurationError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}.")
    return value


def check_decision(decision: object) -> tuple[float | None, datetime | None]:
    """What a policy returned: seconds, or a moment, or neither."""
    if decision is None:
        return None, None
    if isinstance(decision, datetime):
        return None, as_utc("what the policy returned", decision)
    return seconds("What the policy returned", decision), None
