"""Batches: jobs whose payload is a list, where each item succeeds or fails on its own.

Items that failed stay in the payload, in their order, and are retried. The others are done.
"""

from __future__ import annotations

import asyncio
import inspect
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from graphile_worker._tasks.conversion import MisfitError, convert
from graphile_worker.errors import BatchError, InvalidPayloadError, TaskError
from graphile_worker.outcome import Cancel, Fail, Retry, Snooze, describe_error, storable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MAX_NAMED = 20


class BatchItems:
    """The items of one job's payload.

    Args:
        items: The payload.
        kind: The type of each item.
        final: Whether an item of another type is never retried.
    """

    def __init__(self, items: Any, kind: Any, *, final: bool) -> None:
        if not isinstance(items, list):
            raise InvalidPayloadError("Invalid payload: it must be a list, because the task takes batches")
        self._count = len(items)
        self._final = final
        self._errors: dict[int, BaseException] = {}
        self._indexes: list[int] = []
        self.valid_items: list[Any] = []
        """The items that have the right type."""
        for index, item in enumerate(items):
            try:
                self.valid_items.append(convert(item, kind))
            except MisfitError as error:
                self._errors[index] = InvalidPayloadError(str(error), path=error.path)
            else:
                self._indexes.append(index)

    async def settle(self, results: Any) -> None:
        """Evaluate what the function returned for the valid items: None, or one result per item.

        Raises:
            BatchError: Items failed.
            TaskError: The function returned something else, so it is unknown which items are done.
        """
        if (error := as_error(results)) is not None:
            raise error
        if results is not None:
            errors = await failed_items(self._result_per_item(results))
            self._errors |= {self._indexes[index]: error for index, error in errors.items()}
        if self._errors:
            raise partial_failure(self._count, self._errors, is_final=self._is_final)

    def _result_per_item(self, results: Any) -> Sequence[Any]:
        count = len(self._indexes)  # the function may have changed the list that it got
        if isinstance(results, list | tuple) and len(results) == count:
            return results
        if isinstance(results, list | tuple):
            close_coroutines(results)
            what = f"{len(results)} results for {count} items"
        else:
            close_coroutines([results])
            what = f"a {type(results).__name__}, so it is unknown which items are done"
        raise TaskError(
            f"The task returned {what}. A batch task must return None, or a list with one result per item."
        )

    def _is_final(self, error: BaseException) -> bool:
        return isinstance(error, Fail) or (self._final and isinstance(error, InvalidPayloadError))


async def failed_items(results: Sequence[Any]) -> dict[int, BaseException]:
    """Return the errors among the results by index, after awaiting those that are awaitable.

    A cancelled item, whose result is `Cancel`, is done and has not failed.
    """
    if any(map(inspect.isawaitable, results)):
        results = await asyncio.gather(*map(_awaited, results), return_exceptions=True)
    errors = {index: as_error(result) for index, result in enumerate(results)}
    return {
        index: error for index, error in errors.items() if error is not None and not isinstance(error, Cancel)
    }


def as_error(result: Any) -> BaseException | None:
    """Return the error that a result stands for: an exception or, as with ``raise``, an exception class."""
    if isinstance(result, BaseException):
        return result
    if not (isinstance(result, type) and issubclass(result, BaseException)):
        return None
    try:
        return result()
    except Exception:  # noqa: BLE001 - the class needs arguments
        return TaskError(result.__name__)


def chosen_retry_time(error: BatchError) -> dict[str, Any]:
    """Return when to retry, as arguments of `Failed`, if all items to be retried have chosen a time.

    The items stay one job, so the earliest time counts.
    """
    final = set(error.final_indexes)
    open_items = [
        item for index, item in zip(error.indexes, error.errors, strict=False) if index not in final
    ]
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


def close_coroutines(results: Sequence[Any]) -> None:
    """Close the coroutines among the results, because nothing will await them."""
    for result in results:
        if inspect.iscoroutine(result):
            result.close()


async def _awaited(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop
        return error


def partial_failure(
    count: int,
    errors: Mapping[int, BaseException],
    *,
    is_final: Callable[[BaseException], bool] = lambda error: isinstance(error, Fail),
) -> BatchError:
    """Return an error that names the items that failed, and their errors."""
    indexes = sorted(errors)
    final = [index for index in indexes if is_final(errors[index])]
    named = "; ".join(f"[{index}] {_describe(errors[index])}" for index in indexes[:_MAX_NAMED])
    if len(indexes) > _MAX_NAMED:
        named += f"; and {len(indexes) - _MAX_NAMED} more"
    return BatchError(
        f"{len(indexes)} of {count} items failed: {named}",
        errors=[errors[index] for index in indexes],
        indexes=indexes,
        final_indexes=final,
        final=len(final) == len(indexes),
    )


def _describe(error: BaseException) -> str:
    """Describe an item's error without its retry time, because the time of another item may count."""
    if isinstance(error, Retry | Snooze):
        return storable(error.why or "To be retried")
    return describe_error(error)
