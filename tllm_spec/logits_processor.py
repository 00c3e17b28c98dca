"""The two kinds of logits processors: a function of tokens and logits, and TensorRT-LLM's five
arguments. torch is not imported here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Called for every position of a request, draft positions too. An exception fails the request. At a
# draft position, which plain decoding may never reach, it only ends the request's speculation.
AnyLogitsProcessor = Callable[..., Any]


class LogitsProcessor(ABC):
    """TensorRT-LLM's interface. A function `(token_ids, logits) -> logits` with logits `[V]` will
    do, too."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Changes `logits` `[1, 1, V]` in place.

        token_ids: one list with the prompt and all tokens before this position. stream_ptr: None,
        the current CUDA stream. client_id: None."""


@dataclass(frozen=True)
class LogitsEdit:
    """A processor of either kind, called in one way."""

    processor: AnyLogitsProcessor
    num_arguments: int  # 2, or 4 or 5 for TensorRT-LLM's

    @classmethod
    def of(cls, processor: AnyLogitsProcessor) -> LogitsEdit:
        """Raises ValueError for what cannot be called as either kind."""
        counts = (5,) if isinstance(processor, LogitsProcessor) else (2, 5, 4)
        for num_arguments in counts:
            if callable(processor) and _takes(processor, num_arguments):
                return cls(processor, num_arguments)
        raise ValueError(
            f"logits_processor = {processor!r} must be callable as (token_ids, logits), which "
            "returns logits of shape [V], or as TensorRT-LLM's (req_id, logits, token_ids, "
            "stream_ptr, client_id), which changes logits of shape [1, 1, V] in place"
        )

    def __call__(self, request_id: int, token_ids: list[int], logits: Tensor) -> Tensor:
        """The edited logits `[V]`; may write in place. Raises ValueError when the processor returns
        anything else."""
        if self.num_arguments > 2:
            arguments = (request_id, logits.view(1, 1, -1), [token_ids], None, None)
            self.processor(*arguments[: self.num_arguments])
            return logits
        edited = self.processor(token_ids, logits)
        if not isinstance(edited, type(logits)) or edited.shape != logits.shape:
            raise ValueError(
                f"logits processor {self.processor!r} must return the logits, a tensor of shape "
                f"{tuple(logits.shape)}"
            )
        return edited


def _takes(processor: AnyLogitsProcessor, num_arguments: int) -> bool:
    try:
        signature(processor).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return num_arguments == 2
    return True
