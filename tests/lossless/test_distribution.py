"""Sampled tokens have the target's distribution: chi-square through the whole engine, against transformers' probabilities.

Rejection sampling is lossless in distribution only, so this is its equality test; the coupled default must pass it too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import draft_target
from tests.executor.sampling.chi_square import p_value
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

VOCAB, NUM_SEEDS, OUTPUT_LEN, NUM_CELLS = 512, 1500, 6, 50
PROMPT = [7, 300, 41]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 60, "top_p": 0.95},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft, with logits of spread 2.5 that differ enough for about every second draft to be rejected."""
    root = tmp_path_factory.mktemp("distribution")
    size = {"vocab_size": VOCAB, "spread": 2.5}
    return write_tiny_llama(root / "target", **size), write_tiny_llama(root / "draft", noise=0.3, **size)


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
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= (params.top_p or 1.0)
    outside = outside.gather(-1, order.argsort(-1))
    return logits.masked_fill(outside, -torch.inf).softmax(-1)


def placed_uniforms(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1] for each token `[M]` drawn from target `[M, V]`: its place in the cumulated probabilities, at random
    within its own share. They are uniform if, and only if, the tokens were drawn as they should. The tokens that the draft
    model overrates stand first, so that whatever favours or punishes drafts tilts them."""
    order = (target / (draft + 1e-12)).argsort(dim=-1)
    shares = target.gather(1, order)
    place = (order == tokens.unsqueeze(1)).int().argmax(dim=1, keepdim=True)
    own = shares.gather(1, place)
    within = torch.rand(own.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (shares.cumsum(1).gather(1, place) - own * within)[:, 0]


@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rejection", [True, False], ids=["rejection", "coupled"])
def test_tokens_are_drawn_from_the_targets_probabilities(
    folders: tuple[Path, Path], models: list[Any], rejection: bool, way: str, draft_len: int
) -> None:
    if way == "filtered" and draft_len != 3:
        pytest.skip("one draft length is enough for the filters")
    all_params = [
        SamplingParams(max_tokens=OUTPUT_LEN, seed=seed, **WAYS[way]) for seed in range(NUM_SEEDS)
    ]
    options = draft_target(folders[1], draft_len, use_rejection_sampling=rejection)
    with LLM(folders[0], skip_tokenizer_init=True, max_batch_size=250, max_seq_len=32, **options) as llm:
        outputs = llm.generate([PROMPT] * NUM_SEEDS, all_params, use_tqdm=False)
    assert isinstance(outputs, list)
    rates = [output.speculative_decoding.draft_acceptance_rate for output in outputs if output.speculative_decoding]
    assert 0.2 < sum(rates) / NUM_SEEDS < 0.8
    tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
    texts = torch.cat((torch.tensor(PROMPT).expand(NUM_SEEDS, -1), tokens), dim=1)
    target, draft = (probabilities(model, texts, all_params[0]) for model in models)
    for place in range(OUTPUT_LEN):
        observed = torch.bincount(tokens[:, place], minlength=VOCAB)
        assert p_value(observed, target[:, place].sum(0)) > 1e-4, f"token {place}"
    uniforms = placed_uniforms(tokens.flatten(), target.flatten(0, 1), draft.flatten(0, 1))
    cells = torch.bincount((uniforms * NUM_CELLS).long().clamp(0, NUM_CELLS - 1), minlength=NUM_CELLS)
    assert p_value(cells, torch.full((NUM_CELLS,), len(uniforms) / NUM_CELLS)) > 1e-4
