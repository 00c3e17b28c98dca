"""What copied drafts are worth, from texts as they came out."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.executor.draft_caches import one_model, write_heads
from tests.executor.harness import Harness, output_of
from tests.executor.played_rounds import LADDER, LinearTimes, controller
from tests.kernels.test_suffix_match import paths_of
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.text_search import TextSearch
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.hindsight import (
    MAX_PLACES,
    TOKENS_A_ROUND,
    Hindsight,
    hindsight_of,
)
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.sampling_params import SamplingParams

DEPTH, COPIED = 5, 4
SA: dict[str, Any] = {"decoding_type": "SA", "max_draft_len": 3}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tmp_path_factory.mktemp("head"))


def request_of(tokens: Sequence[int], prompt_len: int = 1) -> LlmRequest:
    params = SamplingParams(max_tokens=1000)
    rules = DecodingRules.from_params(params, vocab_size=1, end_ids=(), encode=None)
    request = LlmRequest(1, list(tokens[:prompt_len]), rules, seed=0, draft_limit=DEPTH)
    request.tokens += tokens[prompt_len:]
    request.state = RequestState.GENERATION
    return request


def num_right(text: list[int], end: int, max_match: int, oldest: bool = False) -> tuple[int, int]:
    """The length of the match of the text before `end`, and its right drafts."""
    (drafts,), length = paths_of(text[:end], DEPTH, max_match, oldest=oldest)
    right = next((n for n, t in enumerate(drafts) if t != text[end + n]), len(drafts))
    return length, right


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize(("max_match", "min_match"), [(64, 1), (2, 1), (8, 3)])
def test_a_look_back_sees_the_drafts_that_the_device_would_have_found(
    max_match: int, min_match: int, oldest: bool
) -> None:
    chance, found = Random(3), set[float]()
    for _ in range(300):
        text = [chance.randrange(3) for _ in range(chance.randrange(DEPTH + 2, 40))]
        search = TextSearch(max_match, oldest)
        look = Hindsight(search, {1: 2, 4: DEPTH}, min_match).measure([request_of(text)])
        length, right = num_right(text, len(text) - DEPTH, max_match, oldest)
        run = 1 if length < min_match else length + right
        assert look == {1: ceil(run / 3) / run, 4: ceil(run / (1 + DEPTH)) / run}
        found.add(look[4])
    assert len(found) > 4


def text_with_copies(chance: Random, share: float) -> list[int]:
    """New words of two tokens, and passages of up to 40 tokens that were there before."""
    text = [chance.randrange(500) for _ in range(300)]
    while len(text) < 1300:
        if chance.random() < share:
            first = chance.randrange(len(text) - 40)
            text += text[first : first + chance.randrange(10, 40)]
        else:
            text += [chance.randrange(500) for _ in range(2)]
    return text


@pytest.mark.thinned(3)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.6])
def test_looks_at_some_tokens_tell_how_many_tokens_a_round_would_have(share: float) -> None:
    text, depths = text_with_copies(Random(8), share), {1: 1, 2: DEPTH}
    hindsight, looks = Hindsight(TextSearch(64), depths), []
    for end in range(300 + DEPTH, len(text), 6):
        request = request_of(text[:end])
        while not (look := hindsight.measure([request])):
            pass
        looks.append(look)
    for tier, depth in depths.items():
        at, num_rounds = 300, 0
        while at + DEPTH < len(text):
            at += 1 + min(num_right(text, at, 64)[1], depth)
            num_rounds += 1
        tokens_a_round = len(looks) / sum(look[tier] for look in looks)
        assert tokens_a_round == pytest.approx((at - 300) / num_rounds, rel=0.1)


def test_a_long_text_is_read_as_seldom_as_it_is_long() -> None:
    request, rounds = request_of([1, 2] * 5 * TOKENS_A_ROUND), 200
    hindsight = Hindsight(TextSearch(64), {1: DEPTH})
    looks = [hindsight.measure([request]) for _ in range(rounds)]
    assert rounds / 10 - 2 <= sum(bool(look) for look in looks) <= rounds / 10


def test_a_long_text_is_read_as_often_as_the_short_ones_next_to_it() -> None:
    """The long one repeats itself, the short one does not."""
    long, short = [1, 2] * 2 * TOKENS_A_ROUND, list(range(500))
    requests = [request_of(long), request_of(short)]
    hindsight = Hindsight(TextSearch(64), {1: DEPTH})
    found = [look[1] for _ in range(400) if (look := hindsight.measure(requests))]
    assert abs(found.count(1.0) - len(found) / 2) <= 1 and len(found) > 100


def test_a_text_of_one_token_is_compared_at_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    class Counted(np.ndarray):  # type: ignore[type-arg] # it is only watched
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            sizes.append(np.size(found))
            return found

    monkeypatch.setattr(np, "frombuffer", lambda *a, **k: np.array(a[0], k["dtype"]).view(Counted))
    (rounds,) = Hindsight(TextSearch(64), {1: DEPTH}).measure([request_of([7] * 1000)]).values()
    assert rounds == ceil((64 + DEPTH) / (1 + DEPTH)) / (64 + DEPTH)
    assert max(sizes) <= 64 * MAX_PLACES


def test_a_request_shows_nothing_before_it_has_as_many_tokens_as_drafts() -> None:
    hindsight = Hindsight(TextSearch(64), {1: DEPTH})
    texts = [request_of([1] * 20, prompt_len=20 - new) for new in (0, DEPTH, DEPTH + 1)]
    assert [bool(hindsight.measure([each])) for each in texts] == [False, False, True]
    texts[-1].draft_limit = 0
    assert not hindsight.measure([texts[-1]])


def options_of(kind: str, tiny_draft: Path, head: Path, **own: Any) -> dict[str, Any]:
    adaptive = {"candidate_steps": [0, 3], "prior_acceptance": 0.05, "probe_time_share": 0.0}
    if kind == "SA":
        return {"speculative_config": SA | {"adaptive": adaptive} | own}
    return one_model(tiny_draft, head, kind, adaptive=adaptive, sa_config={}, **own)


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [None, 0.05])
@pytest.mark.parametrize("kind", ["SA", "eagle3", "draft_target"])
def test_where_texts_repeat_themselves_copied_drafts_start_without_a_probe(
    tiny: Path, tiny_draft: Path, head: Path, kind: str, temperature: float | None
) -> None:
    """Probes have no time, and the first rounds have no drafts."""

    def run(options: dict[str, Any], looks: bool = True) -> tuple[list[LlmRequest], set[Any]]:
        harness = Harness(tiny, **options)
        spec = LlmArgs.from_kwargs(tiny, **options).speculative_config
        times = {0: 1.0, 3: 1.5 if kind == "SA" else 4.0, COPIED: 1.5}
        controller = controller_for(spec, round_times=MeasuredRoundTimes({1: times}))
        parts, seen = harness.parts, set[Any]()
        parts.controller, parts.tier_for = controller, controller.tier_for
        parts.hindsight = parts.hindsight if looks else None
        requests = [harness.submit([i, 2, i], 120, temperature=temperature) for i in range(2)]
        while harness.round():
            seen |= set(controller.state()["slots"]["1"]["steps"].values())
        return requests, seen

    plain = Harness(tiny)
    expected = [plain.submit([i, 2, i], 120, temperature=temperature) for i in range(2)]
    plain.run()
    requests, seen = run(options_of(kind, tiny_draft, head))
    assert seen == {0, 3 if kind == "SA" else "3 copied"}
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    without, seen = run(options_of(kind, tiny_draft, head), looks=False)
    assert seen == {0} and list(map(output_of, without)) == list(map(output_of, expected))


@pytest.mark.parametrize("looks", [True, False])
def test_where_texts_do_not_repeat_themselves_no_probe_of_copied_drafts_is_paid(
    looks: bool,
) -> None:
    controls = AdaptiveController.from_config(
        {"candidate_steps": list(LADDER), "probe_time_share": 0.05},
        round_times=LinearTimes(3.0),
        shapes=DraftShapes.chains(3, copies=True),
    )
    look, asked = {COPIED: 1.0} if looks else {}, list[int]()
    for _ in range(4000):
        asked.append(tier := controls.tier_for(1))
        controls.observe(ObservedRound(1, [0] if tier else [], tier, hindsight=look))
    assert 1 in asked[100:]  # what the network's drafts would bring, looks do not show
    assert (COPIED in asked[100:]) == (not looks)


def test_copied_drafts_that_rounds_refute_are_given_up() -> None:
    controls = controller(draft_ms=2.0, prior_acceptance=0.05, probe_time_share=0.0)
    look, asked = {tier: 1 / (1 + tier) for tier in LADDER if tier}, list[int]()
    for _ in range(4000):
        asked.append(tier := controls.tier_for(1))
        controls.observe(ObservedRound(1, [0] if tier else [], tier, hindsight=look))
    assert 3 in asked[:100] and asked[100:].count(0) > 0.97 * 3900


def test_probes_of_copied_drafts_come_back_when_texts_become_too_short_to_look_at() -> None:
    controls = AdaptiveController.from_config(
        {"candidate_steps": [0, 3], "probe_time_share": 0.05},
        round_times=LinearTimes(3.0),
        shapes=DraftShapes.chains(3, copies=True),
    )
    asked = list[int]()
    for number in range(4000):
        asked.append(tier := controls.tier_for(1))
        look = {COPIED: 1.0} if number < 1000 else {}
        controls.observe(ObservedRound(1, [0] if tier else [], tier, hindsight=look))
    assert COPIED not in asked[100:1000] and COPIED in asked[1000:]


@pytest.mark.parametrize(
    ("spec", "looks"),
    [
        ({"adaptive": {"candidate_steps": [0, 3]}}, True),
        ({}, False),
        ({"adaptive": {"strategy": "ema", "candidate_steps": [1, 3]}}, False),
        ({"adaptive": {"candidate_steps": [0, 3]}, "enable_global_pool": True}, False),
        (
            {
                "adaptive": {"candidate_steps": [0, 3]},
                "synthetic_acceptance_rates": [0.5] * 3,
            },
            False,
        ),
    ],
)
def test_texts_are_looked_at_where_their_own_copies_are_one_choice(
    spec: dict[str, Any], looks: bool
) -> None:
    args = LlmArgs.from_kwargs("zoo:llama", speculative_config=SA | spec)
    assert (hindsight_of(args.speculative_config, (0, 3)) is not None) == looks
