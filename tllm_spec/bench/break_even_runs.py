"""The throughput equation against the engine: a few round times predict speedups, and runs measure
them.

Drafts are accepted by chance, with the same probability at each position, so that texts mean
nothing and the acceptance is known. Three numbers are measured beforehand, all from real rounds: a
plain round, what the longest window adds to it (drafts that cost nothing), and what each draft adds
to that."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.break_even import BreakEven, expected_tokens
from tllm_spec.bench.draft_lens import difference
from tllm_spec.bench.prepare import NormalLengths, synthetic_requests
from tllm_spec.bench.report import total_stats
from tllm_spec.bench.runner import run_requests, sampling_for
from tllm_spec.config.speculative_config import DecodingBaseConfig, speculative_config_from
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.outputs import SpeculativeStats

if TYPE_CHECKING:
    from tllm_spec.llm import LLM

CALIBRATION_ACCEPTANCE = 0.5
# What would make rounds of another length than the one that is asked for.
WITHOUT_LIMITS = {
    "adaptive": None,
    "draft_len_schedule": None,
    "max_concurrency": None,
    "acceptance_rate_threshold": None,
    "acceptance_rate_window_size": None,
    "max_rejected_rounds": None,
}


# What says how many drafts a round has.
SHAPE = {
    "max_draft_len",
    "max_total_draft_tokens",
    "use_dynamic_tree",
    "dynamic_tree_max_topK",
    "eagle_choices",
    "synthetic_acceptance_rates",
}


def drafter_of(spec: Mapping[str, Any]) -> DecodingBaseConfig:
    """Raises ConfigError for a drafter's mistakes."""
    config = speculative_config_from(spec)
    assert isinstance(config, DecodingBaseConfig)
    return config


def without_shape(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's options, for rounds of another shape."""
    named = drafter_of(spec).with_our_names(spec)
    return {name: value for name, value in named.items() if name not in SHAPE}


class FreeDrafts(Drafter):
    """Drafts that cost nothing, so that only the target's window takes time."""

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [0] * request.num_drafts_wanted


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens that run together."""

    batch_size: int = 1
    input_len: int = 16
    output_len: int = 64
    repeat: int = 3


@dataclass(frozen=True)
class RoundSeconds:
    """A plain round, one with `draft_len` free drafts, and one with as many of the drafter's."""

    plain: float
    free: float
    drafted: float
    draft_len: int

    def model(self, draft_len: int) -> BreakEven:
        """The equation's times: a draft costs the same anywhere, a window in proportion to its
        drafts."""
        draft_time = (self.drafted - self.free) / self.draft_len
        window = self.plain + (self.free - self.plain) * draft_len / self.draft_len
        return BreakEven(draft_time, window, self.plain)


@dataclass(frozen=True)
class Speedup:
    """One line of the table."""

    acceptance: float
    draft_len: int
    predicted: float
    measured: float
    measured_tokens_per_round: float  # what chance made of the expected ones
    rounds: int  # of a request, that the measured figures rest on
    least_acceptance: float | None

    @property
    def difference(self) -> float:
        """By how much the measured speedup differs from the predicted one, as a share of that."""
        return self.measured / self.predicted - 1

    def to_dict(self) -> dict[str, Any]:
        tokens = expected_tokens(self.acceptance, self.draft_len)
        return vars(self) | {"tokens_per_round": tokens, "difference": self.difference}


@dataclass(frozen=True)
class _TimedRun:
    tokens_per_s: float
    stats: SpeculativeStats
    round_seconds: dict[int, float]  # by draft length

    def seconds_of(self, draft_len: int) -> float:
        if draft_len not in self.round_seconds:
            raise ValueError(
                f"no round of a run had {draft_len} drafts: --output_len is too small, or the "
                "drafter found none"
            )
        return self.round_seconds[draft_len]


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


class BreakEvenRuns:
    """`make_llm` is `LLM` with a model. At most three engines live at a time, and take turns."""

    def __init__(
        self, make_llm: Callable[..., "LLM"], arguments: Mapping[str, Any], workload: Workload
    ) -> None:
        """Raises ValueError for arguments without speculation."""
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
        self._make_llm, self._arguments, self._workload = make_llm, dict(arguments), workload

    def plain(self) -> "LLM":
        return self._make_llm(**self._arguments | {"speculative_config": None})

    def drafted(self, acceptance: float, draft_len: int, *, is_free: bool = False) -> "LLM":
        own = {"decoding_type": "User_Provided", "drafter": FreeDrafts()}
        spec = own if is_free else without_shape(self._arguments["speculative_config"])
        rates = [acceptance ** (position + 1) for position in range(draft_len)]
        spec |= WITHOUT_LIMITS | {"max_draft_len": draft_len, "synthetic_acceptance_rates": rates}
        with _without_line_on_rates():
            return self._make_llm(**self._arguments | {"speculative_config": spec})

    def round_seconds(self, plain: "LLM", draft_len: int) -> RoundSeconds:
        with (
            self.drafted(CALIBRATION_ACCEPTANCE, draft_len, is_free=True) as free,
            self.drafted(CALIBRATION_ACCEPTANCE, draft_len) as drafted,
        ):
            runs = self._in_turn(plain, free, drafted)
        engines = zip(runs, (0, draft_len, draft_len), strict=True)
        plain_s, free_s, drafted_s = (
            median(run.seconds_of(length) for run in each) for each, length in engines
        )
        return RoundSeconds(plain_s, free_s, drafted_s, draft_len)

    def speedups(
        self, plain: "LLM", pairs: Sequence[tuple[float, int]], times: RoundSeconds
    ) -> Iterator[Speedup]:
        for acceptance, draft_len in pairs:
            with self.drafted(acceptance, draft_len) as drafted:
                runs = self._in_turn(plain, drafted)
            slow, fast = (median(run.tokens_per_s for run in each) for each in runs)
            stats = sum((run.stats for run in runs[1]), SpeculativeStats())
            model = times.model(draft_len)
            yield Speedup(
                acceptance,
                draft_len,
                predicted=model.speedup(acceptance, draft_len),
                measured=fast / slow,
                measured_tokens_per_round=stats.acceptance_length,
                rounds=stats.rounds,
                least_acceptance=model.least_acceptance(draft_len),
            )

    def _in_turn(self, *llms: "LLM") -> list[list[_TimedRun]]:
        """Each engine's runs; a first one, which warms up, does not count."""
        rounds = [
            [self._run(llm, number) for llm in llms] for number in range(1 + self._workload.repeat)
        ]
        return [list(runs) for runs in zip(*rounds[1:], strict=True)]

    def _run(self, llm: "LLM", number: int) -> _TimedRun:
        """Every run has its own luck, the same for all engines."""
        workload = self._workload
        inputs, outputs = (
            NormalLengths(length, 0) for length in (workload.input_len, workload.output_len)
        )
        vocab_size = llm.model_config.vocab_size
        requests = list(
            synthetic_requests(workload.batch_size, inputs, outputs, vocab_size, seed=number)
        )
        sampling = [
            replace(params, seed=number * workload.batch_size + index)
            for index, params in enumerate(sampling_for(requests))
        ]
        before = llm.server_info()
        run = run_requests(llm, requests, sampling)
        rows = difference(before, llm.server_info())
        seconds = {
            key: row["seconds"] / row["timed_rounds"] for key, row in rows.items() if row["seconds"]
        }
        return _TimedRun(run.output_tokens_per_s, total_stats(run.outputs), seconds)
