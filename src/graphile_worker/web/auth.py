"""Who a request is from, and what they may do."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from starlette.requests import HTTPConnection

    Auth: TypeAlias = Callable[[HTTPConnection], "Access | None | Awaitable[Access | None]"]


class Permission(StrEnum):
    """What a user may do. Each permission is granted by itself, but none is of use without `VIEW`."""

    VIEW = "view"
    """See jobs without their payloads, queues, tasks, workers and statistics."""
    VIEW_PAYLOAD = "view_payload"
    """See payloads and results, and search in payloads."""
    ADD = "add"
    """Add jobs, and run recurring tasks now."""
    RETRY = "retry"
    """Retry failed jobs, and run scheduled ones now."""
    CANCEL = "cancel"
    """Cancel jobs, fail them, and complete them."""
    EDIT = "edit"
    """Change when a job runs, its priority and its attempts."""
    REMOVE = "remove"
    """Remove jobs."""
    MAINTAIN = "maintain"
    """Release the jobs of dead workers, unlock workers, and clean up."""


ALL = frozenset(Permission)
READ_ONLY = frozenset({Permission.VIEW, Permission.VIEW_PAYLOAD})


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What `auth` returns for a request that is allowed.

    >>> access = Access(user="ann", permissions={"view", "retry"})
    >>> access.allows("retry"), access.allows("remove")
    (True, False)
    """

    user: str = "anonymous"
    """The name that audit events carry."""
    permissions: frozenset[Permission] = ALL

    def __post_init__(self) -> None:
        try:
            given = frozenset(Permission(one) for one in self.permissions)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Invalid permissions {self.permissions!r}: each must be one of {', '.join(Permission)}."
            ) from error
        msgspec.structs.force_setattr(self, "permissions", given)

    def allows(self, permission: Permission | str) -> bool:
        """Return whether the user has the permission."""
        return permission in self.permissions and Permission.VIEW in self.permissions

    def limited_to(self, permissions: Iterable[Permission]) -> Access:
        """Return the access without all other permissions."""
        return Access(user=self.user, permissions=self.permissions & frozenset(permissions))
