"""From which acceptance on drafting is faster than plain decoding: `tllm-bench break-even`.

Round times are those of `tune`: an adaptive engine measures them at its start. They predict
speedups by the throughput equation of chain drafts that are each accepted with the same probability
a: n = (1 - a^(K+1)) / (1 - a) tokens a round. Runs in turn, as those of `compare`, measure the same
speedups. Their drafts are accepted by chance, so that texts mean nothing and a is known."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.compare import Contestant, run_in_turn
from tllm_spec.bench.dataset import BenchRequest, NormalLengths, synthetic_requests
from tllm_spec.bench.report import total_stats
from tllm_spec.bench.runner import run_requests, sampling_for
from tllm_spec.bench.tune import WITHOUT_LIMITS
from tllm_spec.bench.tune_report import adaptive_options, timed_executor
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig, speculative_config_from
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.draft_length.estimates import by_rank, expected_accepted
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.progress import Progress

if TYPE_CHECKING:
    from tllm_spec.llm import LLM

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
    """Tokens of a round, the target's own included. Raises ValueError outside 0..1 and below 0."""
    if not 0 <= acceptance <= 1 or draft_len < 0:
        raise ValueError(
            f"acceptance = {acceptance} and draft_len = {draft_len}: accepted are 0..1 and "
            "integers of 0 or more"
        )
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


