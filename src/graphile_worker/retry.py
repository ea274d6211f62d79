"""Retry policies for ``@app.task(retry=...)``: when to retry a job that failed.

A policy is a function that takes a `Failure`. It returns the delay until the next attempt as seconds or a
timedelta, or the time of that attempt as an aware datetime. It returns None for Graphile Worker's own delay,
and raises `Fail` to stop retrying. This module has ready-made policies. A policy does not limit the number of
attempts: the job's `max_attempts` does.

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

from graphile_worker._base.durations import LONGEST, Duration, accepts_one_argument, seconds
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
_OMITTED_IN_REPR = {"cap": LONGEST, "jitter": 0.0}
_GRAPHILE_MAX_DELAY = default_delay(10)
Decision: TypeAlias = Duration | datetime | None


class Failure(msgspec.Struct, frozen=True):
    """A failed attempt, as a policy receives it.

    Attributes:
        job: The job that failed.
        error: The exception that its task raised.
    """

    job: Job
    error: BaseException

    @property
    def attempt(self) -> int:
        """The number of the failed attempt, starting at 1."""
        return self.job.attempts


Policy: TypeAlias = Callable[[Failure], Decision]
RetryOption: TypeAlias = (
    "Policy | timedelta | Sequence[Duration] | Mapping[type[BaseException], RetryOption] | None"
)
"""The values that ``retry=`` accepts."""


class _Growing(ABC):
    """A delay that depends on the attempt, with a maximum and with random jitter.

    Jitter only shortens a delay, by up to that fraction. So the cap always holds, and jobs that failed at the
    same time are not all retried at the same time.
    """

    def __init__(self, *, cap: Duration | None, jitter: float) -> None:
        self.cap = LONGEST if cap is None else min(seconds("cap", cap), LONGEST)
        self.jitter = _number("jitter", jitter, 0, 1)

    def __repr__(self) -> str:
        given = [
            f"{name}={value!r}" for name, value in vars(self).items() if value != _OMITTED_IN_REPR.get(name)
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, vars(self).values())))

    def __call__(self, failure: Failure) -> float:
        delay = self.delay(failure.attempt)
        return delay - delay * self.jitter * random.random() if self.jitter else delay  # noqa: S311

    def delay(self, attempt: int) -> float:
        """Return the delay after this attempt in seconds, without jitter."""
        try:
            return min(self._uncapped(attempt), self.cap)
        except OverflowError:
            return self.cap

    @abstractmethod
    def _uncapped(self, attempt: int) -> float: ...


class Exponential(_Growing):
    """Exponential backoff: each delay is `factor` times the previous one.

    The defaults are Graphile Worker's own delays.

    Args:
        first: Delay after the first attempt, in seconds or as a timedelta.
        factor: Factor from each delay to the next, from 1 to 1000.
        cap: Maximum delay; None for no maximum.
        jitter: The fraction of a delay, from 0 to 1, by which it may be shortened at random.

    >>> round(Exponential().delay(1), 2), round(Exponential().delay(25), 1)
    (2.72, 22026.5)
    """

    def __init__(
        self,
        *,
        first: Duration = math.e,
        factor: float = math.e,
        cap: Duration | None = _GRAPHILE_MAX_DELAY,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(cap=cap, jitter=jitter)
        self.first, self.factor = seconds("first", first), _number("factor", factor, 1, _LARGEST_FACTOR)

    def _uncapped(self, attempt: int) -> float:
        return self.first * self.factor ** (attempt - 1)


class Fixed(_Growing):
    """The same delay after each attempt.

    Args:
        delay: The delay, in seconds or as a timedelta.
        jitter: The fraction of a delay, from 0 to 1, by which it may be shortened at random.

    >>> Fixed(30).delay(7)
    30.0
    """

    def __init__(self, delay: Duration, *, jitter: float = 0.0) -> None:
        super().__init__(cap=None, jitter=jitter)
        self.every = seconds("delay", delay)

    def _uncapped(self, attempt: int) -> float:  # noqa: ARG002
        return self.every


class Linear(_Growing):
    """Linear backoff: each delay is longer than the previous one by `step`.

    Args:
        step: Difference between two delays, in seconds or as a timedelta.
        first: Delay after the first attempt; by default `step`.
        cap: Maximum delay; None for no maximum.
        jitter: The fraction of a delay, from 0 to 1, by which it may be shortened at random.

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
    """A list of delays, one per attempt. The last delay repeats.

    Args:
        delays: The delays, in seconds or as timedeltas.
        jitter: The fraction of a delay, from 0 to 1, by which it may be shortened at random.

    >>> [Delays([1, 10]).delay(attempt) for attempt in (1, 2, 3)]
    [1.0, 10.0, 10.0]
    """

    def __init__(self, delays: Sequence[Duration], *, jitter: float = 0.0) -> None:
        super().__init__(cap=None, jitter=jitter)
        self.delays = tuple(seconds(f"delays[{index}]", delay) for index, delay in enumerate(delays))
        if not self.delays:
            raise ConfigurationError("delays is empty; it must have at least one delay.")

    def _uncapped(self, attempt: int) -> float:
        return self.delays[min(attempt, len(self.delays)) - 1]


