"""Sampled tokens have the target's distribution: chi-square through the whole engine, against transformers'
probabilities.

Rejection sampling is lossless in distribution only, so this is its equality test; the coupled default must pass it too.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import draft_target
from tests.executor.sampling.chi_square import p_value
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.sampling_params import SamplingParams

VOCAB, NUM_SEEDS, OUTPUT_LEN, NUM_CELLS = 512, 2000, 6, 50
PROMPT = [7, 300, 41]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 60, "top_p": 0.95},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft, with logits of spread 2.5 that differ enough for about every second draft to be rejected."""
    root = tmp_path_factory.mktemp("distribution")
    size: dict[str, Any] = {"vocab_size": VOCAB, "spread": 2.5}
    return write_tiny_llama(root / "target", **size), write_tiny_llama(root / "draft", noise=0.2, **size)


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> Iterator[list[Any]]:
    from transformers import AutoModelForCausalLM

    yield [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]


@torch.inference_mode()
def probabilities(model: Any, texts: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What each output token was drawn from, `[N, OUTPUT_LEN, V]` float64. texts `[N, T]`."""
    logits = model(texts).logits[:, len(PROMPT) - 1 : -1].double() / params.effective_temperature
    if params.top_k:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[..., -1:], -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p is None:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= params.top_p
    probs = probs.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
    return probs / probs.sum(-1, keepdim=True)


def placed_uniforms(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1] for each token `[M]` drawn from target `[M, V]`: its place in the cumulated probabilities,
    at random within its own share. They are uniform if, and only if, the tokens were drawn as they should. The
    tokens that the draft model overrates stand first, so that whatever favours or punishes drafts tilts them."""
    underrated, chosen = target / (draft + 1e-12), tokens.unsqueeze(1)
    before = target.masked_fill(underrated >= underrated.gather(1, chosen), 0.0).sum(1)
    within = torch.rand(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return before + target.gather(1, chosen)[:, 0] * within


@pytest.mark.parametrize(
    ("rejection", "way", "draft_len"),
    [(True, "plain", draft_len) for draft_len in (1, 2, 3, 4)]
    + [(True, "filtered", 3), (False, "plain", 3), (False, "filtered", 2)],
)
def test_tokens_are_drawn_from_the_targets_probabilities(
    folders: tuple[Path, Path], models: list[Any], rejection: bool, way: str, draft_len: int
) -> None:
    params = SamplingParams(max_tokens=OUTPUT_LEN, **WAYS[way])
    options = draft_target(folders[1], draft_len, use_rejection_sampling=rejection)
    with LLM(folders[0], skip_tokenizer_init=True, max_batch_size=250, max_seq_len=32, **options) as llm:
        outputs = llm.generate(
            [PROMPT] * NUM_SEEDS, [replace(params, seed=seed) for seed in range(NUM_SEEDS)], use_tqdm=False
        )
    assert isinstance(outputs, list)
    stats = sum((output.speculative_decoding or SpeculativeStats() for output in outputs), SpeculativeStats())
    assert all(0.25 < rate < 0.75 for rate in stats.per_position_acceptance[:1])
    tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
    texts = torch.cat((torch.tensor(PROMPT).expand(NUM_SEEDS, -1), tokens), dim=1)
    target, draft = (probabilities(model, texts, params) for model in models)
    for place in range(OUTPUT_LEN):
        observed = torch.bincount(tokens[:, place], minlength=VOCAB)
        assert p_value(observed, target[:, place].sum(0)) > 1e-4, f"token {place}"
    uniforms = placed_uniforms(tokens.flatten(), target.flatten(0, 1), draft.flatten(0, 1))
    cells = torch.bincount((uniforms * NUM_CELLS).long().clamp(0, NUM_CELLS - 1), minlength=NUM_CELLS)
    assert p_value(cells, torch.full((NUM_CELLS,), len(uniforms) / NUM_CELLS)) > 1e-4