@dataclass(frozen=True)
class Speedup:
    """One line of the table. cost: plain rounds that a round with drafts takes. stats: of the
    measured runs; a drafter may have no draft in some of their rounds."""

    acceptance: float
    draft_len: int
    cost: float
    measured: float
    stats: SpeculativeStats

    @property
    def drafted_share(self) -> float:
        """The share of the measured rounds that had drafts."""
        return max((0, *self.stats.per_position_drafted)) / max(1, self.stats.rounds)

    @property
    def predicted(self) -> float:
        """By the equation, where rounds without drafts are plain ones."""
        share, tokens = self.drafted_share, expected_tokens(self.acceptance, self.draft_len)
        return (1 + share * (tokens - 1)) / (1 + share * (self.cost - 1))

    def to_dict(self) -> dict[str, Any]:
        stats, drafted = self.stats, self.drafted_share * self.stats.rounds
        return {
            "acceptance": self.acceptance,
            "draft_len": self.draft_len,
            "predicted": self.predicted,
            "measured": self.measured,
            # Of rounds with drafts: what chance made of the expected ones.
            "measured_tokens_per_round": (
                1 + (stats.num_emitted_tokens - stats.rounds) / drafted if drafted else None
            ),
            "rounds": stats.rounds,
            "drafted_share": self.drafted_share,
            "least_acceptance": least_acceptance(self.draft_len, self.cost),
            "tokens_per_round": expected_tokens(self.acceptance, self.draft_len),
            "difference": self.measured / self.predicted - 1,
        }


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens that run together."""

    batch_size: int = 1
    input_len: int = 16
    output_len: int = 64
    repeat: int = 3

    @property
    def num_requests(self) -> int:
        """Requests of all runs with drafts and of plain decoding, with a warm-up."""
        return 2 * (1 + self.repeat) * self.batch_size

    def requests(self, vocab_size: int, seed: int) -> list[BenchRequest]:
        inputs, outputs = NormalLengths(self.input_len, 0), NormalLengths(self.output_len, 0)
        return list(synthetic_requests(self.batch_size, inputs, outputs, vocab_size, seed))


class BreakEvenRuns:
    """`model` with the arguments of `LLM`, by `make_llm` (`LLM` itself). At most three engines live
    at a time."""

    def __init__(
        self,
        make_llm: Callable[..., "LLM"],
        model: str,
        arguments: Mapping[str, Any],
        workload: Workload,
    ) -> None:
        """Raises ValueError for arguments without chains of drafts."""
        if not arguments.get("speculative_config"):
            raise ValueError(
                "speculative_config is missing: break-even needs the options of a drafter "
                "(--config x.yaml)"
            )
        if drafter_of(arguments["speculative_config"]).drafts_trees:
            raise ValueError(
                "speculative_config has draft trees, and the equation is for chains; --trees says "
                "which trees are measured, e.g. --trees 4x4/16"
            )
        self._make_llm, self._model = make_llm, model
        self._arguments, self._workload = dict(arguments), workload
        self._own = without_shape(arguments["speculative_config"]) | WITHOUT_LIMITS

    def plain(self) -> "LLM":
        return self._make_llm(self._model, **self._arguments | {"speculative_config": None})

    def drafted(self, acceptance: float, draft_len: int) -> "LLM":
        rates = [acceptance ** (position + 1) for position in range(draft_len)]
        spec = self._own | {"max_draft_len": draft_len, "synthetic_acceptance_rates": rates}
        with _without_line_on_rates():
            return self._make_llm(self._model, **self._arguments | {"speculative_config": spec})

    def round_seconds(self, draft_lens: Sequence[int]) -> tuple[dict[str, Any], dict[int, float]]:
        """Seconds of a plain round, of one that verifies the longest drafts made at no cost, and
        of one with the drafter's; and of rounds with the drafter's, by their length."""
        free = {"decoding_type": "User_Provided", "drafter": FreeDrafts(), **WITHOUT_LIMITS}
        longest = max(draft_lens)
        times, verifying = (
            self._times(spec | {"max_draft_len": longest}, lengths)
            for spec, lengths in ((self._own, draft_lens), (free, [longest]))
        )
        shown = {
            "plain": times[0],
            "free": verifying[longest],
            "drafted": times[longest],
            "draft_len": longest,
        }
        return shown, times

    def _times(self, spec: Mapping[str, Any], draft_lens: Sequence[int]) -> dict[int, float]:
        args = LlmArgs.from_kwargs(self._model, **self._arguments | {"speculative_config": None})
        timed = dict(spec) | {"adaptive": adaptive_options(draft_lens)}
        controller = timed_executor(args, timed).executor.parts.controller
        seconds = controller.round_seconds(self._workload.batch_size)
        return {int(name): each for name, each in seconds.items()}

    def speedups(
        self,
        plain: "LLM",
        pairs: Sequence[tuple[float, int]],
        times: Mapping[int, float],
        bar: Progress,
    ) -> Iterator[Speedup]:
        """bar: counts `num_requests` for each pair."""
        for acceptance, draft_len in pairs:
            with self.drafted(acceptance, draft_len) as drafted:
                name = f"a = {acceptance:g}, K = {draft_len}"
                slow, fast = Contestant("plain", plain), Contestant(name, drafted)
                # Every run has its own luck, the same for both engines; the first one warms up.
                for number in range(1 + self._workload.repeat):
                    vocab_size = plain.model_config.vocab_size
                    requests = self._workload.requests(vocab_size, seed=number)
                    seeds = range(number * len(requests), (number + 1) * len(requests))
                    sampling = [
                        replace(params, seed=seed)
                        for params, seed in zip(sampling_for(requests), seeds, strict=True)
                    ]
                    counted = min(1, number)
                    run_in_turn([slow, fast], requests, sampling, counted, 1 - counted, False, bar)
            speeds = (median(each.output_tokens_per_s) for each in (fast, slow))
            stats = total_stats([output for run in fast.runs for output in run.outputs])
            cost, measured = times[draft_len] / times[0], next(speeds) / next(speeds)
            yield Speedup(acceptance, draft_len, cost, measured, stats)


def drafter_of(spec: Mapping[str, Any]) -> DecodingBaseConfig:
    """Raises ConfigError for a drafter's mistakes."""
    config = speculative_config_from(spec)
    assert isinstance(config, DecodingBaseConfig)
    return config


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


@dataclass(frozen=True)
class ShapeRow:
    """`tokens`: expected of a request's round. `needed`: with which it is as fast as plain
    decoding."""

    shape: str
    drafts: int
    round_ms: float
    tokens: float
    needed: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.tokens / self.needed}


def parse_tree(text: str) -> DraftShape:
    """`5x8/31`: 5 steps, 8 children of a node, 31 drafts. Raises ValueError for anything else."""
    steps, _, rest = text.partition("x")
    topk, _, drafts = rest.partition("/")
    return DraftShape(int(steps), int(drafts), int(topk))


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
    llm: "LLM", trees: Sequence[DraftShape], requests: Sequence[BenchRequest]
) -> list[ShapeRow]:
    """Runs the requests together; the engine has `with_trees`."""
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
        rows.append(ShapeRow(shape.name, shape.num_nodes, times[shape.name], tokens, needed))
    return rows
