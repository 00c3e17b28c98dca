"""A user's drafter in the way of TensorRT-LLM's: its constructor and its names of a request."""

from pathlib import Path
from typing import Any

import pytest

from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor import build
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


class RepeatLast(Drafter):
    """Proposes the last token again, as often as possible."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.request_ids: set[int] = set()

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in sorted(
            scheduled_requests.generation_requests,
            key=lambda r: (r.py_batch_idx is None, r.py_batch_idx or r.request_id),
        ):
            self.request_ids.add(request.py_request_id)
            prefix = request.get_tokens(0)
            assert prefix == request.get_tokens()[0]
            assert request.get_last_tokens(0) == prefix[-1]
            assert request.get_last_tokens() == [prefix[-1]]
            room = request.py_orig_prompt_len + request.py_max_new_tokens - len(prefix) - 1
            request.py_draft_tokens = [prefix[-1]] * min(4, room)
            prefix.append(-1)  # a copy: the request keeps its tokens


def generate(tiny: Path, spec: UserProvidedDecodingConfig | None) -> tuple[Any, int]:
    with LLM(
        tiny,
        skip_tokenizer_init=True,
        max_batch_size=2,
        max_seq_len=64,
        speculative_config=spec,
        attn_backend="TRTLLM",
        disable_overlap_scheduler=True,
    ) as llm:
        output = llm.generate([1, 2, 3], PARAMS)
    assert output.error is None
    stats = output.speculative_decoding
    return output.outputs[0].token_ids, stats.num_drafted_tokens if stats else 0


def test_a_drafter_written_for_tensorrt_llm_drafts_and_changes_no_text(tiny: Path) -> None:
    ngram = NGramDecodingConfig(max_draft_len=4, max_concurrency=None)
    drafter = RepeatLast(
        max_draft_len=ngram.max_draft_len,
        max_total_draft_tokens=ngram.max_total_draft_tokens,
        max_concurrency=ngram.max_concurrency,
        draft_len_schedule=ngram.draft_len_schedule,
    )
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter)
    tokens, num_drafted = generate(tiny, spec)
    assert tokens == generate(tiny, None)[0]
    assert num_drafted > 0 and drafter.request_ids == {1}


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_draft_len": 8}, "max_draft_len = 8 of the drafter is not the 4"),
        ({"max_concurrency": 2}, "max_concurrency = 2 of the drafter is not the None"),
    ],
)
def test_limits_of_a_drafter_that_differ_from_its_configuration_are_refused(
    tiny: Path, limits: dict[str, Any], sentence: str
) -> None:
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=RepeatLast(**limits))
    with pytest.raises(ValueError, match=sentence):
        generate(tiny, spec)


def test_a_start_without_the_resource_manager_that_a_drafter_needs_is_refused(tiny: Path) -> None:
    example = "tllm_spec.examples.copy_drafter"
    for manager in (None, ResourceManager()):
        spec = UserProvidedDecodingConfig(
            max_draft_len=4, drafter=f"{example}:CopyDrafter", resource_manager=manager
        )
        with pytest.raises(ValueError, match=f"CopyDrafter needs a {example}:LastSeen"):
            generate(tiny, spec)
    given = {"drafter": f"{example}:CopyDrafter", "resource_manager": f"{example}:LastSeen"}
    generate(tiny, UserProvidedDecodingConfig(max_draft_len=4, **given))


@pytest.mark.parametrize(
    "drafter", [f"{Drafter.__module__}:Drafter", Drafter()], ids=["path", "object"]
)
def test_a_drafter_that_proposes_nothing_is_refused_before_weights_are_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, drafter: Any
) -> None:
    monkeypatch.setattr(build, "build_engines", None)
    spec = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter)
    with pytest.raises(ValueError, match="is abstract: it does not define prepare_draft_tokens"):
        generate(tiny, spec)
