"""Model fields for columns that Django's own fields do not read."""

from __future__ import annotations

import json
from typing import Any

from django.db import models


class JSONTextField(models.JSONField):
    """A column of the type ``json``.

    Django's own field is for ``jsonb``. It fails on ``json``, which psycopg decodes itself. So this one
    selects the column's text, and numbers of any size stay exact.
    """

    def db_type(self, connection: Any) -> str:  # noqa: ARG002 - Django's signature
        """Return the type of the column."""
        return "json"

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:  # noqa: ARG002
        """Return the SQL that selects the text of the column."""
        return f"({sql})::text", params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:  # noqa: ARG002
        """Return the decoded value."""
        return json.loads(value, cls=self.decoder) if isinstance(value, str) else value
