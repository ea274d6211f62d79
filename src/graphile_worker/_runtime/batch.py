"""Batches: a job whose payload is a list, of which each item succeeds or fails by itself.

Items that failed stay in the payload, in their order, and are tried again; the others are done.
"""

from __future__ import annotations

import asyncio
import inspect
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from graphile_worker.conversion import MisfitError, convert
from graphile_worker.errors import BatchError, InvalidPayloadError, TaskError
from graphile_worker.outcome import Cancel, Fail, Retry, Snooze, describe_error, storable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MOST_NAMED = 20


class Batch:
    """The items of one job.

    Args:
        items: As they are stored.
        kind: What each must be.
        final: Whether one that is something else is never tried again.
    """

    def __init__(self, items: Any, kind: Any, *, final: bool) -> None:
        if not isinstance(items, list):
            raise InvalidPayloadError(
                "The payload does not fit: it must be a list, for the task takes batches"
            )
        self._count = len(items)
        self._final = final
        self._errors: dict[int, BaseException] = {}
        self._places: list[int] = []
        self.good: list[Any] = []
        """Those that are what they must be."""
        for place, item in enumerate(items):
            try:
                self.good.append(convert(item, kind))
            except MisfitError as error:
                self._errors[place] = InvalidPayloadError(str(error), path=error.path)
            else:
                self._places.append(place)

    async def settle(self, results: Any) -> None:
        """See what the function returned for the items it got: nothing, or a result for each.

        Raises:
            BatchError: Items failed.
            TaskError: It returned something else, so nobody knows which items are done.
        """
        if (error := as_error(results)) is not None:
            raise error
        if results is not None:
            errors = await failures(self._one_for_each(results))
            self._errors |= {self._places[place]: error for place, error in errors.items()}
        if self._errors:
            raise failed_in_part(self._count, self._errors, is_final=self._is_final)

    def _one_for_each(self, results: Any) -> Sequence[Any]:
        count = len(self._places)  # the list that it got is its own by now
        if isinstance(results, list | tuple) and len(results) == count:
            return results
        if isinstance(results, list | tuple):
            discard(results)
            what = f"{len(results)} results for {count} items"
        else:
            discard([results])
            what = f"something of type {type(results).__name__}, so nobody knows which items are done"
        raise TaskError(
            f"It returned {what}. A batch task returns nothing, or a list with one result for each item."
        )

    def _is_final(self, error: BaseException) -> bool:
        return isinstance(error, Fail) or (self._final and isinstance(error, InvalidPayloadError))


async def failures(results: Sequence[Any]) -> dict[int, BaseException]:
    """Those results that are failures, by their places; what is to be awaited is.

    An item that is not wanted any more, `Cancel`, is none.
    """
    if any(map(inspect.isawaitable, results)):
        results = await asyncio.gather(*map(_awaited, results), return_exceptions=True)
    errors = {place: as_error(result) for place, result in enumerate(results)}
    return {
        place: error for place, error in errors.items() if error is not None and not isinstance(error, Cancel)
    }


def as_error(result: Any) -> BaseException | None:
    """What is to be raised for a result: it may be an exception or, as with ``raise``, the class of one."""
    if isinstance(result, BaseException):
        return result
    if not (isinstance(result, type) and issubclass(result, BaseException)):
        return None
    try:
        return result()
    except Exception:  # noqa: BLE001 - it cannot be made without arguments
        return TaskError(result.__name__)


def time_chosen(error: BatchError) -> dict[str, Any]:
    """When to try again, as `Failed` has it, if all items that are to be tried again have chosen a time.

    They stay one job, so the earliest holds.
    """
    final = set(error.final_places)
    open_items = [item for place, item in zip(error.places, error.errors, strict=False) if place not in final]
    choices = [item for item in open_items if isinstance(item, Retry | Snooze)]
    if not choices or len(choices) < len(open_items):
        return {}
    earliest = min(choices, key=_seconds_until)
    if isinstance(earliest, Snooze):
        return {"delay": earliest.delay}
    return {"delay": earliest.after, "at": earliest.at}


def _seconds_until(choice: Retry | Snooze) -> float:
    if isinstance(choice, Retry) and choice.at is not None:
        return (choice.at - datetime.now(UTC)).total_seconds()
    return choice.delay if isinstance(choice, Snooze) else choice.after or 0.0


def discard(results: Sequence[Any]) -> None:
    """Nobody will await those of them that could be."""
    for result in results:
        if inspect.iscoroutine(result):
            result.close()


async def _awaited(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop
        return error


def failed_in_part(
    count: int,
    errors: Mapping[int, BaseException],
    *,
    is_final: Callable[[BaseException], bool] = lambda error: isinstance(error, Fail),
) -> BatchError:
    """An error that says which items failed, and of what."""
    places = sorted(errors)
    final = [place for place in places if is_final(errors[place])]
    named = "; ".join(f"[{place}] {_told(errors[place])}" for place in places[:_MOST_NAMED])
    if len(places) > _MOST_NAMED:
        named += f"; and {len(places) - _MOST_NAMED} more"
    return BatchError(
        f"{len(places)} of {count} items failed: {named}",
        errors=[errors[place] for place in places],
        places=places,
        final_places=final,
        final=len(final) == len(places),
    )


def _told(error: BaseException) -> str:
    """Without the time that the item has chosen: that of another may hold."""
    if isinstance(error, Retry | Snooze):
        return storable(error.why or "To be tried again")
    return describe_error(error)
