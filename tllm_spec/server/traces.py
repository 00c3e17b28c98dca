"""OpenTelemetry spans of requests, which a thread sends over OTLP/HTTP (the extra `otel`).

Attributes are those of the semantic conventions for generative AI; latencies have vLLM's names."""

from __future__ import annotations

import os
import time
from threading import Thread
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from tllm_spec.outputs import RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE = "tllm_spec"
CLOSE_SECONDS = 3.0
NEEDED = "a URL is needed, as http://localhost:4318/v1/traces"
MISSING = "otlp_traces_endpoint needs OpenTelemetry: pip install 'tllm_spec[otel]'"


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Raises ValueError for an endpoint that is no URL, and without the extra."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_traces_endpoint = {endpoint!r}: {NEEDED}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(MISSING) from error
    return OTLPSpanExporter(endpoint)


class Traces:
    """Makes a span for each request of the engine. The thread drops what it cannot send in time."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)}
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)

    def add(self, request: Request, is_streamed: bool, output: RequestOutput) -> None:
        """The span of an output that has finished, failed or been cancelled, from its arrival to
        its end. Its parent is the client's span, which the header `traceparent` names."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        epoch = time.time() - time.monotonic()  # noqa: TID251  # spans have dates
        operation = "text_completion" if request.url.path == "/v1/completions" else "chat"
        times, reasons = output.metrics, [each.finish_reason for each in output.outputs]
        end = times.finished_time or time.monotonic()
        # The client of a whole answer has no token before its end.
        first = times.first_token_time if is_streamed else None
        given: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": request.state.model,
            "gen_ai.request.id": request.state.request_id,
            "gen_ai.response.finish_reasons": [reason or "cancelled" for reason in reasons],
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(each.length for each in output.outputs),
            "gen_ai.usage.cache_read.input_tokens": output.cached_tokens,
            "gen_ai.latency.time_in_queue": times.queue_time,
            "gen_ai.latency.time_to_first_token": first and first - times.arrival_time,
            "gen_ai.latency.e2e": end - times.arrival_time,
        }
        stats = output.speculative_decoding
        if stats is not None and stats.rounds:
            given["tllm_spec.num_rounds"] = stats.rounds
            given["tllm_spec.acceptance_length"] = stats.acceptance_length
            given["tllm_spec.draft_acceptance_rate"] = stats.draft_acceptance_rate
        span = self._tracer.start_span(
            f"{operation} {request.state.model}",
            TraceContextTextMapPropagator().extract(request.headers),
            SpanKind.SERVER,
            {name: value for name, value in given.items() if value is not None},
            start_time=int((epoch + times.arrival_time) * 1e9),
        )
        for event, moment in (("scheduled", times.first_scheduled_time), ("first_token", first)):
            if moment is not None:
                span.add_event(event, timestamp=int((epoch + moment) * 1e9))
        if not output.finished or "error" in reasons:
            span.set_status(StatusCode.ERROR, output.error or "cancelled or out of time")
        span.end(int((epoch + end) * 1e9))

    def close(self) -> None:
        """Sends what waits, for CLOSE_SECONDS at most: the collector may be away."""
        sending = Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)
