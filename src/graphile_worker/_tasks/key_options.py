"""The task options `debounce`, `throttle` and `unique`: short forms of a job key with a mode and a delay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.cron.item import parse_fill
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODES = {"debounce": "replace", "throttle": "preserve_run_at", "unique": "preserve_run_at"}
_SET_BY_THESE = ("job_key", "job_key_mode", "run_at")


def expand_key_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `debounce`, `throttle`, `unique` and `key` by the options that they stand for.

    Raises:
        ConfigurationError: They contradict each other or another option, or there is no key.

    Example:
        >>> expand_key_options({"debounce": "30s", "key": "report:{day}"})
        {'job_key': 'report:{day}', 'job_key_mode': 'replace', 'delay': datetime.timedelta(seconds=30)}
        >>> expand_key_options({"unique": True, "key": "sync"})
        {'job_key': 'sync', 'job_key_mode': 'preserve_run_at'}
    """
    chosen = [name for name in _MODES if options.get(name) is not None and options[name] is not False]
    expanded = {name: value for name, value in options.items() if name not in {*_MODES, "key"}}
    key = options.get("key")
    if not chosen:
        if key is not None:
            raise ConfigurationError(
                f"key={key!r} needs debounce, throttle or unique. To set only a job key, use job_key={key!r}."
            )
        return expanded
    [name, *others] = chosen
    if others:
        raise ConfigurationError(f"A task cannot have both {name} and {others[0]}. Choose one.")
    for other in _SET_BY_THESE:
        if options.get(other) is not None:
            fix = "Use key= for the key." if other == "job_key" else f"Remove {other} or {name}."
            raise ConfigurationError(f"A task cannot have both {name} and {other}. {fix}")
    if key is None:
        raise ConfigurationError(f"{name} needs a key, for example key='report:{{day}}'.")
    expanded |= {"job_key": key, "job_key_mode": _MODES[name]}
    if name != "unique":
        expanded["delay"] = _read_interval(name, options[name])
    elif options[name] is not True:
        raise ConfigurationError(f"unique is {options[name]!r}; it must be True or False.")
    return expanded


def _read_interval(name: str, given: object) -> Any:
    try:
        interval = None if given is True else parse_fill(given)
    except ConfigurationError:
        interval = None
    if not interval:
        raise ConfigurationError(
            f"{name} is {given!r}; it must be seconds, a timedelta, or a text such as '30s', more than 0."
        )
    return interval
