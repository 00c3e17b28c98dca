"""Sampled tokens have the target's distribution: chi-square through the whole engine, against
transformers' probabilities.

Rejection sampling is lossless in distribution only, so this is its equality test; the coupled
default must pass it too."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.executor.harness import Harness, draft_target
from tests.executor.sampling.chi_square import p_value
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import rewrite, write_tiny_eagle3
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams

VOCAB, NUM_SEEDS, OUTPUT_LEN, NUM_CELLS = 512, 1000, 4, 50
PROMPT = [7, 300, 41]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 60, "top_p": 0.95},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft, with logits of spread 2.5 that differ enough for about every second draft
    to be rejected."""
    root = tmp_path_factory.mktemp("distribution")
    size: dict[str, Any] = {"vocab_size": VOCAB, "spread": 2.5}
    return write_tiny_llama(root / "target", **size), write_tiny_llama(
        root / "draft", noise=0.2, **size
    )


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


def placed_uniforms(
    tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor
) -> torch.Tensor:
    """A number in [0, 1] for each token `[M]` drawn from target `[M, V]`: its place in the
    cumulated probabilities, at random within its own share. They are uniform if, and only if, the
    tokens were drawn as they should. The tokens that the draft model overrates stand first, so that
    whatever favours or punishes drafts tilts them."""
    underrated, chosen = target / (draft + 1e-12), tokens.unsqueeze(1)
    before = target.masked_fill(underrated >= underrated.gather(1, chosen), 0.0).sum(1)
    within = torch.rand(
        len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return before + target.gather(1, chosen)[:, 0] * within


def sample(
    target: Path,
    params: SamplingParams,
    options: dict[str, Any],
    lengths: Sequence[int] = (),
    most: float = 0.75,
) -> list[RequestOutput]:
    """One output of the same prompt for every seed. About every second first draft is accepted, a
    share of `most` at most. lengths: the draft length of every round, in turn."""
    with LLM(
        target, skip_tokenizer_init=True, max_batch_size=250, max_seq_len=40, **options
    ) as llm:
        if lengths:
            coming = cycle(lengths)
            llm._executor.parts.tier_for = lambda *_: next(coming)
        outputs = llm.generate(
            [PROMPT] * NUM_SEEDS,
            [replace(params, seed=seed) for seed in range(NUM_SEEDS)],
            use_tqdm=False,
        )
        llm.check_integrity()
    assert isinstance(outputs, list) and not any(output.error for output in outputs)
    stats = sum(
        (output.speculative_decoding or SpeculativeStats() for output in outputs),
        SpeculativeStats(),
    )
    assert 0.2 < stats.per_position_acceptance[0] < most, stats
    return outputs


def assert_drawn_from(
    model: Any,
    outputs: list[RequestOutput],
    params: SamplingParams,
    favoured: Callable[..., torch.Tensor],
) -> None:
    """favoured: texts `[N, T]` to `[N, OUTPUT_LEN, V]` (or what broadcasts to it), high for tokens
    that are often drafted."""
    tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
    texts = torch.cat((torch.tensor(PROMPT).expand(NUM_SEEDS, -1), tokens), dim=1)
    target = probabilities(model, texts, params)
    for place in range(OUTPUT_LEN):
        observed = torch.bincount(tokens[:, place], minlength=VOCAB)
        assert p_value(observed, target[:, place].sum(0)) > 1e-4, f"token {place}"
    draft = favoured(texts).expand_as(target)
    uniforms = placed_uniforms(tokens.flatten(), target.flatten(0, 1), draft.flatten(0, 1))
    cells = torch.bincount(
        (uniforms * NUM_CELLS).long().clamp(0, NUM_CELLS - 1), minlength=NUM_CELLS
    )
    assert p_value(cells, torch.full((NUM_CELLS,), len(uniforms) / NUM_CELLS)) > 1e-4


def assert_drawn_from_the_target(
    models: list[Any], outputs: list[RequestOutput], params: SamplingParams
) -> None:
    """models: target and draft, whose likely tokens are favoured."""
    target, draft = models
    assert_drawn_from(target, outputs, params, lambda texts: probabilities(draft, texts, params))


@pytest.mark.parametrize(
    ("rejection", "way", "draft_len", "one_model"),
    [
        pytest.param(True, "plain", 1, False, marks=pytest.mark.slow),
        pytest.param(True, "plain", 4, False, marks=pytest.mark.slow),
        pytest.param(True, "plain", 3, True, marks=pytest.mark.slow),
        pytest.param(True, "filtered", 3, False, marks=pytest.mark.slow),
        (True, "filtered", 2, True),
        pytest.param(False, "plain", 3, True, marks=pytest.mark.slow),
        pytest.param(False, "filtered", 2, False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_drawn_from_the_targets_probabilities(
    folders: tuple[Path, Path],
    models: list[Any],
    rejection: bool,
    way: str,
    draft_len: int,
    one_model: bool,
) -> None:
    params = SamplingParams(max_tokens=OUTPUT_LEN, **WAYS[way])
    how = {"use_rejection_sampling": rejection, "draft_target_one_model": one_model}
    outputs = sample(folders[0], params, draft_target(folders[1], draft_len, **how))
    assert_drawn_from_the_target(models, outputs, params)


MOVING = (3, 1, 2, 0, 3, 2, 3, 1, 1, 0, 2)


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 9},
    "static": {"eagle_choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
}


@pytest.mark.parametrize(
    ("tree", "way", "lengths"),
    [
        pytest.param("dynamic", "plain", (), marks=pytest.mark.slow),
        pytest.param("static", "filtered", (), marks=pytest.mark.slow),
        ("dynamic", "filtered", MOVING),
    ],
)
def test_rejection_sampling_on_a_tree_draws_from_the_targets_probabilities(
    folders: tuple[Path, Path], models: list[Any], tree: str, way: str, lengths: tuple[int, ...]
) -> None:
    params = SamplingParams(max_tokens=OUTPUT_LEN, **WAYS[way])
    how = {"use_rejection_sampling": True, "draft_target_one_model": True, **TREES[tree]}
    outputs = sample(folders[0], params, draft_target(folders[1], 3, **how), lengths)
    assert_drawn_from_the_target(models, outputs, params)


def test_lower_thresholds_accept_more_and_change_the_distribution(
    folders: tuple[Path, Path], models: list[Any]
) -> None:
    params = SamplingParams(max_tokens=OUTPUT_LEN, **WAYS["plain"])
    how = {"use_rejection_sampling": True, "draft_target_one_model": True, **TREES["dynamic"]}
    lossy = draft_target(folders[1], 3, **how, threshold_acc=0.4)
    outputs = sample(folders[0], params, lossy, most=0.95)
    with pytest.raises(AssertionError):
        assert_drawn_from_the_target(models, outputs, params)


@pytest.mark.slow
@pytest.mark.parametrize("one_model", [True, False])
def test_rejection_sampling_draws_from_the_targets_probabilities_while_tiers_change(
    folders: tuple[Path, Path], models: list[Any], one_model: bool
) -> None:
    """Rounds verify fewer drafts than were made, as many, and, after a shorter one, have
    padding."""
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=1.0)
    options = draft_target(
        folders[1], 3, use_rejection_sampling=True, draft_target_one_model=one_model
    )
    outputs = sample(folders[0], params, options, MOVING)
    assert_drawn_from_the_target(models, outputs, params)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a random head with half of its tokens, whose logits have so little spread that
    the two overlap."""
    root = tmp_path_factory.mktemp("eagle3")
    target = write_tiny_llama(root / "target", vocab_size=VOCAB, spread=0.8)
    head = write_tiny_eagle3(
        root / "head", vocab_size=VOCAB, draft_vocab_size=VOCAB // 2, num_captured=2
    )
    rewrite(head, lambda tensors: tensors["lm_head.weight"].mul_(0.4))
    return target, head


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [True, False])
@pytest.mark.parametrize("one_model", [True, False])
def test_a_head_with_a_reduced_vocabulary_leaves_the_targets_probabilities_alone(
    flat: tuple[Path, Path], rejection: bool, one_model: bool
) -> None:
    """Tokens that the head has must not come more often than they should, and those that it lacks
    must come."""
    from transformers import AutoModelForCausalLM

    target, head = flat
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=1.0)
    spec = {
        "decoding_type": "Eagle3",
        "speculative_model": str(head),
        "max_draft_len": 3,
        "eagle3_one_model": one_model,
        "eagle3_layers_to_capture": [0, 1],
        "use_rejection_sampling": rejection,
    }
    outputs = sample(target, params, {"speculative_config": spec})
    known = load_file(head / "model.safetensors")["t2d"].double()
    model = AutoModelForCausalLM.from_pretrained(target)
    assert_drawn_from(model, outputs, params, lambda texts: known.expand(1, 1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one_model", "two_model", "tree"])
def test_a_token_map_leaves_the_targets_probabilities_alone(
    folders: tuple[Path, Path], models: list[Any], tmp_path: Path, how: str
) -> None:
    """Tokens of the map must not come more often than they should, and the others must come."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: VOCAB * 3 // 4]
    torch.save(ids, tmp_path / "hot.pt")
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=1.0)
    options = {
        "use_rejection_sampling": True,
        "draft_target_one_model": how != "two_model",
        "speculative_token_map": str(tmp_path / "hot.pt"),
        **(TREES["dynamic"] if how == "tree" else {}),
    }
    outputs = sample(folders[0], params, draft_target(folders[1], 3, **options))
    known = torch.zeros(VOCAB, dtype=torch.float64).index_fill_(0, ids, 1.0)
    assert_drawn_from(models[0], outputs, params, lambda texts: known.expand(1, 1, -1))


@pytest.fixture(scope="module")
def indifferent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token is as likely as any other. Drafting for itself, it never rejects one of its
    drafts."""
    model = write_tiny_llama(tmp_path_factory.mktemp("indifferent"))
    rewrite(model, lambda tensors: tensors["lm_head.weight"].zero_())
    return model


@pytest.mark.parametrize("mode", ["two_model", "one_model", "one_model_in_turn"])
def test_a_round_that_verifies_fewer_drafts_than_there_are_rejects_none_of_the_others(
    indifferent: Path, mode: str
) -> None:
    """(p - q)+, which is drawn from after a rejected draft, has nothing in it here: that would be
    an error."""
    options = draft_target(
        indifferent,
        4,
        use_rejection_sampling=True,
        draft_target_one_model=mode != "two_model",
        draft_len_schedule={1: 1, 2: 4},
    )
    harness = Harness(indifferent, disable_overlap_scheduler=mode.endswith("in_turn"), **options)
    requests = [
        harness.submit([1, 2, 3], length, temperature=1.0, seed=length) for length in (10, 60)
    ]
    harness.run()
    assert [(request.finish_reason, request.num_output_tokens) for request in requests] == [
        ("length", 10),
        ("length", 60),
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_round_after_one_without_drafts_accepts_none(indifferent: Path, overlap: bool) -> None:
    """Drafts that were made and never verified stand in the slots still."""
    spec = draft_target(indifferent, 4, use_rejection_sampling=True, draft_target_one_model=True)
    harness = Harness(indifferent, disable_overlap_scheduler=not overlap, **spec)
    lengths = cycle([4, 4, 0])
    harness.parts.tier_for = lambda *_: next(lengths)
    request = harness.submit([1, 2, 3], 60, temperature=1.0, seed=3)
    harness.run()
    stats = request.counters.stats()
    # All that were really proposed, and in the last round as many as the length limit left.
    assert stats.num_drafted_tokens - 4 <= stats.num_accepted_tokens <= stats.num_drafted_tokens > 0
