"""Names of attributes and metrics for OpenTelemetry.

They follow the semantic conventions for messaging. These are still in development, and the
package of them has no stable version, so the names are declared here.
"""

from __future__ import annotations

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the conventions that the names follow."""
SYSTEM_NAME = "graphile-worker"
"""The value of `SYSTEM`. The Rust port has the same."""

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION_NAME = "messaging.destination.name"
"""The task."""
MESSAGE_ID = "messaging.message.id"
"""The job's id."""
CLIENT_ID = "messaging.client.id"
"""The worker's id."""
BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

# Attributes that only this system has.
QUEUE_NAME = "messaging.graphile_worker.queue_name"
ATTEMPT = "messaging.graphile_worker.attempt"
MAX_ATTEMPTS = "messaging.graphile_worker.max_attempts"
PRIORITY = "messaging.graphile_worker.priority"
JOB_KEY = "messaging.graphile_worker.job_key"
OUTCOME = "messaging.graphile_worker.outcome"
WAIT_SECONDS = "messaging.graphile_worker.wait_seconds"

SEND, PROCESS, RECEIVE = "send", "process", "receive"
"""The operations: adding jobs, running one, and claiming some."""

PROCESS_DURATION = "messaging.process.duration"
OPERATION_DURATION = "messaging.client.operation.duration"
SENT_MESSAGES = "messaging.client.sent.messages"
CONSUMED_MESSAGES = "messaging.client.consumed.messages"
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The buckets that the conventions recommend for both durations."""
