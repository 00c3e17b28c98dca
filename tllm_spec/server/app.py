"""The HTTP server's routes: check a request, start it on the LLM, answer in OpenAI's format.

`protocol` defines the bodies, `responses` the answers, `streaming` how an answer is sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from tllm_spec import __version__
from tllm_spec.executor.faults import described
from tllm_spec.request_errors import ContextLengthExceeded
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.metrics import EngineMetrics
from tllm_spec.server.perf_metrics import PerfMetrics
from tllm_spec.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    error_body,
    param_of,
)
from tllm_spec.server.responses import Answer, ChatAnswer, CompletionAnswer
from tllm_spec.server.streaming import (
    EngineError,
    event_stream,
    finished_outputs,
    unless_disconnected,
)
from tllm_spec.tokenizer import check_text

if TYPE_CHECKING:
    from tllm_spec.llm import LLM
    from tllm_spec.request_handle import RequestHandle

CLIENT_CLOSED_REQUEST = 499  # a status that no client receives
LONG_BODY = 1 << 16  # bytes; tokenising this much text takes tens of milliseconds
MAX_MISTAKES = 11  # lines about mistakes in a body; a summary of unknown options has as many
ENGINE_DOWN = "the engine is down"
ONE_TOKEN = SamplingParams(max_tokens=1)
# Variables that the renderer sets itself. The parameters of `apply_chat_template` are not free,
# either.
RENDERED_NAMES = {"self", "conversations", "messages"}


class RequestRefused(Exception):
    """Ends a request with an error status and OpenAI's error object."""

    def __init__(self, status: int, message: str, kind: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param=param_of(message), code=code)


class OpenAIServer:
    """The routes over one LLM, which shuts down with the server. Raises ValueError for an LLM
    without a tokenizer."""

    def __init__(self, llm: LLM, served_model_name: str) -> None:
        if llm.tokenizer is None:
            raise ValueError(
                "skip_tokenizer_init = True cannot be served over HTTP: answers are text"
            )
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._model = served_model_name
        self._created = int(time.time())
        self._metrics = EngineMetrics(llm.server_info)
        self._perf_metrics = PerfMetrics()
        # Tokenising a long prompt takes seconds. It must delay neither the answers of other
        # requests nor short prompts, so it has a thread of its own. Only tokenizers implemented in
        # Rust are thread-safe.
        self._intake = self._long_intake = _one_thread("tllm-intake")
        if getattr(llm.tokenizer, "is_fast", False):
            self._long_intake = _one_thread("tllm-long-intake")

    def app(self) -> FastAPI:
        """The application to run."""
        app = FastAPI(title="tllm_spec", lifespan=self._lifespan)
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/health_generate", self.health_generate, response_model=None)
        app.add_api_route("/version", self.version)
        for path in ("/server_info", "/get_server_info"):  # the second is SGLang's older name
            app.add_api_route(path, self.server_info)
        for path in ("/metrics", "/prometheus/metrics"):  # the second is TensorRT-LLM's
            app.add_api_route(path, self.metrics, response_model=None)
        app.add_api_route("/iteration_stats", self.iteration_stats)
        app.add_api_route("/perf_metrics", self.perf_metrics)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{model:path}", self.model)
        app.add_api_route(
            "/v1/completions", self.completions, methods=["POST"], response_model=None
        )
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestRefused, _refused)
        app.add_exception_handler(EngineError, _engine_error)
        app.add_exception_handler(RequestValidationError, _invalid_body)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(Exception, _internal_error)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        for intake in (self._intake, self._long_intake):
            intake.shutdown()
        self._llm.shutdown()

    async def health(self) -> Response:
        """200 while the engine can serve, else 503."""
        return Response() if self._llm.is_healthy else PlainTextResponse(ENGINE_DOWN, 503)

    async def health_generate(self, request: Request) -> Response:
        """200 once the engine has generated one token, 500 when that fails, 503 when it is down."""
        self._check_healthy()
        handles = await self._start(request, lambda: ["hi"], ONE_TOKEN, streaming=False)
        await unless_disconnected(request, finished_outputs(handles))
        return Response()

    async def version(self) -> dict[str, str]:
        """The package's version."""
        return {"version": __version__}

    def server_info(self) -> dict[str, Any]:
        """Options and state of the engine. Not async, so that FastAPI runs it in a thread: it waits
        for the end of a round."""
        with engine_running():
            return {"served_model_name": self._model, **self._llm.server_info()}

    def metrics(self) -> Response:
        """Metrics for Prometheus. Runs in a thread, as `server_info`."""
        with engine_running():
            return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def iteration_stats(self) -> list[dict[str, Any]]:
        """Statistics of the rounds since the last call, as at TensorRT-LLM's `/metrics`. Runs in a
        thread, as `server_info`."""
        if not self._llm.args.enable_iter_perf_stats:
            message = "enable_iter_perf_stats = false: set it to true, as an argument of LLM"
            raise RequestRefused(404, message, "invalid_request_error")
        with engine_running():
            return self._llm.get_stats()

    async def perf_metrics(self) -> list[dict[str, Any]]:
        """Timings of the requests that have finished since the last call."""
        return self._perf_metrics.take()

    async def models(self) -> dict[str, Any]:
        """A list with the served model."""
        return {"object": "list", "data": [await self.model(self._model)]}

    async def model(self, model: str) -> dict[str, Any]:
        """The served model, by its name."""
        self._check_name(model)
        return {"id": model, "object": "model", "created": self._created, "owned_by": "tllm_spec"}

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """`/v1/completions`: continues each prompt of the body."""
        self._check_servable(body)
        with bad_request():
            params = body.to_sampling_params()
        handles = await self._start(request, lambda: body.prompt, params, body.stream)
        answer = CompletionAnswer(self._model, self._tokenizer, params.n, params.logprobs)
        return await self._respond(body, request, answer, handles)

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """`/v1/chat/completions`: answers the conversation in the body."""
        self._check_servable(body)
        with bad_request():
            params = body.to_sampling_params()
        handles = await self._start(request, lambda: [self._chat_prompt(body)], params, body.stream)
        answer = ChatAnswer(self._model, self._tokenizer, params.n, params.logprobs)
        return await self._respond(body, request, answer, handles)

    def _check_servable(self, body: GenerationRequest) -> None:
        self._check_healthy()
        self._check_name(body.model)

    def _check_healthy(self) -> None:
        if not self._llm.is_healthy:
            raise RequestRefused(503, ENGINE_DOWN, "internal_error")

    def _check_name(self, model: str) -> None:
        if model != self._model:
            message = f"model = {model!r} is not served here; the model is {self._model!r}"
            raise RequestRefused(404, message, "invalid_request_error", code="model_not_found")

    def _chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """Token ids of the conversation. Raises ValueError when the model's chat template does not
        accept it."""
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        variables = body.chat_template_kwargs or {}
        options = signature(self._tokenizer.apply_chat_template).parameters.keys()
        if taken := variables.keys() & (options | RENDERED_NAMES):
            raise ValueError(
                f"chat_template_kwargs = {sorted(taken)} are not variables of a template"
            )
        given = json.dumps([messages, variables], ensure_ascii=False)
        check_text(given, "messages and chat_template_kwargs as JSON")
        try:
            token_ids: list[int] = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=body.add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program: any exception can come out of it
            raise ValueError(
                f"messages do not fit the model's chat template: {described(error)}"
            ) from error
        return token_ids

    async def _start(
        self,
        request: Request,
        prompts: Callable[[], Sequence[str | list[int]]],
        params: SamplingParams,
        streaming: bool,
    ) -> list[RequestHandle]:
        """Starts a request for each prompt. Raises RequestRefused when one cannot be served; then
        none keeps running."""

        def start() -> list[RequestHandle]:
            handles: list[RequestHandle] = []
            try:
                for prompt in prompts():
                    handles.append(self._llm.generate_async(prompt, params, streaming=streaming))
            except ValueError:
                for handle in handles:
                    handle.abort()
                raise
            return handles

        is_long = len(await request.body()) > LONG_BODY  # FastAPI has read it already
        intake = self._long_intake if is_long else self._intake
        with bad_request(), engine_running():
            return await asyncio.get_running_loop().run_in_executor(intake, start)

    async def _respond(
        self,
        body: GenerationRequest,
        request: Request,
        answer: Answer,
        handles: Sequence[RequestHandle],
    ) -> Response:
        record = self._perf_metrics.add
        if body.stream:
            events = event_stream(answer, handles, body.stream_options or StreamOptions(), record)
            return StreamingResponse(events, media_type="text/event-stream")
        results = await unless_disconnected(request, finished_outputs(handles, record))
        if results is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer.whole(results))


