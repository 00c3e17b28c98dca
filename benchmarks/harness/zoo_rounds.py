"""Rounds of the example files and of AUTO on the zoo: how long they take, and how many it takes for
given texts. `benchmarks.auto zoo` multiplies the two."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.edited_code import replays
from benchmarks.harness.engine import release
from benchmarks.harness.report import ROOT
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.executor import build
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import RoundTimer
from tllm_spec.executor.graphs import slot_graphs
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.request import DecodingRules, DraftCounters, LlmRequest, RequestPause
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.models.automatic import with_drafter
from tllm_spec.text.tokenizer import load_tokenizer

LEFT_OUT = (
    *("max_utilization", "no_overlap", "tensor_parallel", "rejection_sampling"),
    *("draft_target_onnxruntime", "eagle3_onnxruntime", "plain", "user_provided"),
)
OPTIONS = {
    "device": "cpu",
    "max_batch_size": 16,
    "max_num_tokens": 2048,
    "kv_cache_config": {"max_tokens": 49152},  # of the prompts of one kind of traffic
}
DRAFTS = {
    "AUTO": None,
    "AUTO, EAGLE-3": "zoo:llama-eagle3",
    "AUTO, P-EAGLE": "zoo:llama-peagle",
    "AUTO, draft model": "zoo:llama-draft",
    "AUTO, MTP": None,
}
PLAIN = {"zoo:llama": "plain", "zoo:deepseek": "plain deepseek"}
BATCH_SIZES = (1, 4, 16)
NUM_TEXTS = {1: 4, 4: 8, 16: 16}
TEMPERATURE = 0.8
Texts = Sequence[tuple[list[int], list[int]]]
Each = Callable[..., Iterable[Any]]  # `map`, here or over processes


@dataclass(frozen=True, eq=False)
class Config:
    """`weights`: of the drafts; None: it has none."""

    name: str
    args: LlmArgs

    @property
    def weights(self) -> str | None:
        spec = self.args.speculative_config
        found: str | None = getattr(spec, "speculative_model", None)
        return "modules" if spec is not None and spec.decoding_type == "MTP" else found

    @property
    def target(self) -> str:
        return self.args.model

    @property
    def is_plain(self) -> bool:
        return self.args.speculative_config is None

    @property
    def adapts(self) -> bool:
        spec = self.args.speculative_config
        return spec is not None and spec.adaptive is not None


def configs(names: Sequence[str]) -> list[Config]:
    """Plain decoding of each target first, then the files, then what AUTO stands for. names: of
    those to run besides plain decoding; none: all."""
    found = [_config(name, target, None) for target, name in PLAIN.items()]
    for file in sorted((ROOT / "yaml_examples").glob("*.yaml")):
        target = "zoo:deepseek" if file.stem == "mtp" else "zoo:llama"
        if file.stem not in LEFT_OUT:
            spec = read_options(file).get("speculative_config")
            found.append(_config(file.stem, target, spec))
    for name, draft in DRAFTS.items():
        spec = {"decoding_type": "AUTO", "speculative_model": draft}
        found.append(_config(name, "zoo:deepseek" if "MTP" in name else "zoo:llama", spec))
    chosen = [each for each in found if not names or each.name in names]
    targets = {each.target for each in chosen}
    return [each for each in found if each in chosen or (each.is_plain and each.target in targets)]


def _config(name: str, target: str, spec: Any) -> Config:
    options = OPTIONS | {"model": target, "speculative_config": spec}
    return Config(name, LlmArgs(**with_drafter(target, options)))


def built(args: LlmArgs, texts: Mapping[int, Sequence[int]] | None = None) -> tuple[Any, ...]:
    """An executor, and the plan and the runner that it was made with."""
    made: list[tuple[BuildPlan, RoundRunner]] = []
    with (
        mock.patch.object(build, "time_rounds", lambda *parts: made.append(parts[:2])),
        mock.patch.object(build, "_replayed", lambda plan, engines, texts: engines),
    ):
        found = build.build_executor(
            args, load_tokenizer(args.model), lambda each: None, texts=texts
        )
    found.executor.enter_thread()
    return (found, *made[0])


@contextmanager
def processes(number: int) -> Iterator[Each]:
    """A `map` over so many processes, of one thread each; with 1 it is this process."""
    torch.set_num_threads(1)
    if number == 1:
        yield map
        return
    spawning = get_context("spawn")
    with ProcessPoolExecutor(number, spawning, torch.set_num_threads, (1,)) as pool:
        yield pool.map


# How long rounds take. Other work on the machine slows everything down for a while, so a round is
# compared with plain decoding's of the same batch, timed right before and right after it.

Row = dict[str, float]  # by the name of a tier


class Timed:
    """The rounds of an engine, in seconds of this process."""

    def __init__(self, args: LlmArgs) -> None:
        executor, plan, runner = built(args)
        limits = ContextLimits(plan.max_seq_len, 1 + plan.overshoot)
        self._timer = RoundTimer(runner, plan.shapes, limits)
        self._name = plan.shapes.name
        tiers = sorted({0, *executor.executor.parts.controller.tiers})
        self._controller: Any = SimpleNamespace(tiers=tiers)

    def row(self, batch_size: int) -> Row:
        with mock.patch.object(slot_graphs, "perf_counter", process_time):
            times = self._timer.measure(self._controller, (batch_size,), is_shown=False)
        tiers = self._controller.tiers
        return {str(self._name(tier)): times.round_time(batch_size, tier) for tier in tiers}


def ratios(config: Config, turns: int) -> tuple[Row, dict[str, Row]]:
    """Milliseconds of plain decoding's rounds by batch size, and the configuration's rounds over
    them by batch size and tier: medians of so many turns."""
    plain, own = Timed(_config("plain", config.target, None).args), Timed(config.args)
    plain_ms, found = Row(), dict[str, Row]()
    for size in BATCH_SIZES:
        around, rows = list[float](), list[Row]()
        for _ in range(turns):
            before, row, after = plain.row(size), own.row(size), plain.row(size)
            around.append((before["0"] + after["0"]) / 2)
            rows.append({tier: seconds / around[-1] for tier, seconds in row.items()})
        plain_ms[str(size)] = 1e3 * median(around)
        found[str(size)] = {tier: median(row[tier] for row in rows) for tier in rows[0]}
    return plain_ms, found


@dataclass
class ZooTimes:
    """plain_ms: by target and batch size. ratios: by configuration, batch size and tier."""

    plain_ms: dict[str, Row] = field(default_factory=dict)
    ratios: dict[str, dict[str, Row]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "ZooTimes":
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")

    def add(self, found: Sequence[Config], turns: int, each: Each) -> None:
        """Measures those that it does not have."""
        # AUTO comes last and takes longest: it begins first.
        lacking = [config for config in reversed(found) if config.name not in self.ratios]
        measured = dict(zip(lacking, each(partial(ratios, turns=turns), lacking), strict=True))
        for target in {config.target for config in lacking} - self.plain_ms.keys():
            rows = [ms for config, (ms, _) in measured.items() if config.target == target]
            self.plain_ms[target] = {size: median(row[size] for row in rows) for size in rows[0]}
        self.ratios |= {config.name: own for config, (_, own) in measured.items()}

    def of(self, config: Config, plan: BuildPlan) -> MeasuredRoundTimes:
        """Seconds by tier. Rounds without drafts are plain decoding's."""
        tier_of = {str(plan.shapes.name(tier)): tier for tier in plan.controller().tiers}
        rows: dict[int, dict[int, float]] = {}
        for size, ms in self.plain_ms[config.target].items():
            ratios = {
                tier_of.get(tier, 0): each for tier, each in self.ratios[config.name][size].items()
            }
            rows[int(size)] = {tier: ms / 1e3 * each for tier, each in (ratios | {0: 1.0}).items()}
        return MeasuredRoundTimes(rows)