class ByException:
    """A policy per exception type. The closest base class of the raised exception applies.

    Other exceptions are retried with Graphile Worker's own delays.

    Args:
        policies: Exception types, and for each of them a value that ``retry=`` accepts.

    >>> ByException({TimeoutError: Fixed(5), OSError: Linear(60), ValueError: never}).of(ConnectionError())
    Linear(step=60.0, first=60.0)
    """

    def __init__(self, policies: Mapping[type[BaseException], Any]) -> None:
        kinds: Iterable[Any] = policies
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ConfigurationError(
                    f"Invalid key {kind!r} in the mapping for retry=: it must be an exception type."
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
        """Return the policy for an exception; None if no type matches.

        An exception group with one exception counts as that exception. A `BatchError` counts as one of its
        errors if the same policy applies to all of them.
        """
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            return self.of(error.exceptions[0])
        if isinstance(error, BatchError) and BatchError not in self.policies:
            first, *others = [self.of(one) for one in error.errors] or [None]
            if first is not None and all(other is first for other in others):
                return first
        return next((self.policies[kind] for kind in type(error).__mro__ if kind in self.policies), None)


def never(failure: Failure) -> Decision:
    """Never retry: fail the job permanently."""
    raise Fail from failure.error


def read_policy(given: object, name: str = "retry") -> Policy | None:
    """Return the policy for a value of `retry=`: a function, a timedelta, a list of delays, or a mapping.

    Raises:
        ConfigurationError: The value is anything else.
    """
    match given:
        case None:
            return None
        case Mapping() if given:
            return ByException(given)
        case int() | float():  # in other job queues this is the number of attempts
            raise ConfigurationError(
                f"{name} is {given!r}, which is ambiguous. For a delay in seconds, use Fixed({given!r}) from "
                "graphile_worker.retry, or a timedelta. For the number of attempts, use max_attempts."
            )
        case timedelta():
            return Fixed(given)
        case list() | tuple():
            return Delays(given)
        case _ if inspect.iscoroutinefunction(given) or isinstance(given, type):
            pass
        case _ if callable(given) and accepts_one_argument(given):
            return given
    raise ConfigurationError(
        f"{name} is {given!r}; it must be a policy from graphile_worker.retry, a timedelta, a list of "
        "delays, a mapping of exception types to any of these, or a plain function that takes a Failure."
    )


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigurationError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}.")
    return value


def check_decision(decision: object) -> tuple[float | None, datetime | None]:
    """Return the decision of a policy as seconds, or as a datetime, or as neither.

    Raises:
        ConfigurationError: The policy returned something that is not a duration.
        InvalidJobError: The policy returned a datetime without a time zone.
    """
    if decision is None:
        return None, None
    if isinstance(decision, datetime):
        return None, as_utc("The return value of the retry policy", decision)
    return seconds("The return value of the retry policy", decision), None