def _one_thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)


@contextmanager
def bad_request() -> Iterator[None]:
    """Answers a ValueError inside, which is the client's mistake, with 400."""
    try:
        yield
    except ContextLengthExceeded as error:
        kind, code = "invalid_request_error", "context_length_exceeded"
        raise RequestRefused(400, str(error), kind, code=code) from error
    except ValueError as error:
        raise RequestRefused(400, str(error), "invalid_request_error") from error


@contextmanager
def engine_running() -> Iterator[None]:
    """Answers a RuntimeError inside, which says that the engine has ended, with 503."""
    try:
        yield
    except RuntimeError as error:
        raise RequestRefused(503, f"{ENGINE_DOWN}: {error}", "internal_error") from error


async def _refused(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, RequestRefused)
    return JSONResponse(refusal.body, refusal.status)


async def _engine_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(str(error), "internal_error"), 500)


async def _invalid_body(request: Request, invalid: Exception) -> JSONResponse:
    assert isinstance(invalid, RequestValidationError)
    causes = [detail.get("ctx", {}).get("error") or detail["msg"] for detail in invalid.errors()]
    lines = [line for cause in causes for line in str(cause).splitlines()]
    if len(lines) > MAX_MISTAKES:
        lines[MAX_MISTAKES - 1 :] = [f"... and {len(lines) - MAX_MISTAKES + 1} more mistakes"]
    message = "\n".join(lines)
    if any(
        detail["loc"] == ("body",) and "error" not in detail.get("ctx", {})
        for detail in invalid.errors()
    ):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    return JSONResponse(error_body(message, "invalid_request_error", param=param_of(message)), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.detail, "invalid_request_error"), error.status_code)


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(described(error), "internal_error"), 500)
