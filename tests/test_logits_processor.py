"""Logits processors: our two arguments, and TensorRT-LLM's five, with the same text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import user_provided
from tllm_spec.llm import LLM
from tllm_spec.logits_processor import LogitsEdit, LogitsProcessor
from tllm_spec.sampling_params import SamplingParams

PROMPT = [3, 4, 5]


def ban_last(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """No token twice in a row."""
    logits[token_ids[-1]] = -torch.inf
    return logits


class BanLast(LogitsProcessor):
    """The same, in TensorRT-LLM's way."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Size, list[int], Any, Any]] = []

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        self.seen.append((req_id, logits.shape, token_ids[0], stream_ptr, client_id))
        stream = None if stream_ptr is None else torch.cuda.ExternalStream(stream_ptr)
        with torch.cuda.stream(stream):
            logits[:, :, token_ids[0][-1]] = -torch.inf


def ban_last_of_five(
    req_id: int, logits: torch.Tensor, ids: list[list[int]], stream_ptr: Any, client_id: Any
) -> None:
    logits[0, 0, ids[0][-1]] = -torch.inf


def ban_last_of_four(
    req_id: int, logits: torch.Tensor, ids: list[list[int]], stream_ptr: Any
) -> None:
    logits[0, 0, ids[0][-1]] = -torch.inf


@pytest.fixture(scope="module", params=["plain", "speculating"])
def llm(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LLM]:
    drafts = {} if request.param == "plain" else user_provided(lambda request: [7, 8])
    with LLM(tiny, skip_tokenizer_init=True, max_batch_size=2, max_seq_len=64, **drafts) as llm:
        yield llm


def tokens_with(llm: LLM, processor: Any) -> list[int]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, logits_processor=processor)
    output = llm.generate(PROMPT, params)
    assert output.error is None
    return list(output.outputs[0].token_ids)


def test_both_kinds_of_processors_give_the_same_text(llm: LLM) -> None:
    expected = tokens_with(llm, ban_last)
    assert expected != tokens_with(llm, None)
    for processor in (BanLast(), ban_last_of_five, ban_last_of_four, [ban_last, BanLast()]):
        assert tokens_with(llm, processor) == expected


def test_tensorrt_llms_arguments_are_what_its_processors_expect(llm: LLM) -> None:
    processor = BanLast()
    params = SamplingParams(max_tokens=3, ignore_eos=True, logits_processor=processor)
    output = llm.generate(PROMPT, params)
    request_id, shape, tokens, stream_ptr, client_id = processor.seen[0]
    assert (request_id, shape, tokens) == (output.request_id, (1, 1, 64), PROMPT)
    assert stream_ptr is None and client_id is None
    assert PROMPT + output.outputs[0].token_ids[:2] in [seen[2] for seen in processor.seen]


@pytest.mark.parametrize("processor", [5, lambda: None, lambda a, b, c: None])
def test_a_processor_that_fits_neither_kind_is_refused_with_both_signatures(processor: Any) -> None:
    with pytest.raises(ValueError, match=r"\(token_ids, logits\).*\(req_id, logits, token_ids"):
        SamplingParams(logits_processor=processor)


def test_a_callable_of_any_number_of_arguments_gets_two() -> None:
    assert LogitsEdit.of(print).num_arguments == 2
    assert LogitsEdit.of(ban_last_of_five).num_arguments == 5
