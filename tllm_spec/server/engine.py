"""What the HTTP server needs of an engine: `LLM` in this process, or `EngineClient` for one in
another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer


class Engine(Protocol):
    """Methods have the meaning that they have in `LLM`."""

    args: LlmArgs
    tokenizer: Tokenizer | None
    max_seq_len: int

    @property
    def is_healthy(self) -> bool: ...

    @property
    def num_unfinished(self) -> int: ...

    def check_length(self, text: str | Sequence[int]) -> None: ...

    def compile_grammar(self, params: SamplingParams) -> None: ...

    def generate_async(
        self,
        inputs: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams,
        *,
        streaming: bool = ...,
        cache_salt: str | None = ...,
        client: tuple[str, ...] = ...,
        store: bool | None = ...,
    ) -> RequestHandle: ...

    def server_info(self) -> dict[str, Any]: ...

    def load_draft_weights(
        self, folder: str, *, keep_cache: bool = ..., force: bool = ...
    ) -> dict[str, Any]: ...

    def get_stats(self) -> list[dict[str, Any]]: ...

    def shutdown(self) -> None: ...
