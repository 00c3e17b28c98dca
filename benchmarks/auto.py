"""`speculative_config: auto` next to every example file, on the zoo.

    python -m benchmarks.auto [--quick] [--output result.json]

Speed is counts times times: the rounds that a configuration takes for given texts, by batch size
and by what is drafted, times the shortest of several measurements of such a round, all taken in
turns in one process. So the figures do not depend on what else the machine does. Adaptive
configurations decide by the same times. Texts are those of plain decoding, whatever drafts.

code     held-out code as it is: drafts are seldom right
edits    an edit of the code in the prompt (harness/edited_code.py)
sampled  zoo:llama's own text at temperature 0.8

Prompts of up to 900 tokens, 96 tokens each; adaptive configurations first see as many other texts.
Left out are files whose drafts are those of another file (`max_utilization`, `no_overlap`,
`tensor_parallel`), that give other texts (`rejection_sampling`), or that run the user's code.
Goals: 0.97 of the best file that has the same weights or none, and 0.99 of plain decoding."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.harness.edited_code import replays
from benchmarks.harness.engine import release
from benchmarks.harness.report import ROOT, Options, Row, Subject, main, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.executor import build
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import RoundTimer
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
    "user_provided",
)
OPTIONS = {
    "device": "cpu",
    "max_batch_size": 16,
    "max_num_tokens": 2048,
    "kv_cache_config": {"enable_block_reuse": False, "max_tokens": 32768},
}
AUTO = "auto"
DRAFTS = {"": None, " head": "zoo:llama-eagle3", " P-EAGLE": "zoo:llama-peagle"} | {
    " draft model": "zoo:llama-draft"
}
BATCH_SIZES = (1, 4, 16)
NUM_TEXTS = {1: 4, 4: 8, 16: 16}
MIN_BEST, MIN_PLAIN = 0.97, 0.99
TEMPERATURE = 0.8
Texts = Sequence[tuple[list[int], list[int]]]


@dataclass(frozen=True)
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
    def adapts(self) -> bool:
        spec = self.args.speculative_config
        return spec is not None and spec.adaptive is not None


def configs(*, is_quick: bool) -> list[Config]:
    """Plain decoding of each target first, then the files, then what AUTO stands for."""
    found = []
    for file in sorted((ROOT / "yaml_examples").glob("*.yaml")):
        if file.stem in LEFT_OUT or (is_quick and file.stem not in ("plain", "sa")):
            continue
        target = "zoo:deepseek" if file.stem == "mtp" else "zoo:llama"
        spec = read_options(file).get("speculative_config")
        found.append(_config(file.stem, target, spec))
    for name, draft in list(DRAFTS.items())[: 1 if is_quick else None]:
        spec = {"decoding_type": "AUTO", "speculative_model": draft}
        found.append(_config(f"{AUTO}{name}", "zoo:llama", spec))
    if not is_quick:
        found.append(_config(f"{AUTO} modules", "zoo:deepseek", AUTO))
        found.append(_config("plain of modules", "zoo:deepseek", None))
    return sorted(found, key=lambda config: config.args.speculative_config is not None)


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


def round_times(config: Config) -> Iterator[dict[int, dict[int, float]]]:
    """Seconds by batch size and tier, measured anew each time."""
    executor, plan, runner = built(config.args)
    limits = ContextLimits(plan.max_seq_len, 1 + plan.overshoot)
    timer = RoundTimer(runner, plan.shapes, plan.slots.dummy_slot, plan.device, limits)
    tiers: Any = SimpleNamespace(tiers=sorted({0, *executor.executor.parts.controller.tiers}))
    while True:
        times = timer.measure(tiers, BATCH_SIZES, is_shown=False)
        yield {n: {t: times.round_time(n, t) for t in tiers.tiers} for n in BATCH_SIZES}


def measured(found: Sequence[Config], turns: int) -> dict[str, MeasuredRoundTimes]:
    """The shortest of each kind of round; of plain decoding for all without drafts."""
    timers = {config.name: round_times(config) for config in found}
    best: dict[str, dict[int, dict[int, float]]] = {name: next(t) for name, t in timers.items()}
    for _ in range(turns - 1):
        for name, timer in timers.items():
            for size, row in next(timer).items():
                own = best[name][size]
                own.update({tier: min(own[tier], seconds) for tier, seconds in row.items()})
    return {name: MeasuredRoundTimes(rows) for name, rows in best.items()}


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


class Player:
    """Drafts for texts. Plain decoding is a drafter that is held to no drafts: it observes."""

    def __init__(self, config: Config, texts: Mapping[str, Texts]) -> None:
        args, self._is_plain = config.args, config.args.speculative_config is None
        if self._is_plain:
            spec = {"decoding_type": "SA", "max_draft_len": 1}
            args = LlmArgs(**args.as_options() | {"speculative_config": spec})
        self._texts = {kind: list(own) for kind, own in texts.items()}
        numbered = [prompt + text for own in self._texts.values() for prompt, text in own]
        self._built, self._plan, _ = built(args, dict(enumerate(numbered)))

    def counts(
        self, kind: str, batch_size: int, times: MeasuredRoundTimes, *, adapts: bool
    ) -> Counter[tuple[int, int]]:
        parts = self._built.executor.parts
        controller = AdaptiveController.fixed(0)
        if not self._is_plain:
            controller = self._plan.controller((), times)
        parts.controller = counting = Counting(controller)
        parts.tier_for = controller.tier_for
        requests = self._requests(kind)
        number = min(NUM_TEXTS[batch_size], len(requests) // 2)
        if adapts:
            self._run(requests[number : 2 * number], batch_size)
            counting.rounds.clear()
        self._run(requests[:number], batch_size)
        return counting.rounds

    def _requests(self, kind: str) -> list[LlmRequest]:
        kinds = list(self._texts)
        first = sum(len(self._texts[each]) for each in kinds[: kinds.index(kind)])
        temperature = TEMPERATURE if kind == "sampled" else None
        longest, found = self._built.limits.max_draft_len, []
        for number, (prompt, text) in enumerate(self._texts[kind]):
            params = SamplingParams(
                max_tokens=len(text), temperature=temperature, ignore_eos=True, seed=number
            )
            request = LlmRequest(
                request_id=first + number,
                tokens=list(prompt),
                rules=DecodingRules.from_params(params, vocab_size=1, end_ids=(), encode=None),
                seed=number,
                arrival=number,
                max_tokens=len(text),
                draft_limit=longest,
                counters=DraftCounters(longest),
                draft_pause=RequestPause(self._built.limits.pause_patience),
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


def zoo(options: Options) -> Iterator[Row]:
    found, texts = configs(is_quick=options.quick), all_texts(is_quick=options.quick)
    times = measured(found, 1 if options.quick else 4)
    release()
    for config in found:
        player = Player(config, texts)
        own = times[config.name]
        for kind in texts:
            for size in BATCH_SIZES[: 1 if options.quick else None]:
                rounds = player.counts(kind, size, own, adapts=config.adapts)
                seconds = sum(
                    number * own.round_time(each, tier) for (each, tier), number in rounds.items()
                )
                tiers = Counter[str]()
                for (_, tier), number in rounds.items():
                    tiers[str(player._plan.shapes.name(tier) if tier else 0)] += number
                yield {
                    "config": config.name,
                    "target": config.target,
                    "weights": config.weights,
                    "traffic": kind,
                    "batch_size": size,
                    "seconds": seconds,
                    "rounds": dict(tiers),
                }
        del player
        release()


def zoo_table(rows: Sequence[Row]) -> list[str]:
    """Speed over plain decoding; for AUTO also over the best file of the same weights."""
    cells = list(dict.fromkeys((row["traffic"], row["batch_size"]) for row in rows))
    seconds = {(r["config"], r["traffic"], r["batch_size"]): r["seconds"] for r in rows}
    about = {row["config"]: row for row in rows}
    plain = {row["target"]: name for name, row in about.items() if name.startswith("plain")}
    lines = []
    for name, row in about.items():
        base = [seconds[(plain[row["target"]], *cell)] for cell in cells]
        own = [seconds[(name, *cell)] for cell in cells]
        lines.append([name, *(f"{b / o:.2f}" for b, o in zip(base, own, strict=True))])
        if not name.startswith(AUTO):
            continue
        rivals = [
            other
            for other, its in about.items()
            if its["target"] == row["target"]
            and its["weights"] in (None, row["weights"])
            and not other.startswith(AUTO)
        ]
        shown = []
        for cell, b, o in zip(cells, base, own, strict=True):
            best = min(rivals, key=lambda other: seconds[(other, *cell)])
            ratio = seconds[(best, *cell)] / o
            is_missed = ratio < MIN_BEST or b / o < MIN_PLAIN
            shown.append(f"{ratio:.2f} of {best}" + " missed" * is_missed)
        lines.append([f"{name} / best", *shown])
    return table(("speed / plain", *(f"{kind}, batch {size}" for kind, size in cells)), lines)


SUBJECTS = (Subject("zoo", "AUTO and every example file, by counts times times", zoo, zoo_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
