"""Names of span attributes: OpenTelemetry's semantic conventions, and Penstock's own where these have none.

The GenAI conventions are still in development: names may change with a later version of them, and then change here.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
SEED = "gen_ai.request.seed"
CHOICES = "gen_ai.request.choice.count"
STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

FIRST_SENT = "first token sent"
"""Event of a request's span: the first token was written to the connection."""

PROVIDER_NAME = "penstock"
"""Value of PROVIDER: the conventions ask for the system that a client sees."""

METHOD = "http.request.method"
STATUS_CODE = "http.response.status_code"
ROUTE = "http.route"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

JOB_ID = "penstock.job.id"
JOB_STATE = "penstock.job.state"
"""The state in which an attempt left its job; or what became of the attempt: lost, handed_back, preempted."""
ATTEMPT = "penstock.job.attempt"
PRIORITY = "penstock.job.priority"
TENANT = "penstock.tenant"
"""From the caller's key, never from a request."""
WORKER = "penstock.worker"
CONTINUED_TOKENS = "penstock.job.continued_tokens"
"""Tokens of earlier attempts, which this one continues."""
BATCH_ID = "penstock.batch.id"
BATCH_LINE = "penstock.batch.line"
ENDPOINT = "penstock.webhook.endpoint"
EVENT_TYPE = "penstock.event.type"
TRY = "penstock.webhook.attempt"
