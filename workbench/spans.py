"""Loads and stores as OpenTelemetry spans, beside those of the serving engine.

engine = CacheEngine(identity, record=Recorder(sink=EventSpans()))    # a tracer provider is the caller's to set up
"""

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode, Tracer

from workbench.events import Event

__all__ = ["EventSpans"]


class EventSpans:
    """A sink for a `Recorder`: each chunk that was moved, or was to be, becomes a span with the seconds it took.

    Args:
        tracer: Starts the spans; by default that of the global provider, which drops them where none is set up.
    """

    def __init__(self, tracer: Tracer | None = None):
        self._tracer = tracer if tracer is not None else trace.get_tracer("kvworkbench")

    def __call__(self, event: Event) -> None:
        if event.kind not in ("load", "store"):
            return
        end = int(event.time * 1e9)
        span = self._tracer.start_span(
            f"kvworkbench.{event.kind}",
            start_time=end - int(event.seconds * 1e9),
            attributes={
                "kvworkbench.tier": event.tier,
                "kvworkbench.request": event.request,
                "kvworkbench.chunk": event.key,
                "kvworkbench.tokens": event.tokens,
                "kvworkbench.bytes": event.nbytes,
            },
        )
        if event.reason:
            span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end(end_time=end)
