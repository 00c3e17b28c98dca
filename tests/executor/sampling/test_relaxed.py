"""Relaxed acceptance follows its rule between the thinking tokens, and only there."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from tests.executor.draft_caches import generating
from tests.executor.graph_rounds import num_replays, with_graphs
from tests.executor.harness import Harness, all_pages_are_back
from tests.executor.test_mtp import PAGES, SITUATIONS
from tests.models.helpers import random_tokens, reference_logits
from tests.models.mtp_reference import save_predictable
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_base import RelaxedRule
from tllm_spec.executor.sampling.acceptance_rules import is_close, phases

BEGIN, END = 3, 4


def thinks(tokens: Sequence[int], rule: RelaxedRule) -> bool:
    marks = [token for token in tokens if token in (rule.begin_token, rule.end_token)]
    return bool(marks) and marks[-1] == rule.begin_token


def test_the_phase_after_each_token_is_that_of_the_last_of_the_two_tokens() -> None:
    rule, dice = RelaxedRule(2, 0.5, BEGIN, END), random.Random(0)
    before = [bool(index % 2) for index in range(64)]
    tokens = [[dice.randrange(6) for _ in range(5)] for _ in before]
    expected = [
        [thinks([BEGIN if old else END, *row[: 1 + i]], rule) for i in range(5)]
        for old, row in zip(before, tokens, strict=True)
    ]
    assert phases(torch.tensor(before), torch.tensor(tokens), rule).tolist() == expected


@pytest.mark.parametrize(("top_k", "delta"), [(1, 9.0), (3, 0.4), (3, 9.0), (10, 0.7)])
def test_a_token_is_close_if_it_is_among_the_best_and_within_delta(
    top_k: int, delta: float
) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(4, 6, 12), torch.randint(12, (4, 6))
    tokens[0] = logits[0].argmax(-1)
    found = is_close(logits, tokens, RelaxedRule(top_k, delta, BEGIN, END))
    log_probs = logits.log_softmax(-1)
    for row in range(4):
        for column in range(6):
            own = log_probs[row, column]
            token = int(tokens[row, column])
            is_best = token in own.argsort(descending=True)[:top_k].tolist()
            is_near = bool(own.max() - own[token] <= delta)
            assert bool(found[row, column]) == (is_best and is_near)
    assert found.any() and not found.all()


def test_a_token_that_a_grammar_forbids_is_never_close() -> None:
    logits = torch.tensor([[[0.0, -torch.inf, 0.1]]])
    for token, is_allowed in ((0, True), (1, False)):
        found = is_close(logits, torch.tensor([[token]]), RelaxedRule(3, 99.0, BEGIN, END))
        assert bool(found) == is_allowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("relaxed")
    save_predictable(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def relaxed(rule: RelaxedRule, **options: Any) -> dict[str, Any]:
    own = {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": rule.top_k,
        "relaxed_delta": rule.delta,
        "begin_thinking_phase_token": rule.begin_token,
        "end_thinking_phase_token": rule.end_token,
    }
    return {"max_seq_len": 64, "speculative_config": own | options}


def played(model: Any, tokens: list[int], drafts: list[int], rule: RelaxedRule) -> list[int]:
    """What a round emits, in plain Python."""
    new: list[int] = []
    for draft in [*drafts, None]:
        logits = reference_logits(model, tokens + new)[-1]
        best = int(logits.argmax())
        if draft is None:
            return [*new, best]
        gap = float(logits.max() - logits[draft])
        is_close = int((logits > logits[draft]).sum()) < rule.top_k and gap <= rule.delta
        if draft != best and not (thinks(tokens + new, rule) and is_close):
            return [*new, best]
        new.append(draft)
    raise AssertionError


@pytest.mark.thinned(4)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("one_model", [True, False])
def test_each_round_emits_what_the_rule_says(
    one_model: bool, situation: str, folder: Path, model: Any
) -> None:
    prompts = [random_tokens(8 + i, seed=i) for i in range(6)]
    rule = RelaxedRule(20, 3.0, 114, 80)  # both occur in the texts
    options = {"max_batch_size": 3, "kv_cache_config": PAGES, "disable_overlap_scheduler": True}
    spec = relaxed(rule, mtp_eagle_one_model=one_model)
    harness = Harness(folder, **options | SITUATIONS[situation], **spec)
    requests = [
        harness.submit(prompt, max_tokens=24, draft_limit=1 + i % 3)
        for i, prompt in enumerate(prompts)
    ]
    slots, num_rounds, num_relaxed = harness.parts.slots, 0, 0
    changes = {True: 0, False: 0}
    before: dict[int, tuple[list[int], list[int]]] = {}
    while harness.round():
        for request in requests:
            tokens, drafts = before.get(request.request_id, ([], []))
            emitted = request.tokens[len(tokens) :]
            if tokens and emitted and request in generating(harness):
                assert emitted == played(model, tokens, drafts, rule)
                strict = played(model, tokens, drafts, replace(rule, top_k=1))
                num_rounds, num_relaxed = num_rounds + 1, num_relaxed + (emitted != strict)
                if thinks(tokens, rule) != (now := thinks(request.tokens, rule)):
                    changes[now] += 1
        before = {
            request.request_id: (
                list(request.tokens),
                slots.window[request.slot, 1 : 1 + slots.num_drafts[request.slot]].tolist(),
            )
            for request in generating(harness)
        }
    assert num_rounds > 20 and num_relaxed > 5 and min(changes.values()) > 0
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    assert all_pages_are_back(harness.executor)


def texts(folder: Path, prompts: list[list[int]], temperature: float, spec: Any) -> list[list[int]]:
    harness = Harness(folder, **(spec or {"max_seq_len": 64}))
    requests = [
        harness.submit(prompt, max_tokens=20, temperature=temperature, seed=1) for prompt in prompts
    ]
    harness.run()
    return [request.tokens for request in requests]


def test_outside_the_phase_and_at_a_temperature_the_text_is_that_of_plain_decoding(
    folder: Path,
) -> None:
    prompts = [random_tokens(9, seed=i) for i in range(4)]
    greedy = texts(folder, prompts, 0.0, None)
    seen = {token for tokens in greedy for token in tokens}
    absent = next(token for token in range(128) if token not in seen)
    rule = RelaxedRule(20, 3.0, absent, 127 - absent)
    assert texts(folder, prompts, 0.0, relaxed(rule)) == greedy
    thinking = [[absent, *prompt] for prompt in prompts]
    plain = [texts(folder, thinking, temperature, None) for temperature in (0.0, 0.6)]
    assert texts(folder, thinking, 0.0, relaxed(rule)) != plain[0]
    assert texts(folder, thinking, 0.6, relaxed(rule)) == plain[1]
    closed = [[absent, 127 - absent, *prompt] for prompt in prompts]
    assert texts(folder, closed, 0.0, relaxed(rule)) == texts(folder, closed, 0.0, None)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "mixed"])
@pytest.mark.parametrize("one_model", [True, False])
def test_replayed_rounds_accept_what_eager_rounds_accept(
    one_model: bool, is_sampled: bool, folder: Path, eager_graphs: None
) -> None:
    """The texts change phase, requests join and leave, and batches are padded."""
    spec = relaxed(RelaxedRule(20, 3.0, 114, 80), mtp_eagle_one_model=one_model)
    graphs = with_graphs(folder, (1, 4, 8), {0, 1, 2, 3}, **spec)
    harnesses = graphs, Harness(folder, **spec), Harness(folder, max_seq_len=64)
    found = []
    for harness in harnesses:
        requests = [
            harness.submit(
                random_tokens(8 + i, seed=i),
                max_tokens=12 + 4 * i,
                temperature=0.6 if is_sampled and i % 3 == 1 else None,
                draft_limit=(3, 2, 0)[i % 3] if harness.max_draft_len else None,
                seed=i,
            )
            for i in range(7)
        ]
        harness.run()
        found.append([(request.tokens, request.counters.by_accepted) for request in requests])
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] != [tokens for tokens, _ in found[2]]
    assert {key.batch_size for key in num_replays(graphs)} == {1, 4, 8}
    assert any(key.sampled for key in num_replays(graphs)) == is_sampled


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_relaxed_acceptance_for_thinking": False}, "relaxed_delta, relaxed_topk: for"),
        ({"use_rejection_sampling": True}, "and use_rejection_sampling = True are exclusive"),
        ({"use_dynamic_tree": True, "dynamic_tree_max_topK": 2}, "is refused for draft trees"),
        ({"end_thinking_phase_token": BEGIN}, "must not be end_thinking_phase_token"),
        ({"relaxed_topk": 0}, "relaxed_topk"),
        ({"relaxed_delta": -0.1}, "relaxed_delta"),
    ],
)
def test_options_that_contradict_relaxed_acceptance_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    options = relaxed(RelaxedRule(4, 0.5, BEGIN, END), **changes)
    with pytest.raises(ValueError, match=problem):
        LlmArgs(model="m", **options)


def test_thinking_tokens_outside_the_vocabulary_are_refused(folder: Path) -> None:
    rule = RelaxedRule(1, 0.0, 128798, 128799)
    with pytest.raises(ValueError, match="begin_thinking_phase_token = 128798 is not in the voc"):
        Harness(folder, **relaxed(rule))