# How many rounds texts take.


class Counting:
    """A controller that passes everything on to another, and counts its rounds."""

    def __init__(self, inner: AdaptiveController) -> None:
        self._inner, self.rounds = inner, Counter[tuple[int, int]]()

    def observe(self, observed: ObservedRound) -> bool:
        assert observed.verified_tier is not None
        self.rounds[observed.batch_size, observed.verified_tier] += 1
        return self._inner.observe(observed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True)
class Job:
    """A configuration and one kind of traffic."""

    config: Config
    kind: str
    texts: Texts
    times: ZooTimes
    batch_sizes: Sequence[int]


def play(job: Job) -> list[tuple[float, dict[str, int]]]:
    """Seconds, and rounds by the name of their tier, for each batch size."""
    player, found = Player(job), []
    for size in job.batch_sizes:
        counts, names = player.counts(size), Counter[str]()
        seconds = sum(n * player.times.round_time(*key) for key, n in counts.items())
        for (_, tier), number in counts.items():
            names[str(player.plan.shapes.name(tier)) if tier else "0"] += number
        found.append((seconds, dict(names)))
    del player
    release()
    return found


class Player:
    """Drafts for texts. Plain decoding is a drafter that is held to no drafts: it observes."""

    def __init__(self, job: Job) -> None:
        self._job, config = job, job.config
        args = config.args
        if config.is_plain:
            spec = {"decoding_type": "SA", "max_draft_len": 1}
            args = LlmArgs(**args.as_options() | {"speculative_config": spec})
        texts = {number: prompt + text for number, (prompt, text) in enumerate(job.texts)}
        self._built, self.plan, _ = built(args, texts)
        self.times = job.times.of(config, self.plan)

    def counts(self, batch_size: int) -> Counter[tuple[int, int]]:
        """Rounds by batch size and tier."""
        parts, config = self._built.executor.parts, self._job.config
        controller = AdaptiveController.fixed(0)
        if not config.is_plain:
            controller = self.plan.controller((), self.times)
        parts.controller = counting = Counting(controller)
        parts.tier_for = controller.tier_for
        requests = self._requests()
        number = min(NUM_TEXTS[batch_size], len(requests) // 2)
        if config.adapts:
            self._run(requests[number : 2 * number], batch_size)
            counting.rounds.clear()
        self._run(requests[:number], batch_size)
        return counting.rounds

    def _requests(self) -> list[LlmRequest]:
        temperature = TEMPERATURE if self._job.kind == "sampled" else None
        limits, found = self._built.limits, []
        for number, (prompt, text) in enumerate(self._job.texts):
            params = SamplingParams(
                max_tokens=len(text), temperature=temperature, ignore_eos=True, seed=number
            )
            request = LlmRequest(
                request_id=number,
                tokens=list(prompt),
                rules=DecodingRules.from_params(params, vocab_size=1, end_ids=(), encode=None),
                seed=number,
                arrival=number,
                max_tokens=len(text),
                draft_limit=limits.max_draft_len,
                counters=DraftCounters(limits.max_draft_len),
                draft_pause=RequestPause(limits.pause_patience),
            )
            found.append(request)
        return found

    def _run(self, requests: Sequence[LlmRequest], batch_size: int) -> None:
        """As one request ends, the next one joins."""
        waiting, running = list(requests), list[LlmRequest]()
        while waiting or running:
            running = [each for each in running if not each.is_finished]
            while waiting and len(running) < batch_size:
                running.append(waiting.pop(0))
                self._built.queue.put([running[-1]])
            self._built.executor.step()


def all_texts(*, is_quick: bool) -> dict[str, Texts]:
    number, length = (2, 12) if is_quick else (2 * max(NUM_TEXTS.values()), 96)
    found = {kind: replays(kind, number) for kind in ("code", "edits")}
    prompts = [prompt for prompt, _ in found["code"]]
    params = [
        SamplingParams(max_tokens=length, temperature=TEMPERATURE, ignore_eos=True, seed=number)
        for number in range(len(prompts))
    ]
    with LLM("zoo:llama", max_batch_size=16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    own = [list(output.outputs[0].token_ids) for output in outputs]
    found["sampled"] = list(zip(prompts, own, strict=True))
    return {
        kind: [(prompt, text[:length]) for prompt, text in texts] for kind, texts in found.items()
    }
