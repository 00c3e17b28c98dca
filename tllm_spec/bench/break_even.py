"""From which acceptance on drafting is faster than plain decoding: `tllm-bench break-even`.

Round times are those of `tune`: an adaptive engine measures them at its start. They predict
speedups by the throughput equation of chain drafts that are each accepted with the same probability
a: n = (1 - a^(K+1)) / (1 - a) tokens a round. Runs in turn, as those of `compare`, measure the same
speedups. Their drafts are accepted by chance, so that texts mean nothing and a is known."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from tllm_spec.bench.compare import Contestant, run_in_turn
from tllm_spec.bench.dataset import BenchRequest, normal_lengths, synthetic_requests
from tllm_spec.bench.report import total_stats
from tllm_spec.bench.runner import run_requests, sampling_for
from tllm_spec.bench.tune import WITHOUT_LIMITS
from tllm_spec.bench.tune_report import adaptive_options, drafter_of, timed_executor
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.draft_length.estimates import by_rank, expected_accepted
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.progress import Progress, progress

# What says how many drafts a round has.
SHAPE = {
    "max_draft_len",
    "max_total_draft_tokens",
    "use_dynamic_tree",
    "dynamic_tree_max_topK",
    "eagle_choices",
    "synthetic_acceptance_rates",
}


class FreeDrafts(Drafter):
    """Drafts that cost nothing, so that only the target's window takes time."""

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [0] * request.num_drafts_wanted


def expected_tokens(acceptance: float, draft_len: int) -> float:
    """Tokens of a round, the target's own included."""
    return float(sum(acceptance**position for position in range(draft_len + 1)))


def least_acceptance(draft_len: int, cost: float) -> float | None:
    """The acceptance from which on drafting is not slower than plain decoding; None if even 1 is
    not enough. cost: plain rounds that a round with drafts takes."""
    if expected_tokens(1.0, draft_len) < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # halving finds it to the last digit: the tokens rise with the acceptance
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, draft_len) >= cost else (middle, high)
    return high


def speedup_row(
    acceptance: float, draft_len: int, cost: float, measured: float, stats: SpeculativeStats
) -> dict[str, Any]:
    """One line of the table. cost: plain rounds that a round with drafts takes. measured: the
    speedup. stats: of the measured runs; a drafter may have no draft in some of their rounds, which
    are predicted as plain ones."""
    share = max((0, *stats.per_position_drafted)) / max(1, stats.rounds)
    tokens, drafted = expected_tokens(acceptance, draft_len), share * stats.rounds
    predicted = (1 + share * (tokens - 1)) / (1 + share * (cost - 1))
    return {
        "acceptance": acceptance,
        "draft_len": draft_len,
        "predicted": predicted,
        "measured": measured,
        # Of rounds with drafts: what chance made of the expected ones.
        "measured_tokens_per_round": (
            1 + (stats.num_emitted_tokens - stats.rounds) / drafted if drafted else None
        ),
        "rounds": stats.rounds,
        "drafted_share": share,
        "least_acceptance": least_acceptance(draft_len, cost),
        "tokens_per_round": tokens,
        "difference": measured / predicted - 1,
    }


def random_requests(
    vocab_size: int, seed: int, *, batch_size: int, input_len: int, output_len: int
) -> list[BenchRequest]:
    lengths = normal_lengths(input_len, 0), normal_lengths(output_len, 0)
    return list(synthetic_requests(batch_size, *lengths, vocab_size, seed))


def chains_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter of `LLM`'s arguments, for chains of any length. Raises ValueError without one,
    and for draft trees."""
    if not (spec := arguments.get("speculative_config")):
        raise ValueError(
            "speculative_config is missing: break-even needs the options of a drafter "
            "(--config x.yaml)"
        )
    if drafter_of(spec).drafts_trees:
        raise ValueError(
            "speculative_config has draft trees, and the equation is for chains; --trees says "
            "which trees are measured, e.g. --trees 4x4/16"
        )
    return without_shape(spec) | WITHOUT_LIMITS


def with_rates(chains: Mapping[str, Any], acceptance: float, draft_len: int) -> dict[str, Any]:
    rates = [acceptance ** (position + 1) for position in range(draft_len)]
    return {**chains, "max_draft_len": draft_len, "synthetic_acceptance_rates": rates}


def break_even(
    model: str,
    arguments: Mapping[str, Any],
    pairs: Sequence[tuple[float, int]],
    repeat: int,
    **sizes: int,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Seconds of a plain round, of one that verifies the longest drafts made at no cost, and of one
    with the drafter's; and the rows of `speedup_row`. pairs: acceptance and draft length. sizes: of
    `random_requests`. At most three engines live at a time. Raises ValueError as `chains_of`
    does."""
    chains, plainly = chains_of(arguments), {**arguments, "speculative_config": None}
    # Of an engine with drafts and of plain decoding, with a warm-up.
    number = len(pairs) * 2 * (1 + repeat) * sizes["batch_size"]
    rows = []
    with progress("break-even", number, "requests", has_parts=True) as bar:
        bar.begin("round times")
        shown, times = compared_times(LlmArgs.from_kwargs(model, **plainly), chains, pairs, sizes)
        with LLM(model, **plainly) as plain:
            for acceptance, draft_len in pairs:
                spec = with_rates(chains, acceptance, draft_len)
                with _without_line_on_rates():
                    drafted = LLM(model, **{**arguments, "speculative_config": spec})
                slow = Contestant("plain", plain)
                fast = Contestant(f"a = {acceptance:g}, K = {draft_len}", drafted)
                with drafted:
                    run_with_luck([slow, fast], repeat, bar, **sizes)
                speeds = [median(each.output_tokens_per_s) for each in (fast, slow)]
                stats = total_stats([output for run in fast.runs for output in run.outputs])
                cost = times[draft_len] / times[0]
                rows.append(speedup_row(acceptance, draft_len, cost, speeds[0] / speeds[1], stats))
    return shown, rows


