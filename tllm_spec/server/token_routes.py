"""Routes besides answers: tokens of texts and back, and draft weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from tllm_spec.config.config_base import check
from tllm_spec.prompts import max_model_len
from tllm_spec.server.admission import Admission, bad_request, engine_running
from tllm_spec.server.bodies import BodyModel
from tllm_spec.server.chat_message import MAX_TOOLS, ChatMessage, Tool
from tllm_spec.server.engine import Engine
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.chat_prompt import ChatPrompts, Conversation

# `/tokenize` and `/detokenize`, with vLLM's bodies and answers.


Json = dict[str, Any]


class TokenizeRequest(BodyModel):
    """Body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: Json | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool = False

    @check
    def _check_one(self) -> Iterator[str]:
        if (self.prompt is None) == (self.messages is None):
            yield "either prompt or messages is needed"

    @property
    def conversation(self) -> Conversation:
        return Conversation(
            [message.for_template() for message in self.messages or ()],
            self.chat_template_kwargs or {},
            self.add_generation_prompt,
            [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
        )


class DetokenizeRequest(BodyModel):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class TokenRoutes:
    """Texts are tokenised where those of requests are. check_name: refuses the name of another
    model."""

    def __init__(
        self,
        llm: Engine,
        admission: Admission,
        chat_prompts: ChatPrompts,
        check_name: Callable[[str], None],
    ) -> None:
        assert llm.tokenizer is not None
        self._check_name = check_name
        self._llm = llm
        self._tokenizer: Any = llm.tokenizer
        self._admission = admission
        self._chat_prompts = chat_prompts

    def add_to(self, app: FastAPI) -> None:
        for path, route in (("/tokenize", self.tokenize), ("/detokenize", self.detokenize)):
            app.add_api_route(path, route, methods=["POST"], response_model=None)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Json:
        """The token ids of a text or of a conversation."""
        if body.model is not None:
            self._check_name(body.model)
        size, is_chat = request.state.body_size, body.messages is not None
        work = partial(self._tokenized, body)
        return await self._admission.tokenised(size, work, is_chat=is_chat)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Json:
        """The text of token ids."""
        if body.model is not None:
            self._check_name(body.model)
        size = request.state.body_size
        return await self._admission.tokenised(size, lambda: self._detokenized(body.tokens))

    def _tokenized(self, body: TokenizeRequest) -> Json:
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

    def _detokenized(self, tokens: list[int]) -> Json:
        vocab_size = len(self._tokenizer)
        if wrong := [token for token in tokens if token >= vocab_size]:
            raise ValueError(f"tokens = [... {wrong[0]} ...]: the vocabulary has {vocab_size} ids")
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return {"prompt": text}


# `POST /v1/draft_model`: swaps draft weights while requests run. For the operator's key only.


class DraftModelRequest(BodyModel):
    """Body of `/v1/draft_model`. folder: below `--draft_model_root`. keep_cache: cached prefixes
    of the old weights go on being reused. force: also if recorded traffic shows that it is worse.
    """

    folder: str
    keep_cache: bool = False
    force: bool = False


class DraftRoutes:
    """There are none without a `draft_model_root`."""

    def __init__(self, llm: Engine, options: ServerOptions) -> None:
        self._llm = llm
        self._is_on = options.draft_model_root is not None
        self._root = Path(options.draft_model_root or "").resolve()
        self._client = f"key {options.draft_model_key}"

    def add_to(self, app: FastAPI) -> None:
        if self._is_on:
            app.add_api_route("/v1/draft_model", self.swap, methods=["POST"])

    def swap(self, body: DraftModelRequest, request: Request) -> dict[str, Any]:
        """Waits until the weights are served. Not async: it runs in a thread."""
        if request.scope["state"]["client"] != self._client:
            raise RequestRefused(403, "this key may not swap draft weights")
        with bad_request(), engine_running():
            folder = self._folder(body.folder)
            told = self._llm.load_draft_weights(
                str(folder), keep_cache=body.keep_cache, force=body.force
            )
        return told | {"folder": body.folder}

    def _folder(self, name: str) -> Path:
        """Symbolic links are followed before it is compared with the root."""
        folder = self._root if "\0" in name else (self._root / name).resolve()
        if folder == self._root or self._root not in folder.parents or not folder.is_dir():
            raise ValueError(f"folder = {name!r} is not a folder below --draft_model_root")
        return folder
