"""EAGLE-1/2 heads through the engine on both paths: which drafts they make, that the text is plain
decoding's, and which folders and options are refused."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.executor.draft_caches import (
    HOT,
    MASK,
    SMALL_POOL,
    TOLERANCE,
    TREE,
    assert_drafts_one_by_one,
    eagle,
    eagle3,
    generating,
    one_model,
    submit_traffic,
)
from tests.executor.graph_rounds import num_replays, submit_mixture, with_graphs
from tests.executor.harness import Harness, draft_target, output_of
from tests.models.deepseek import save_deepseek
from tests.models.eagle_reference import EagleReference
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.drafting.drafting_steps import DraftSteps
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.models.registry import model_config
from tllm_spec.outputs import SpeculativeStats

PROMPT = [3, 14, 15, 9, 26]
DRAFT_LEN = 3
ALL_VARIANTS = {"bias": True, "input_norm": True, "qkv_bias": True, "num_layers": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "chains": {},
    "dynamic trees": TREE,
    "static trees": {"eagle_choices": [[0], [1], [0, 0], [1, 1], [0, 0, 0]]},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle(tmp_path_factory.mktemp("head"))


def figures(requests: list[LlmRequest]) -> list[tuple[list[int], SpeculativeStats]]:
    return [(output_of(each), each.counters.stats()) for each in requests]


@pytest.mark.covering
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("variants", [{}, ALL_VARIANTS], ids=["as published", "all variants"])
def test_the_engine_drafts_the_tokens_of_the_plain_torch_reference(
    variants: dict[str, Any], one_model: bool, tiny: Path, tmp_path: Path
) -> None:
    folder = write_tiny_eagle(tmp_path, **variants)
    options = eagle(folder, DRAFT_LEN, eagle3_one_model=one_model)
    harness = Harness(tiny, **options, disable_overlap_scheduler=True)
    reference: Any = EagleReference(folder, harness.parts.runner.engine.model)
    reference.fuse = lambda states: states
    for number in range(4):
        harness.submit([number, *PROMPT], 24, temperature=HOT if number % 2 else None)
    assert_drafts_one_by_one(harness, (2,), reference, DRAFT_LEN)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("shape", ["chains", "dynamic trees", "static trees"])
@pytest.mark.parametrize("one_model", [True, False])
def test_the_drafts_of_graphs_are_those_of_eager_rounds(
    tiny: Path, head: Path, eager_graphs: None, one_model: bool, shape: str
) -> None:
    options = eagle(head, DRAFT_LEN, eagle3_one_model=one_model, **SHAPES[shape])
    eager, graphed = Harness(tiny, **options), with_graphs(tiny, (1, 4, 8), {0, 3}, **options)
    expected, requests = (submit_mixture(each, 8, is_sampled=True) for each in (eager, graphed))
    eager.run()
    graphed.run()
    assert figures(requests) == figures(expected) and len(num_replays(graphed)) > 2


@pytest.mark.parametrize(
    ("one_model", "shape"),
    [(True, "dynamic trees"), pytest.param(False, "chains", marks=pytest.mark.slow)],
)
def test_a_head_drafts_for_a_target_with_latent_attention(
    tmp_path: Path, one_model: bool, shape: str
) -> None:
    save_deepseek(tmp_path / "target", "DeepseekV3")
    sizes = {"hidden_size": 64, "vocab_size": 128, "num_heads": 4, "num_kv_heads": 2}
    head = write_tiny_eagle(tmp_path / "head", **sizes)
    speculation = eagle(head, DRAFT_LEN, eagle3_one_model=one_model, **SHAPES[shape])
    pair = [
        Harness(tmp_path / "target", max_seq_len=64, **options) for options in ({}, speculation)
    ]
    expected, requests = (
        [each.submit([i, *PROMPT], 40, temperature=HOT * (i % 2), seed=i) for i in range(4)]
        for each in pair
    )
    for harness in pair:
        harness.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert sum(stats.num_drafted_tokens for _, stats in figures(requests)) > 100


def test_an_eagle3_head_under_the_name_eagle_is_served_as_eagle3_with_one_warning(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2)
    runs = []
    for decoding_type in ("Eagle3", "Eagle"):
        assert not caplog.messages
        harness = Harness(tiny, **eagle3(head, decoding_type=decoding_type))
        requests = submit_traffic(harness, Random(1), 5)
        harness.run()
        runs.append(figures(requests))
    assert runs[0] == runs[1] and caplog.messages == [
        "decoding_type = 'Eagle' is served as Eagle3: the folder has an EAGLE-3 head"
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Eagle3": ({"decoding_type": "Eagle3"}, "is an EAGLE-1/2 head, .* decoding_type: Eagle$"),
    "layers": (
        {"eagle3_layers_to_capture": [0, 1]},
        r"eagle3_layers_to_capture = \[0, 1\] is refused: .* last hidden state only",
    ),
    "both": (
        {"eagle3_layers_to_capture": [0], "speculative_token_map": "no/such.pt"},
        r"(?s)token_map: no/such\.pt does not exist.*eagle3_layers_to_capture = \[0\] is refused",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_eagle_head_is_not_is_refused_with_all_reasons(
    tiny: Path, head: Path, name: str
) -> None:
    options, sentence = REFUSED[name]
    speculation = eagle(head)["speculative_config"] | options
    with pytest.raises(ValueError, match=sentence):
        Harness(tiny, speculative_config=speculation)


def test_a_head_as_a_draft_model_and_a_model_as_a_head_are_refused(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    with pytest.raises(ValueError, match=r"is an EAGLE-1/2 head, .* decoding_type: Eagle$"):
        Harness(tiny, **draft_target(head))
    with pytest.raises(ValueError, match=r"model of 2 layers, not an EAGLE-1/2 head; .*Draft_Tar"):
        Harness(tiny, **eagle(tiny_draft))


# Drafts of a PARD model through the engine, on both paths.


MODES = ["pard", "pard_two_model"]
PARD_DRAFT_LEN = 4


def drafted_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits `[K, N, V]` of every round's drafts."""
    found: list[torch.Tensor] = []
    draft = DraftSteps.draft

    def spy(
        self: DraftSteps, group: Any, shape: Any, kv_lens: Any, states: torch.Tensor, bound: int
    ) -> Any:
        logits = self._net.compute_logits(states)
        found.append(logits.view(-1, len(group.slots), logits.shape[1]))
        return draft(self, group, shape, kv_lens, states, bound)

    monkeypatch.setattr(DraftSteps, "draft", spy)
    return found


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits `[K, V]` of the last token and of the mask tokens after it, without a cache."""
    ids = torch.tensor([[*tokens, *[MASK] * (PARD_DRAFT_LEN - 1)]])
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, -PARD_DRAFT_LEN:]
    return logits


@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_those_of_one_whole_forward_with_mask_tokens_at_the_end(
    tiny: Path, tiny_draft: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafted_logits(monkeypatch)
    speculation = one_model(tiny_draft, tiny_draft, mode, PARD_DRAFT_LEN)
    harness = Harness(tiny, **speculation, disable_overlap_scheduler=True)
    reference = LlamaForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32)
    requests = [
        harness.submit([i, 3, 14, 15, 9], 30, temperature=HOT if i % 2 else None) for i in range(4)
    ]
    while len(generating(harness)) < 4:
        harness.round()
    num_checked = 0
    while generating(harness) == requests and num_checked < 24:
        before = [request.tokens[:] for request in requests]
        del found[:]
        harness.round()
        if generating(harness) != requests:
            break
        # A model of its own drafts before the target's forward, the other after it.
        texts = before if mode == "pard_two_model" else [each.tokens for each in requests]
        own = found[-1]
        for place, tokens in enumerate(texts):
            expected = reference_logits(reference, tokens)
            assert (own[:, place] - expected).abs().max() < TOLERANCE
            num_checked += 1
    assert num_checked >= 12 and sum(each.counters.by_accepted[1] for each in requests) > 0


@pytest.mark.thinned(8)
@pytest.mark.parametrize("mode", [*MODES, "pard_tree", "pard_two_model_tree"])
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_plain_decoding_with_preemption_and_prefix_hits(
    tiny: Path, tiny_draft: Path, mode: str, overlap: bool
) -> None:
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 112}}
    texts = []
    for each in ("plain", mode):
        speculation = one_model(tiny_draft, tiny_draft, each)
        options = SMALL_POOL | pool | {"max_num_tokens": 60, **speculation}
        harness = Harness(tiny, **options, disable_overlap_scheduler=not overlap)
        requests = submit_traffic(harness, Random(5), 24)
        harness.run()
        texts.append([output_of(request) for request in requests])
    assert texts[0] == texts[1]
    assert harness.parts.scheduler.num_preemptions


def test_a_model_without_a_mask_token_is_refused_by_option(tiny: Path, tiny_draft: Path) -> None:
    config = model_config(tiny)

    def check(**options: Any) -> None:
        spec = {"decoding_type": "PARD", "max_draft_len": 3, "speculative_model": str(tiny_draft)}
        args = LlmArgs(model=str(tiny), speculative_config=spec | options)
        check_draft(draft_plan_of(args.speculative_config), None, config)

    with pytest.raises(ValueError, match=r"mask_token_id is needed, .* names no mask token"):
        check()
    with pytest.raises(ValueError, match=r"mask_token_id = 64 is not a token of .* has 64"):
        check(mask_token_id=64)
    check(mask_token_id=63)
