"""Everything that goes wrong on purpose, in one tree.

::

    GraphileWorkerError
    ├── ConfigurationError         a setting or an argument is missing or wrong
    │   └── MissingExtraError      a feature needs a package that is not installed
    └── DatabaseError              the database cannot be reached, or cannot be used as it is
        ├── EmbeddedServerError    the embedded PostgreSQL does not start
        └── SchemaError            the schema cannot be installed or adopted
            ├── SchemaTooOldError  made by a Graphile Worker older than we can adopt
            └── SchemaTooNewError  changed by a newer one in a way that we do not know

A message says what happened and what to do next. None of them carries a password.
"""

from __future__ import annotations


class GraphileWorkerError(Exception):
    """Base of all errors that this library raises."""


class ConfigurationError(GraphileWorkerError):
    """A setting or an argument is missing or wrong."""


class MissingExtraError(ConfigurationError):
    """A feature needs a package that is not installed."""


class DatabaseError(GraphileWorkerError):
    """The database cannot be reached, or cannot be used as it is."""


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL does not start."""


class SchemaError(DatabaseError):
    """The schema cannot be installed or adopted."""


class SchemaTooOldError(SchemaError):
    """The schema was made by a Graphile Worker that is older than we can adopt."""


class SchemaTooNewError(SchemaError):
    """The schema was changed by a newer Graphile Worker in a way that we do not know."""
