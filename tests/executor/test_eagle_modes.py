"""EAGLE-1/2 heads through the engine on both paths: which drafts they make, that the text is plain
decoding's, and which folders and options are refused."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT, TREE, eagle, eagle3, generating, submit_traffic
from tests.executor.graph_rounds import num_replays, submit_mixture, with_graphs
from tests.executor.harness import Harness, draft_target, output_of
from tests.models.deepseek import save_deepseek
from tests.models.eagle3_runner import captured_states
from tests.models.eagle_reference import EagleReference
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest
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


@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("variants", [{}, ALL_VARIANTS], ids=["as published", "all variants"])
def test_the_engine_drafts_the_tokens_of_the_plain_torch_reference(
    variants: dict[str, Any], one_model: bool, tiny: Path, tmp_path: Path
) -> None:
    folder = write_tiny_eagle(tmp_path, **variants)
    options = eagle(folder, DRAFT_LEN, eagle3_one_model=one_model)
    harness = Harness(tiny, **options, disable_overlap_scheduler=True)
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference, num_checked = EagleReference(folder, target), 0
    for number in range(4):
        harness.submit([number, *PROMPT], 24, temperature=HOT if number % 2 else None)
    while harness.round():
        for request in generating(harness):
            if request.rules.temperature:
                continue  # its drafts are sampled
            tokens, hidden = request.tokens[1:], captured_states(target, request.tokens[:-1], (2,))
            for _ in range(DRAFT_LEN):
                logits, states = reference.forward(tokens, hidden)
                hidden = torch.cat((hidden, states[-1:]))
                tokens = [*tokens, int(logits[-1].argmax())]
            window = slots.window[request.slot].tolist()
            assert window == [request.tokens[-1], *tokens[-DRAFT_LEN:]]
            num_checked += 1
    assert num_checked > 20


@pytest.mark.thinned(3)
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


@pytest.mark.parametrize(("one_model", "shape"), [(True, "dynamic trees"), (False, "chains")])
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
