# The public names, listed once: for type checkers, and for lazy_names, which imports each on first use.

from graphile_worker.testing.assertions import (
    assert_enqueued as assert_enqueued,
    assert_not_enqueued as assert_not_enqueued,
    enqueued as enqueued,
)
from graphile_worker.testing.clocks import Clock as Clock
from graphile_worker.testing.contexts import FakeContext as FakeContext, context as context, job as job
from graphile_worker.testing.databases import Databases as Databases
from graphile_worker.testing.draining import drain as drain
from graphile_worker.testing.inlining import inline as inline
from graphile_worker.testing.overrides import override as override
from graphile_worker.testing.progress import reported_progress as reported_progress
from graphile_worker.testing.servers import running_server as running_server

__all__: list[str]  # noqa: PYI035 - lazy_names fills it