def compared_times(
    args: LlmArgs,
    chains: Mapping[str, Any],
    pairs: Sequence[tuple[float, int]],
    sizes: Mapping[str, int],
) -> tuple[dict[str, Any], dict[int, float]]:
    """The seconds that `break_even` shows, and those of rounds by their draft length."""
    free = {"decoding_type": "User_Provided", "drafter": FreeDrafts(), **WITHOUT_LIMITS}
    draft_lens = [draft_len for _, draft_len in pairs]
    longest, found = max(draft_lens), []
    for spec, lengths in ((chains, draft_lens), (free, [longest])):
        timed = {**spec, "max_draft_len": longest, "adaptive": adaptive_options(lengths)}
        controller = timed_executor(args, timed).executor.parts.controller
        seconds = controller.round_seconds(sizes["batch_size"])
        found.append({int(name): each for name, each in seconds.items()})
    times, verifying = found
    shown = {"plain": times[0], "free": verifying[longest], "drafted": times[longest]}
    return {**shown, "draft_len": longest}, times


def run_with_luck(
    contestants: Sequence[Contestant], repeat: int, bar: Progress, **sizes: int
) -> None:
    """Every run has its own luck, the same for both engines; the first one warms up."""
    for number in range(1 + repeat):
        requests = random_requests(contestants[0].llm.model_config.vocab_size, number, **sizes)
        seeds = range(number * len(requests), (number + 1) * len(requests))
        sampling = [
            replace(params, seed=seed)
            for params, seed in zip(sampling_for(requests), seeds, strict=True)
        ]
        counted = min(1, number)
        run_in_turn(contestants, requests, sampling, counted, 1 - counted, False, bar)


def without_shape(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's options, for rounds of another shape."""
    named = drafter_of(spec).with_our_names(spec)
    return {name: value for name, value in named.items() if name not in SHAPE}


@contextmanager
def _without_line_on_rates() -> Iterator[None]:
    """The engine warns of synthetic acceptance, which is this command's own."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("synthetic_acceptance_rates is set")

    log = logging.getLogger("tllm_spec.executor.build")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def with_trees(spec: Mapping[str, Any], trees: Sequence[DraftShape]) -> dict[str, Any]:
    """A drafter's options with these trees to choose from, next to plain decoding and a chain. Half
    of the time may go to probes, so that every rank is seen. Raises ValueError where no
    draft weights make the drafts."""
    if not isinstance(config := drafter_of(spec), DraftTreeDecodingConfig):
        raise ValueError(
            f"--trees is for drafters with draft weights (Draft_Target, Eagle, Eagle3 or MTP), and "
            f"decoding_type is {config.decoding_type}"
        )
    depth = max(tree.depth for tree in trees)
    return {
        **without_shape(spec),
        **WITHOUT_LIMITS,
        "max_draft_len": depth,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": max(tree.topk for tree in trees),
        "max_total_draft_tokens": max(tree.num_nodes for tree in trees),
        "adaptive": adaptive_options([depth], trees) | {"probe_time_share": 1.0},
    }


def measured_shapes(
    llm: LLM, trees: Sequence[DraftShape], requests: Sequence[BenchRequest]
) -> list[dict[str, Any]]:
    """Runs the requests together; the engine has `with_trees`. `tokens`: expected of a request's
    round. `needed`: with which it is as fast as plain decoding."""
    run_requests(llm, requests, sampling_for(requests))
    controller = llm.server_info()["internal_states"][0]["controller"]
    (slot,) = controller["slots"].values()
    sizes = controller["round_ms"]
    times = sizes[min(sizes, key=lambda size: abs(int(size) - len(requests)))]
    shares = [0.0, *slot["further_children"]]
    rates = [by_rank(first, shares) for first in slot["acceptance"]]
    depth = max(tree.depth for tree in trees)
    rows = []
    for shape in (chain_of(0), chain_of(depth), *trees):
        gain = slot["tree_gain"] if shape.is_tree else 1.0
        tokens = 1 + gain * expected_accepted(shape, rates)
        needed = times[shape.name] / times["0"]
        row = {"shape": shape.name, "drafts": shape.num_nodes, "round_ms": times[shape.name]}
        rows.append(row | {"tokens": tokens, "needed": needed, "speedup": tokens / needed})
    return rows
