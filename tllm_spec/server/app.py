"""The HTTP server's routes: check a request, start it on the engine, answer in OpenAI's format.

`protocol` defines the bodies, `responses` the answers, `streaming` how an answer is sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tllm_spec.chat_formats.pieces import PlainText
from tllm_spec.intake import max_model_len
from tllm_spec.outputs import RequestOutput
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, SamplingParams
from tllm_spec.server import messages_api, responses_api
from tllm_spec.server.admission import (
    ENGINE_DOWN,
    SAME,
    Admission,
    bad_request,
    engine_running,
    size_of,
)
from tllm_spec.server.answers import Answer, completion_answer, render
from tllm_spec.server.blocks import BlockAnswer
from tllm_spec.server.bodies import StrictBodyRoute, made_of_body
from tllm_spec.server.chat_answer import AnswerFormats, ChatAnswer, ParsedText
from tllm_spec.server.chat_message import NamedChoice
from tllm_spec.server.fleet import FleetAdapters
from tllm_spec.server.guard import CLIENT_CLOSED_REQUEST, Guard
from tllm_spec.server.histograms import Histograms, perf_record
from tllm_spec.server.messages_api import CountTokensRequest, MessageAnswer, MessagesRequest
from tllm_spec.server.metrics import EngineMetrics
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.pages import Pages
from tllm_spec.server.protocol import (
    ChatCompletionRequest,
    ClientRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from tllm_spec.server.refusals import MESSAGES_PATH, RequestRefused, add_error_handlers
from tllm_spec.server.replicas import Engine
from tllm_spec.server.responses_api import ResponseAnswer, ResponsesRequest
from tllm_spec.server.served_models import ServedModels
from tllm_spec.server.streaming import (
    EventStream,
    Running,
    event_stream,
    finished_outputs,
    unless_disconnected,
)
from tllm_spec.server.traces import Traces
from tllm_spec.server.weight_routes import WeightRoutes
from tllm_spec.text.chat_prompt import ChatPrompts
from tllm_spec.text.reasoning import Section
from tllm_spec.version import __version__

MAX_TEMPLATE_TOKENS = 1024  # that a chat template adds to what the body has, usually
DRAINING = "the server is about to end"
ONE_TOKEN = SamplingParams(max_tokens=1)
MAX_RECORDS = 1000  # of finished requests, that are kept for /perf_metrics


class OpenAIServer:
    """The routes over one engine, which shuts down with the server. Raises ValueError for an engine
    without a tokenizer."""

    def __init__(
        self,
        llm: Engine,
        served_model_name: str,
        options: ServerOptions | None = None,
        histograms: Histograms | None = None,
        traces: Traces | None = None,
        draining: asyncio.Event | None = None,
        replica: str | None = None,
        adapters: FleetAdapters | None = None,
    ) -> None:
        """draining: set when the server is about to end. replica: as of `EngineMetrics`. adapters:
        with `lora_config`."""
        if llm.tokenizer is None:
            raise ValueError(
                "skip_tokenizer_init = True cannot be served over HTTP: answers are text"
            )
        self._llm = llm
        self._tokenizer: Any = llm.tokenizer
        self._options = options or ServerOptions()
        self._models = ServedModels(served_model_name, llm, self._options, adapters)
        self._histograms = histograms or Histograms()
        vllm_model = served_model_name if self._options.vllm_metrics else None
        self._metrics = EngineMetrics(llm.server_info, self._histograms, vllm_model, replica)
        self._perf_records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._traces = traces
        self._draining = draining or asyncio.Event()
        self._admission = Admission(llm, self._options)
        self._chat_prompts = ChatPrompts(
            llm.tokenizer, llm.check_length, allow_control_tokens=self._options.allow_control_tokens
        )
        self._formats = AnswerFormats(self._options, llm.tokenizer, self._chat_prompts.harmony)

    def app(self) -> FastAPI:
        """The application to run."""
        # FastAPI's pages for people load scripts from another host.
        app = FastAPI(
            title="tllm_spec",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # the guard takes them away
        )
        app.router.route_class = StrictBodyRoute
        get = app.add_api_route
        get("/health", self.health, response_class=Response)
        get("/health", self.health, methods=["HEAD"], include_in_schema=False)
        get("/health_generate", self.health_generate, response_class=Response)
        get("/version", self.version)
        get("/server_info", self.server_info)
        for path in ("/metrics", "/prometheus/metrics"):  # the second is TensorRT-LLM's
            get(path, self.metrics, response_class=PlainTextResponse)
        get("/iteration_stats", self.iteration_stats)
        get("/perf_metrics", self.perf_metrics)
        self._models.add_to(app)
        post = partial(app.add_api_route, methods=["POST"], response_model=None)
        post("/v1/completions", self.completions)
        post("/v1/chat/completions", self.chat)
        post("/v1/responses", self.responses)
        post(MESSAGES_PATH, self.messages)
        post(f"{MESSAGES_PATH}/count_tokens", self.count_tokens)
        post("/tokenize", self.tokenize)
        post("/detokenize", self.detokenize)
        WeightRoutes(self._llm, self._options).add_to(app)
        has_key = self._options.api_key is not None
        pages = Pages(self._llm, self._models.name, self._histograms, has_key)
        pages.add_to(app)
        app.add_middleware(Guard, options=self._options)
        if self._options.allowed_origins:  # around the guard: a preflight has no key
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._options.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        add_error_handlers(app)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        self.close()

    def close(self) -> None:
        """Ends running requests, and the engine."""
        self._admission.close()
        self._llm.shutdown()
        if self._traces is not None:
            self._traces.close()

    async def health(self) -> Response:
        """200 while requests are welcome, else 503: the engine is down, or the server will end."""
        if self._draining.is_set():
            return PlainTextResponse(DRAINING, 503)
        if not self._llm.is_healthy:
            return PlainTextResponse(ENGINE_DOWN, 503)
        return Response() if self._llm.pause_mode is None else PlainTextResponse("paused")

    async def health_generate(self, request: Request) -> Response:
        """200 once the engine has generated one token, 500 when that fails, 503 when it is down."""
        self._check_healthy()
        handles = await self._admission.start(request, lambda: ["hi"], ONE_TOKEN, DEFAULT_OPTIONS)
        running = Running(handles, self._options.request_timeout)
        await unless_disconnected(request, finished_outputs(running))
        return Response()

    async def version(self) -> dict[str, str]:
        """The package's version."""
        return {"version": __version__}

    def server_info(self) -> dict[str, Any]:
        """Options and state of the engine. Not async, so that FastAPI runs it in a thread: it waits
        for the end of a round."""
        with engine_running():
            return {"served_model_name": self._models.name, **self._llm.server_info()}

    def metrics(self) -> Response:
        """Metrics for Prometheus. Runs in a thread, as `server_info`."""
        with engine_running():
            return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def iteration_stats(self) -> list[dict[str, Any]]:
        """Statistics of the rounds since the last call, as at TensorRT-LLM's `/metrics`. Runs in a
        thread, as `server_info`."""
        if not self._llm.args.enable_iter_perf_stats:
            message = "enable_iter_perf_stats = false: set it to true, as an argument of LLM"
            raise RequestRefused(404, message)
        with engine_running():
            return self._llm.get_stats()

    async def perf_metrics(self) -> list[dict[str, Any]]:
        """Timings of the latest requests that have finished since the last call."""
        taken = list(self._perf_records)
        self._perf_records.clear()
        return taken

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """`/v1/completions`: continues each prompt of the body."""
        params = await self._params_of(body, request)
        if params.truncate_prompt_tokens is None:
            self._check_lengths(body.prompt)
        longest = params.truncate_prompt_tokens or self._llm.max_seq_len
        lengths = [min(len(prompt), longest, self._llm.max_seq_len) for prompt in body.prompt]
        own_field = body.prompt_logprobs is not None
        size = size_of(lengths, params, echo=body.echo, own_field=own_field)
        params = self._admission.admit(request, params, len(body.prompt), size)
        handles = await self._admission.start(
            request,
            lambda: body.prompt,
            params,
            body.request_options(request.scope["state"]),
            num_prompts=len(body.prompt),
            names=body.client_names,
        )
        request.state.release_body()
        answer = completion_answer(body, request.state.model, self._tokenizer, params)
        return await self._respond(body, request, answer, handles)

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """`/v1/chat/completions`: answers the conversation in the body."""
        handles, params, new_text = await self._start_chat(body, request, body.client_names)
        answer = ChatAnswer(
            request.state.model,
            self._tokenizer,
            *(params.n, params.logprobs, params.prompt_logprobs),
            new_text=new_text,
            is_named=isinstance(body.tool_choice, NamedChoice),
        )
        return await self._respond(body, request, answer, handles)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """`/v1/responses`: answers the conversation in the body."""
        return await self._blocks(body, request, ResponseAnswer, responses_api.CHAT_NAMES)

    async def messages(self, body: MessagesRequest, request: Request) -> Response:
        """`/v1/messages`: answers the conversation in the body. Clients must name a limit, and many
        name that of another model: one over the context is the context."""
        limit = min(body.max_tokens, self._llm.max_seq_len)
        body = body.model_copy(update={"max_tokens": limit})
        return await self._blocks(body, request, MessageAnswer, messages_api.CHAT_NAMES)

    async def _blocks(
        self,
        body: ResponsesRequest | MessagesRequest,
        request: Request,
        new_answer: Callable[[Any, Any, ParsedText], BlockAnswer],
        names: Mapping[str, str],
    ) -> Response:
        """names: as in `bad_request`."""
        with bad_request(names):
            chat = await made_of_body(request, body.to_chat)
        handles, _, new_text = await self._start_chat(chat, request, names)
        parsed = ParsedText(PlainText(), is_parallel=True) if new_text is None else new_text()
        answer = new_answer(body, self._tokenizer, parsed)
        return await self._respond(body, request, answer, handles)

    async def count_tokens(self, body: CountTokensRequest, request: Request) -> dict[str, Any]:
        """`/v1/messages/count_tokens`: the length of the conversation's prompt."""
        await self._models.choose(request, body.model)

        def count() -> int:
            return len(self._chat_prompts.token_ids(body.to_chat().conversation))

        size = request.state.body_size
        return {"input_tokens": await self._admission.tokenised(size, count, is_chat=True)}

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """The token ids of a text or of a conversation."""
        await self._models.choose(request, body.model)
        size, work = request.state.body_size, partial(self._tokenized, body)
        is_chat = body.messages is not None
        return await self._admission.tokenised(size, work, is_chat=is_chat)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        await self._models.choose(request, body.model)
        size = request.state.body_size
        return await self._admission.tokenised(size, lambda: self._detokenized(body.tokens))

    def _tokenized(self, body: TokenizeRequest) -> dict[str, Any]:
        if body.messages is not None:
            tokens = self._chat_prompts.token_ids(body.conversation)
        else:
            assert body.prompt is not None
            self._llm.check_length(body.prompt)
            tokens = self._tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        length = max_model_len(self._llm.args, self._llm.max_seq_len)
        answer = {"count": len(tokens), "max_model_len": length, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = self._tokenizer.convert_ids_to_tokens(tokens)
        return answer

    def _detokenized(self, tokens: list[int]) -> dict[str, Any]:
        vocab_size = len(self._tokenizer)
        if wrong := [token for token in tokens if token >= vocab_size]:
            raise ValueError(f"tokens = [... {wrong[0]} ...]: the vocabulary has {vocab_size} ids")
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return {"prompt": text}

    async def _params_of(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        request: Request,
        names: Mapping[str, str] = SAME,
    ) -> SamplingParams:
        self._check_healthy()
        await self._models.choose(request, body.model, body.lora_request)
        with bad_request(names):
            return await made_of_body(request, body.to_sampling_params)

    async def _start_chat(
        self, body: ChatCompletionRequest, request: Request, names: Mapping[str, str]
    ) -> tuple[list[RequestHandle], SamplingParams, Callable[[], ParsedText] | None]:
        """The handles, the parameters, and what reads a sample's text, as of `new_texts`."""
        params, sections = await self._params_of(body, request, names), list[Section]()
        new_text = self._formats.new_texts(body, is_guided=params.guided_decoding is not None)
        names = {"guided_decoding": "tools", **names}
        with bad_request(names):
            params = await made_of_body(request, self._formats.guided, body, params)
        self._check_lengths([message.content or "" for message in body.messages])
        most = min(self._llm.max_seq_len, request.state.body_size + MAX_TEMPLATE_TOKENS)
        size = size_of([most], params, echo=False, own_field=params.prompt_logprobs is not None)
        options = body.request_options(request.scope["state"])
        params = self._admission.admit(request, params, 1, size)

        def prompts() -> list[list[int]]:
            tokens = self._chat_prompts.token_ids(body.conversation)
            sections.append(self._formats.section(tokens))
            return [tokens]

        handles = await self._admission.start(
            request, prompts, params, options, is_chat=True, names=names
        )
        request.state.release_body()
        return handles, params, new_text and partial(new_text, sections[-1])

    def _check_lengths(self, prompts: Sequence[str | list[int]]) -> None:
        """Refuses what is too long at once: it would take memory until it is tokenised."""
        with bad_request():
            for prompt in prompts:
                self._llm.check_length(prompt)

    def _check_healthy(self) -> None:
        if not self._llm.is_healthy:
            raise RequestRefused(503, ENGINE_DOWN)

    async def _respond(
        self,
        body: ClientRequest,
        request: Request,
        answer: Answer | BlockAnswer,
        handles: Sequence[RequestHandle],
    ) -> Response:
        in_thread = self._admission.in_thread
        on_end = partial(self._ended, request, body.stream)
        again = partial(self._again, request) if self._options.lora_auto_load else None
        running = Running(handles, self._options.request_timeout, on_end, again)
        # For the access log, which asks when the answer has been sent.
        request.scope["state"]["tokens"] = running.num_tokens
        if body.stream:
            given = body.stream_options if isinstance(body, GenerationRequest) else None
            return EventStream(event_stream(answer, running, given or StreamOptions(), in_thread))
        results = await unless_disconnected(request, finished_outputs(running))
        if results is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if not answer.is_slow(results):
            return JSONResponse(answer.whole(results))
        written = await in_thread(lambda: render(answer.whole(results)))
        return Response(written, media_type="application/json")

    async def _again(self, request: Request, handle: RequestHandle) -> RequestHandle:
        """The request once more, with its adapter loaded again."""
        await self._models.choose(request, request.state.adapter)
        with bad_request(), engine_running():
            return await self._admission.in_thread(partial(request.state.start_again, handle))

    def _ended(self, request: Request, is_streamed: bool, output: RequestOutput) -> None:
        if output.finished and output.error is None:
            self._perf_records.append(perf_record(output))
            self._histograms.add(output, is_streamed)
        if self._traces is not None:
            self._traces.add(request, is_streamed, output)
