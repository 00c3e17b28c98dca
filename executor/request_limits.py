"""What requests are checked against before they are queued: plain numbers, so that they can be sent
to another process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What an empty engine has room for. num_pages: of a request's tokens; None: of any number.
    overshoot: positions after its last token that a request may write to."""

    num_pages: int | None
    page_size: int
    overshoot: int
    max_num_tokens: int
    chunked_prefill: bool

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Raises ValueError if not even an empty engine could run the request."""
        needed = -(-(prompt_len + max_tokens + self.overshoot) // self.page_size)
        if self.num_pages is not None and needed > self.num_pages:
            raise ValueError(
                f"the request may need {needed} KV pages (prompt {prompt_len} + max_tokens "
                f"{max_tokens} tokens) and the cache has {self.num_pages}; lower max_tokens or "
                "raise kv_cache_config.max_tokens"
            )
        if prompt_len > self.max_num_tokens and not self.chunked_prefill:
            raise ValueError(
                f"the prompt has {prompt_len} tokens and max_num_tokens is {self.max_num_tokens}; "
                "raise max_num_tokens or set enable_chunked_prefill"
            )


@dataclass(frozen=True)
class RequestLimits:
    """What a request is checked against. end_ids: of the model; the tokenizer's is one more.
    pause_patience: as `RequestPause`."""

    vocab_size: int
    end_ids: tuple[int, ...]
    max_seq_len: int
    max_draft_len: int
    pause_patience: int | None
    capacity: Capacity
