"""What ends a request while its next round is in flight already: the text ends where plain decoding
ends it, nothing of the round too many is seen, and every page comes back."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.hooks import around_reads, before_launch, rounds_in_flight
from tests.lossless.cases import latest_new_token
from tests.lossless.engines import MODES, tiny_engine
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.rounds.round_reader import LaunchedRound

OUTPUT_LEN = 24
PROMPTS = [[number + 1, 2, 3] for number in range(6)]
DRAFT_LENS = (1, 2, 3, 5, 7)
# A target that drafts for itself has all drafts accepted: rounds of K + 1 tokens, and every end
# lies inside one.
ITSELF = {
    "itself": "draft_target_one_model",
    "itself_two_model": "draft_target",
    "itself_onnxruntime": "draft_target_onnxruntime",
}
QUICK = (
    ("plain", 0),
    ("itself", 3),
    ("itself_two_model", 1),
    ("eagle3", 1),
    ("eagle3_two_model", 3),
)
ENGINES = [
    pytest.param(engine, marks=[] if engine in QUICK else [pytest.mark.slow])
    for engine in (
        ("plain", 0),
        *product(("itself", "itself_two_model", "eagle3", "eagle3_two_model"), DRAFT_LENS),
    )
]
ENGINES += [
    pytest.param(engine, marks=pytest.mark.slow)
    for engine in product(("itself_onnxruntime", "eagle3_onnxruntime"), (1, 3))
]


class Watched(Harness):
    """Counts rounds that a request took part in although it had ended when they were read."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **options)
        self.num_too_many = 0
        around_reads(self.executor, self._count)

    def _count(self, launched: LaunchedRound) -> None:
        self.num_too_many += sum(request.is_finished for request in launched.batch.requests())


@pytest.fixture(scope="module")
def texts(tiny: Path) -> list[list[int]]:
    """Plain decoding's, one request at a time and every round read before the next."""
    harness = Harness(tiny, disable_overlap_scheduler=True)
    found = []
    for number, prompt in enumerate(PROMPTS):
        request = harness.submit(prompt, max_tokens=OUTPUT_LEN, **sampling(number))
        harness.run()
        found.append(output_of(request))
    return found


def sampling(number: int) -> dict[str, Any]:
    return {"temperature": 0.9 if number % 2 else None, "seed": number}


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: f"{engine[0]}-K{engine[1]}")
def harness(
    request: pytest.FixtureRequest, tiny: Path, drafts: tuple[Path, Path]
) -> Iterator[tuple[Watched, int]]:
    mode, draft_len = request.param
    drafts = (tiny, drafts[1]) if mode in ITSELF else drafts
    options = tiny_engine(ITSELF.get(mode, mode), drafts, draft_len)
    harness = Watched(tiny, kv_cache_config={"tokens_per_block": 4}, **options)
    assert harness.parts.max_in_flight == 1
    yield harness, draft_len
    assert all_pages_are_back(harness.executor)


def run_checked(harness: Harness) -> None:
    while harness.round():
        harness.executor.check_integrity()


@pytest.mark.thinned(3)
def test_a_stop_token_anywhere_in_a_run_ends_the_text_there(
    harness: tuple[Watched, int], texts: list[list[int]]
) -> None:
    engine, draft_len = harness
    engine.num_too_many = 0
    places = range(1, 2 * (draft_len + 1) + 1)
    expected, requests = [], []
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        for stop in {latest_new_token(text[: place + 1]) for place in places}:
            params = sampling(number) | {"stop_token_ids": [stop]}
            requests.append(engine.submit(prompt, max_tokens=OUTPUT_LEN, **params))
            expected.append((text[: text.index(stop) + 1], "stop", stop))
    run_checked(engine)
    assert [(output_of(r), r.finish_reason, r.stop_reason) for r in requests] == expected
    assert all(engine.responses[r.request_id][-1].token_ids == output_of(r) for r in requests)
    # Every one that did not stop in the round that reaches max_tokens for certain.
    assert engine.num_too_many >= len(requests) // 2


@pytest.mark.thinned(3)
def test_a_length_limit_anywhere_in_a_run_ends_the_text_there(
    harness: tuple[Watched, int], texts: list[list[int]]
) -> None:
    engine, draft_len = harness
    engine.num_too_many = 0
    limits = range(1, 2 * (draft_len + 1) + 3)
    requests = [
        engine.submit(prompt, max_tokens=limit, **sampling(number))
        for number, prompt in enumerate(PROMPTS)
        for limit in limits
    ]
    run_checked(engine)
    expected = [(text[:limit], "length") for text in texts for limit in limits]
    assert [(output_of(r), r.finish_reason) for r in requests] == expected
    # Where every round adds one token the host knows the last round beforehand, and launches none
    # after it.
    assert (engine.num_too_many > 0) == (draft_len > 0)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", MODES)
def test_host_edits_make_the_loop_read_every_round_before_the_next(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    """A logits processor is given all tokens so far; once its request has ended, rounds overlap
    again."""
    seen: list[int] = []

    def watch(tokens: list[int], logits: Any) -> Any:
        seen.append(len(tokens))
        return logits

    harness = Harness(tiny, **tiny_engine(mode, drafts, 2))
    depths = list[tuple[bool, int]]()

    def look(batch: ScheduledBatch) -> None:
        edited = any(request.rules.needs_host_edits for request in batch.generation_requests)
        depths.append((edited, len(rounds_in_flight(harness.executor))))

    before_launch(harness.executor, look)
    requests = [
        harness.submit([1, 2, 3], max_tokens=8, logits_processor=watch),
        harness.submit([2, 2], 24),
    ]
    harness.run()
    assert set(depths) == {(True, 0), (False, 0), (False, 1)}
    assert [request.num_output_tokens for request in requests] == [8, 24]
    assert set(range(3, 11)) <= set(seen)
