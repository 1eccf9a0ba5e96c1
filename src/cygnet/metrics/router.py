"""The router's metrics: those that are recorded where they happen, and gauges read at each scrape."""

from cygnet.metrics.catalogue import FIRST_TOKEN_BUCKETS, LATENCY_BUCKETS, Metric

REQUESTS = Metric("cygnet:router_requests", "counter", "Requests answered, by HTTP status.", ("code",))
CANCELLED = Metric("cygnet:router_cancelled", "counter", "Requests whose caller left before the end.")
BROKEN = Metric("cygnet:router_broken", "counter", "Answers cut off because the worker broke off after the first byte.")
RETRIES = Metric("cygnet:router_retries", "counter", "Requests sent to another worker before the first byte.")
REJECTED = Metric("cygnet:router_rejected", "counter", "Requests the router refused itself, by reason.", ("reason",))
FAILURES = Metric("cygnet:router_worker_failures", "counter", "Failed attempts by worker and kind.", ("worker", "kind"))
PLACED = Metric("cygnet:router_placed", "counter", "Requests placed, by worker.", ("worker",))
ALONE = Metric("cygnet:router_placed_alone", "counter", "Requests placed without the shared state.")
SPILLED = Metric("cygnet:router_spilled", "counter", "Requests placed outside their length bucket.")
PROMPT_TOKENS = Metric("cygnet:router_prompt_tokens", "counter", "Prompt tokens of placed requests, estimated.")
MATCHED_TOKENS = Metric("cygnet:router_matched_tokens", "counter", "Of these, tokens whose prefix the worker held.")
DURATION = Metric(
    "cygnet:router_request_duration_seconds", "histogram", "From request to end of answer.", buckets=LATENCY_BUCKETS
)
FIRST_BYTE = Metric(
    "cygnet:router_time_to_first_byte_seconds",
    "histogram",
    "From request to the first byte of the answer's body.",
    buckets=FIRST_TOKEN_BUCKETS,
)
QUEUED = Metric(
    "cygnet:router_queue_seconds", "histogram", "Wait for a worker below its budget.", buckets=FIRST_TOKEN_BUCKETS
)

KV_RESYNCS = Metric(
    "cygnet:router_kv_resyncs", "counter", "Times that following a worker's cache had to begin anew.", ("worker",)
)

RECORDED = (
    REQUESTS, CANCELLED, BROKEN, RETRIES, REJECTED, FAILURES, PLACED, ALONE, SPILLED, PROMPT_TOKENS, MATCHED_TOKENS,
    DURATION, FIRST_BYTE, QUEUED, KV_RESYNCS,
)  # fmt: skip
"""Metrics of a `Recorder`."""

CONNECTIONS = Metric("cygnet:router_connections", "gauge", "Open connections of callers.")
IN_FLIGHT = Metric("cygnet:router_requests_in_flight", "gauge", "Requests being served.")
WAITING = Metric("cygnet:router_requests_waiting", "gauge", "Requests waiting for a worker below its budget.")
BUFFERED = Metric("cygnet:router_buffered_bytes", "gauge", "Request bodies held.")
WORKER_UP = Metric("cygnet:router_worker_up", "gauge", "Whether a worker may get requests.", ("worker",))
WORKER_LOAD = Metric("cygnet:router_worker_load_tokens", "gauge", "Pending tokens, last known.", ("worker",))
STATE_UP = Metric("cygnet:router_state_up", "gauge", "Whether the shared state can be reached.")

KV_BLOCKS = Metric("cygnet:router_kv_blocks", "gauge", "Blocks that a followed worker has cached.", ("worker",))

GAUGES = (CONNECTIONS, IN_FLIGHT, WAITING, BUFFERED, WORKER_UP, WORKER_LOAD, STATE_UP, KV_BLOCKS)
"""Metrics read when asked for."""
