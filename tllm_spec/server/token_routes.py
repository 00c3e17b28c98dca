"""`/tokenize` and `/detokenize`, with vLLM's bodies and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from tllm_spec.config.config_base import check
from tllm_spec.config.option_checks import check_text
from tllm_spec.prompts import max_model_len
from tllm_spec.server.admission import Admission
from tllm_spec.server.body_model import BodyModel
from tllm_spec.server.chat_message import ChatMessage
from tllm_spec.server.engine import Engine
from tllm_spec.server.tool_protocol import MAX_TOOLS, Tool
from tllm_spec.text.chat_prompt import ChatPrompts, Conversation

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
            check_text(body.prompt)
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
