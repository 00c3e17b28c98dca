"""Random engines and traffic: each request gets the text that it gets alone with plain decoding,
and in the end all slots and pages are free."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import assert_cached_pages_are_whole, spoil_free_pages
from tests.executor.harness import Harness, all_pages_are_back, output_of, user_provided
from tests.executor.hooks import before_launch
from tests.executor.row_rounds import draw_rows, may_have_any_rows
from tests.lossless.cases import Case, assert_same, generate
from tests.lossless.engines import MODES, TREES, engine, tiny_engine
from tests.lossless.oracle import GetOracle
from tllm_spec.config.draft_tree_config import MAX_NODES
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import Logprob, RequestOutput, SpeculativeStats

NUM_DRAWS, MAX_ROUNDS = 15, 1500
USER = ("user_provided", "user_provided_tree")
WINDOWED = ("eagle3", "peagle_two_model", "pard_two_model", "eagle3_two_model_tree")


@pytest.fixture(scope="module")
def combinations_plain(tiny: Path) -> Harness:
    """One request at a time, without overlap and without reuse."""
    options = {"max_batch_size": 1, "disable_overlap_scheduler": True}
    return Harness(tiny, kv_cache_config={"enable_block_reuse": False}, **options)


@dataclass
class Asked:
    """A request, the round in which it comes, and after how many more it is cancelled (None:
    never)."""

    prompt: list[int]
    params: dict[str, Any]
    arrives: int
    cancelled_after: int | None
    draft_limit: int | None

    def submit(self, harness: Harness, **more: Any) -> LlmRequest:
        return harness.submit(self.prompt, **(self.params | more))


class Strict:
    """A logits processor that raises for any text but the one that plain decoding has."""

    def __init__(self) -> None:
        self.prompt_len, self.text = 0, [0]

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        output = tokens[self.prompt_len :]
        if self.prompt_len and output != self.text[: len(output)]:
            raise LookupError("no such text")
        logits[tokens[-1]] -= 2.0
        return logits


def draw_params(random: Random, seed: int) -> dict[str, Any]:
    """How a request is sampled and where it may end; each way for some requests only, so that
    batches are mixed."""
    params: dict[str, Any] = {"seed": seed, "max_tokens": random.choice((1, 2, 5, 13, 20, 20))}
    if random.random() < 0.6:  # at 6 the noise decides, which draft and target share
        params |= {"temperature": random.choice((0.8, 6.0)), "top_k": random.choice((None, 5))}
    if random.random() < 0.2:
        params |= {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    if random.random() < 0.2:
        params |= {
            "logit_bias": {random.randrange(64): 3.0},
            "bad_token_ids": [[random.randrange(64)]],
        }
    if (
        random.random() < 0.1
    ):  # words of two tokens are looked for on the host, which must know all tokens
        params["bad_token_ids"] = [[random.randrange(64), random.randrange(64)] for _ in range(20)]
    if random.random() < 0.1:
        params["logits_processor"] = Strict()
    if random.random() < 0.4:  # ends that no host foresees
        params["stop_token_ids"] = random.sample(range(64), 5)
        params["min_tokens"] = random.randrange(params["max_tokens"] + 1)
    return params | {"logprobs": random.choice((0, 2)) if random.random() < 0.2 else None}


def draw_traffic(random: Random, page_size: int) -> list[Asked]:
    """Prompts share prefixes and often end at or next to the end of a page; some come together,
    some late."""
    shared, asked, arrives = [random.randrange(64) for _ in range(40)], [], 0
    for number in range(random.randrange(4, 14)):
        length = max(1, random.choice((1, page_size, 3 * page_size)) + random.choice((-1, 0, 0, 1)))
        prompt = shared[:length] + [random.randrange(64)] * random.randrange(3)
        leaves = random.choice((None, None, None, 0, 1, 4, 9))
        limit = random.choice((None, None, None, 0, 1))  # of the drafts that this request wants
        asked.append(Asked(prompt, draw_params(random, number), arrives, leaves, limit))
        arrives += random.choice((0, 0, 1, 3))
    return asked


def draw_engine(random: Random, draft_len: int, window: int, page_size: int) -> dict[str, Any]:
    """Little of everything: pages for little more than one request, rounds of few tokens, a small
    batch. window: the rows of the longest drafts."""
    num_tokens = (64 + 4 * (draft_len + 1)) * random.choice((10, 12, 20)) // 10
    policy = random.choice(("MAX_UTILIZATION", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT"))
    return {
        "max_batch_size": random.choice((1, 3, 5)),
        "max_num_tokens": max(window, random.choice((draft_len + 1, 2 * draft_len + 3, 24))),
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": random.random() < 0.3,
        "scheduler_config": {"capacity_scheduler_policy": policy},
        "kv_cache_config": {
            "tokens_per_block": page_size,
            "max_tokens": num_tokens,
            "enable_block_reuse": random.random() < 0.8,
            "enable_partial_reuse": random.random() < 0.7,
        },
    }


def propose(
    random: Random, texts: dict[int, list[int]], draft_len: int, request: LlmRequest
) -> list[int] | None:
    """Some right drafts, perhaps with wrong ones after them; or none."""
    right = texts[request.seed][request.num_output_tokens :][: random.randrange(draft_len + 1)]
    drafts = right + [random.randrange(64)] * random.randrange(2)
    return random.choice((None, drafts[:draft_len], drafts[:draft_len]))


def propose_tree(
    random: Random, texts: dict[int, list[int]], draft_len: int, request: LlmRequest
) -> Any:
    """The same drafts between wrong branches."""
    drafts = propose(random, texts, draft_len, request)
    if drafts is None or random.random() < 0.3:
        return drafts
    branches = [[*drafts[:i], random.randrange(64)] for i in range(len(drafts))]
    return random.sample([drafts, *branches], 1 + len(branches))


def change_draft_len(harness: Harness, random: Random, draft_len: int) -> None:
    """Another draft length in most rounds, 0 for many rounds now and then; within the tokens of a
    round."""
    coming: list[int] = []

    def tier_for(batch_size: int) -> int:
        if not coming:
            coming.extend([random.randrange(draft_len + 1)] * random.choice((1, 1, 3)))
            coming.extend([0] * random.choice((0, 0, 2, 17)))
        rows = harness.executor.scheduler.limits.max_num_tokens // batch_size
        return min(coming.pop(), harness.parts.slots.shapes.tier_within(rows))

    harness.parts.tier_for = tier_for


def serve(harness: Harness, random: Random, asked: list[Asked]) -> list[LlmRequest]:
    """Runs the traffic round by round. The conservation laws hold after each, and free pages hold
    NaN."""
    requests: list[LlmRequest] = []
    for number in range(MAX_ROUNDS):
        for each in asked[len(requests) :]:
            if each.arrives <= number:
                requests.append(each.submit(harness, draft_limit=each.draft_limit))
        for each, request in zip(asked, requests, strict=False):
            if each.cancelled_after is not None and number == each.arrives + each.cancelled_after:
                harness.queue.cancel(request.request_id)
        is_busy = harness.round()
        harness.executor.check_integrity()
        if random.random() < 0.3:
            spoil_free_pages(harness)
        if not is_busy and len(requests) == len(asked):
            return requests
    raise AssertionError("it does not come to an end")


def values_of(logprobs: list[dict[int, Logprob]]) -> list[float]:
    return [each.logprob for entry in logprobs for each in entry.values()]


def assert_as_alone(request: LlmRequest, alone: LlmRequest) -> None:
    text, whole = output_of(request), output_of(alone)
    assert request.error is None and text == whole[: len(text)]
    if request.finish_reason != "cancelled":
        assert len(text) == len(whole)
        assert (request.finish_reason, request.stop_reason) == (
            alone.finish_reason,
            alone.stop_reason,
        )
    assert values_of(request.logprobs) == pytest.approx(
        values_of(alone.logprobs[: len(text)]), abs=1e-3
    )


@pytest.mark.thinned(8)
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_in_random_traffic_each_request_gets_the_text_that_it_gets_alone(
    tiny: Path,
    drafts: tuple[Path, Path],
    combinations_plain: Harness,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = Random(number)
    mode = (*MODES, *USER)[number % (len(MODES) + len(USER))]
    draft_len, page_size = random.choice((1, 2, 3, 5, 7)), random.choice((1, 2, 4, 8))
    asked = draw_traffic(random, page_size)
    alone = [each.submit(combinations_plain) for each in asked]
    combinations_plain.run()
    texts = {request.seed: output_of(request) for request in alone}
    for each, request in zip(asked, alone, strict=True):
        if isinstance(strict := each.params.get("logits_processor"), Strict):
            strict.prompt_len, strict.text = request.prompt_len, output_of(request)
    may_pause = (
        {} if mode == "plain" else {"max_concurrency": 2}
    )  # rounds without drafts are possible
    if mode not in USER:
        window = {"draft_window_size": 3} if mode in WINDOWED else {}
        speculation = tiny_engine(mode, drafts, draft_len, **may_pause, **window)
    elif mode == "user_provided":
        speculation = user_provided(partial(propose, random, texts, draft_len), draft_len)
    else:
        drafter = partial(propose_tree, random, texts, draft_len)
        speculation = user_provided(drafter, draft_len, max_total_draft_tokens=2 * draft_len)
    spec = LlmArgs.from_kwargs(str(tiny), **speculation).speculative_config
    window = 1 if spec is None else spec.shapes.longest.window
    options = draw_engine(random, draft_len, window, page_size)
    harness = Harness(tiny, **(speculation | options))
    if mode != "plain" and random.random() < 0.6:
        change_draft_len(harness, random, draft_len)
    if may_have_any_rows(harness) and random.random() < 0.5:
        draw_rows(harness, monkeypatch)
    for request, expected in zip(serve(harness, random, asked), alone, strict=True):
        assert_as_alone(request, expected)
    assert all_pages_are_back(harness.executor)
    assert_cached_pages_are_whole(harness)


# Draft trees of every width, depth and size give plain decoding's tokens.
#
# Of each width and depth there is a tree with no more drafts than its depth needs, or one of the
# default size, or the largest. Drafters, pages, overlap and what disturbs the requests change from
# one tree to the next.


WIDTHS, DEPTHS = (2, 4, 8), (1, 2, 3, 4, 5, 6)
SETTINGS = ("reuse", "chunks", "preemption")
BATCH_SIZE = 4


@dataclass(frozen=True)
class Run:
    """One engine, and what its requests meet."""

    mode: str
    topk: int
    depth: int
    num_nodes: int
    page_size: int
    setting: str
    overlap: bool

    def __str__(self) -> str:
        rounds = "overlap" if self.overlap else "in_turn"
        tree = f"{self.depth}x{self.topk}-{self.num_nodes}"
        return f"{self.mode}-{tree}-pages_of_{self.page_size}-{self.setting}-{rounds}"


def runs() -> list[Any]:
    found = []
    for number, (topk, depth) in enumerate(product(WIDTHS, DEPTHS)):
        most = min(MAX_NODES, topk + (depth - 1) * topk**2)
        num_nodes = (depth, min(most, topk * depth), most)[(number + number // 6) % 3]
        run = Run(
            f"{TREES[number % len(TREES)]}_tree",
            topk,
            depth,
            num_nodes,
            page_size=(16, 32)[number // 3 % 2],
            setting=SETTINGS[number // 2 % 3],
            overlap=number // 2 % 2 == 0,
        )
        found.append(pytest.param(run, id=str(run)))
    return found


def options_of(run: Run) -> dict[str, Any]:
    window = 1 + run.num_nodes
    # A window may have KV entries of all its drafts after those of the tokens.
    pages = {"tokens_per_block": run.page_size, "max_tokens": 384 + window}
    options: dict[str, Any] = {
        "reuse": {"kv_cache_config": {"tokens_per_block": run.page_size}},
        "chunks": {
            "kv_cache_config": {"tokens_per_block": run.page_size, "enable_block_reuse": False},
            "enable_chunked_prefill": True,
            # With fewer rows than four prompts have together, even for the largest windows.
            "max_num_tokens": min(BATCH_SIZE * window + 10, 200),
        },
        "preemption": {
            "kv_cache_config": pages,
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        },
    }[run.setting]
    speculation = {"dynamic_tree_max_topK": run.topk, "max_total_draft_tokens": run.num_nodes}
    return options | engine(run.mode, run.depth, overlap=run.overlap, **speculation)


def watch_chunks(llm: LLM) -> list[int]:
    """Rows of every prompt chunk that does not end its prompt."""
    rows = list[int]()

    def look(batch: ScheduledBatch) -> None:
        chunks = (each for each in batch.context_requests if not each.is_last_context_chunk)
        rows.extend(request.context_chunk for request in chunks)

    before_launch(llm._executor, look)
    return rows


@pytest.mark.slow  # some trees are in test_equality, and shapes in tests/executor
@pytest.mark.parametrize("run", runs())
def test_a_tree_of_any_shape_gives_plain_decodings_text(
    run: Run, cases: list[Case], plain: list[RequestOutput], oracle: GetOracle
) -> None:
    with LLM("zoo:llama", max_batch_size=BATCH_SIZE, **options_of(run)) as llm:
        if run.setting == "reuse":
            llm.generate([case.prompt[:-20] for case in cases], use_tqdm=False)
        before, chunks = llm._executor.scheduler.num_preemptions, watch_chunks(llm)
        outputs = generate(llm, cases, BATCH_SIZE)
        preempted = llm._executor.scheduler.num_preemptions > before
        llm.check_integrity()
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)
    assert preempted == (run.setting == "preemption") and bool(chunks) == (run.setting == "chunks")
    assert run.setting != "reuse" or all(output.cached_tokens for output in outputs)
    stats = [output.speculative_decoding or SpeculativeStats() for output in outputs]
    total = sum(stats, SpeculativeStats())
    assert total.acceptance_length > (1.0 if run.mode.startswith("ngram") else 1.3)
    assert len(total.per_position_drafted) == run.depth and total.per_position_drafted[-1] > 0
