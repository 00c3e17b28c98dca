"""What requests are checked against before they are queued: plain numbers, so that they can be sent
to another process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """What a request is checked against. end_ids: of the model; the tokenizer's is one more.
    max_seq_len: the longest sequence that the engine can run, in tokens of prompt and output: the
    context, or what the KV cache has room for. pause_patience: as `RequestPause`."""

    vocab_size: int
    end_ids: tuple[int, ...]
    max_seq_len: int
    max_draft_len: int
    pause_patience: int | None
