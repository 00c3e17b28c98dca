"""`speculative_config: auto` next to every example file on the zoo, and next to every draft length
of the same EAGLE-3 head on a GPU.

    python -m benchmarks.auto [zoo] [heads] [--quick] [--configs 'sa;AUTO'] [--batch-sizes 1,8,64]
        [--acceptances 0,0.6] [--lengths 1,3,5,7] [--output result.json]

zoo: on a CPU, speed is counts times times: the rounds that a configuration takes for given texts,
by batch size and by what is drafted, times the shortest of several measurements of such a round, in
seconds of the process, all taken in turns. So the figures do not depend on what else the machine
does. Adaptive configurations decide by the same times. Texts are those of plain decoding.

code     held-out code as it is: drafts are seldom right
edits    an edit of the code in the prompt (harness/edited_code.py)
sampled  zoo:llama's own text at temperature 0.8

Prompts of up to 900 tokens, 96 tokens each; adaptive configurations first see as many other texts.
Left out are files whose drafts are those of another file (`max_utilization`, `no_overlap`,
`tensor_parallel`), that give other texts (`rejection_sampling`), or that run the user's code.
Goals: 0.97 of the best file that has the same weights or none, and 0.99 of plain decoding.

heads: 8B shape, bf16, random weights, greedy, scripted acceptance (harness/forced_rounds.py). AUTO
runs its own engine, plain decoding and the lengths two others with the same weights. AUTO is timed
after 200 rounds from start-up's round times, between two blocks of each other side. `held`: rounds
without drafts in its engine, so that what these and what probes cost can be told apart. The same
goals."""

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.edited_code import replays
from benchmarks.harness.engine import release
from benchmarks.harness.forced_rounds import (
    Block,
    ForcedRounds,
    Profile,
    by_rank,
    scripted_candidates,
)
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import ROOT, Options, Row, Subject, main, table
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
    *("plain", "user_provided"),
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
BATCH_SIZES = (1, 4, 16)
NUM_TEXTS = {1: 2, 4: 4, 16: 16}
MIN_BEST, MIN_PLAIN = 0.97, 0.99
PIECE_ROUNDS = 48
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
    def is_plain(self) -> bool:
        return self.args.speculative_config is None

    @property
    def adapts(self) -> bool:
        spec = self.args.speculative_config
        return spec is not None and spec.adaptive is not None


def configs(names: Sequence[str]) -> list[Config]:
    """Plain decoding of each target first, then the files, then what AUTO stands for. names: of
    those to run besides plain decoding; none: all."""
    found = [_config("plain", "zoo:llama", None), _config("plain deepseek", "zoo:deepseek", None)]
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


def round_times(config: Config) -> Iterator[dict[int, dict[int, float]]]:
    """Seconds by batch size and tier, measured anew each time."""
    executor, plan, runner = built(config.args)
    limits = ContextLimits(plan.max_seq_len, 1 + plan.overshoot)
    timer = RoundTimer(runner, plan.shapes, limits)
    tiers: Any = SimpleNamespace(tiers=sorted({0, *executor.executor.parts.controller.tiers}))
    while True:
        with mock.patch.object(slot_graphs, "perf_counter", process_time):
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
        self._built, self.plan, _ = built(args, dict(enumerate(numbered)))

    def counts(
        self, kind: str, batch_size: int, times: MeasuredRoundTimes, *, adapts: bool
    ) -> Counter[tuple[int, int]]:
        parts = self._built.executor.parts
        controller = AdaptiveController.fixed(0)
        if not self._is_plain:
            controller = self.plan.controller((), times)
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
    names = options.text("configs", "")
    found = configs(names.split(";") if names else ["sa", "AUTO"] if options.quick else ())
    texts = all_texts(is_quick=options.quick)
    times = measured(found, 1 if options.quick else 2)
    plain: dict[tuple[str, str, int], float] = {}
    for config in found:
        player, own = Player(config, texts), times[config.name]
        name = player.plan.shapes.name
        for kind, size in product(texts, BATCH_SIZES[: 1 if options.quick else None]):
            rounds, tiers = player.counts(kind, size, own, adapts=config.adapts), Counter[str]()
            seconds = sum(n * own.round_time(*key) for key, n in rounds.items())
            for (_, tier), number in rounds.items():
                tiers[str(name(tier) if tier else 0)] += number
            yield {
                "config": config.name,
                "target": config.target,
                "weights": config.weights,
                "traffic": kind,
                "batch_size": size,
                "speed": plain.setdefault((config.target, kind, size), seconds) / seconds,
                "rounds": dict(tiers),
            }
        del player
        release()


def zoo_table(rows: Sequence[Row]) -> list[str]:
    """Speed over plain decoding; for AUTO also over the best file of the same weights."""
    cells = list(dict.fromkeys((row["traffic"], row["batch_size"]) for row in rows))
    speeds = {(r["config"], r["traffic"], r["batch_size"]): r["speed"] for r in rows}
    about = {row["config"]: row for row in rows}
    lines = []
    for name, row in about.items():
        own = [speeds[(name, *cell)] for cell in cells]
        lines.append([name, *(f"{speed:.2f}" for speed in own)])
        if name not in DRAFTS:
            continue
        rivals = [
            other
            for other, its in about.items()
            if its["target"] == row["target"]
            and its["weights"] in (None, row["weights"])
            and other not in DRAFTS
        ]
        shown = []
        for cell, speed in zip(cells, own, strict=True):
            best = max(rivals, key=lambda other: speeds[(other, *cell)])
            ratio = speed / speeds[(best, *cell)]
            is_missed = ratio < MIN_BEST or speed < MIN_PLAIN
            shown.append(f"{ratio:.2f} of {best}" + " missed" * is_missed)
        lines.append([f"{name} / best", *shown])
    return table(("speed / plain", *(f"{kind}, batch {size}" for kind, size in cells)), lines)


# AUTO next to plain decoding and every draft length of the same head.


@dataclass(frozen=True)
class Chance(Profile):
    """At 0 no child of a node is accepted, whatever its rank."""

    def rates(self, depth: int, topk: int) -> list[tuple[float, ...]]:
        return super().rates(depth, topk) if self.first else [(0.0,) * topk] * depth


class Heads:
    """The engines of all sides. prompt_len, room: tokens of a request, and after its prompt."""

    def __init__(
        self,
        models: Models,
        batch_sizes: Sequence[int],
        prompt_len: int,
        room: int,
        lengths: Sequence[int],
    ) -> None:
        self._models, self._sizes, self._prompt_len = models, batch_sizes, prompt_len
        self._max_seq_len = prompt_len + room
        own = models.eagle3(1)
        spec = {"decoding_type": "AUTO", "speculative_model": own["speculative_model"]}
        chosen = with_drafter(models.target, {"speculative_config": spec})["speculative_config"]
        self.longest = int(chosen["max_draft_len"])
        topk = int(chosen["dynamic_tree_max_topK"])
        rates = [by_rank(0.5, topk)] * self.longest
        self.script = torch.zeros(self.longest, topk, device=models.device)
        with scripted_candidates(self.script):
            auto = own | chosen | {"synthetic_acceptance_rates": rates}
            self.auto = self._engine(script=self.script, speculative_config=auto)
        self.candidates = [0, *(length for length in lengths if length <= self.longest)]
        fixed = models.eagle3(self.longest, adaptive={"candidate_steps": self.candidates})
        self.plain = self.lengths = self._engine(weights_of=self.auto)
        if len(self.candidates) > 1:
            self.lengths = self._engine(weights_of=self.auto, speculative_config=fixed)
        self._fresh = self.auto.executor.parts.controller

    def _engine(self, **options: Any) -> ForcedRounds:
        largest, models = max(self._sizes), self._models
        kv = {"enable_block_reuse": False, "max_tokens": largest * (self._max_seq_len + 256)}
        own = {
            "max_batch_size": largest,
            "max_seq_len": self._max_seq_len,
            "kv_cache_config": kv,
            "cuda_graph_config": {"batch_sizes": list(self._sizes)},
        }
        return ForcedRounds(models.target, **models.options | own | options)

    def cell(self, batch_size: int, acceptance: float, settling: int, rounds: int) -> Row:
        held = {n: AdaptiveController.fixed(n) for n in self.candidates}
        sides = {0: self.plain} | dict.fromkeys(self.candidates[1:], self.lengths)
        for engine in (self.plain, self.lengths, self.auto):
            if engine is not self.plain:
                engine.set_profile(Chance(acceptance))
            engine.start(batch_size, self._prompt_len)
        controller, blocks = copy.deepcopy(self._fresh), {n: Block() for n in sides}
        with scripted_candidates(self.script):
            self.auto.play(controller, rounds=settling)
        own, without = Block(), Block()
        for order in (list(sides), list(reversed(sides))):
            for length in order:
                blocks[length] += self._block(sides[length], held[length], rounds // 4)
            with scripted_candidates(self.script):
                without += self._block(self.auto, held[0], rounds // 4)
                own += self._block(self.auto, controller, rounds)
        name = self.auto.shapes.name
        return {
            "batch_size": batch_size,
            "acceptance": acceptance,
            "rates": {str(length): block.rate for length, block in blocks.items()},
            "ms": {str(length): block.round_ms for length, block in blocks.items()},
            "auto": own.rate,
            "auto_ms": own.round_ms,
            "held_ms": without.round_ms,
            "played": {str(name(tier)): n for tier, n in own.rounds_by_draft_len.items()},
            "controller": controller.state()["slots"],
            "expected_ms": controller.state()["round_ms"].get(str(batch_size), {}),
        }

    @staticmethod
    def _block(engine: ForcedRounds, controller: AdaptiveController, rounds: int) -> Block:
        """Rounds of new requests, in pieces of which all begin with the same contexts: at 64
        requests 100 tokens more make a round 3% longer."""
        block = Block()
        for _ in range(-(-rounds // PIECE_ROUNDS)):
            engine.refill()
            block += engine.play(controller, rounds=min(rounds, PIECE_ROUNDS))
        return block


def heads(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        sizes, room = (options.numbers("batch_sizes"), 2560) if models.is_8b else ([1], 320)
        lengths = options.numbers("lengths")
        found = Heads(models, sizes, 512 if models.is_8b else 32, room, lengths)
        settling, rounds = (200, 192) if models.is_8b else (3, 8)
        acceptances = [float(each) for each in options.text("acceptances", "").split(",")]
        for batch_size in sizes:
            for acceptance in acceptances if models.is_8b else (0.0, 0.9):
                yield found.cell(batch_size, acceptance, settling, rounds)


def heads_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        rates = row["rates"]
        best = max(rates, key=rates.__getitem__)
        of_best, of_plain = row["auto"] / rates[best], row["auto"] / rates["0"]
        is_missed = of_best < MIN_BEST or of_plain < MIN_PLAIN
        played = " ".join(f"{name}: {number}" for name, number in row["played"].items())
        lines.append(
            [
                *(str(row["batch_size"]), str(row["acceptance"])),
                *(f"{rate:,.0f}" for rate in rates.values()),
                *(f"{row['auto']:,.0f}", f"{of_best:.3f} of {best}" + " missed" * is_missed),
                *(f"{of_plain:.3f}", f"{row['ms']['0'] / row['held_ms']:.3f}", played),
            ]
        )
    titles = (
        *("batch", "acceptance", "plain, tok/s", *list(rows[0]["rates"])[1:], "AUTO"),
        *(f"/ best (goal {MIN_BEST})", f"/ plain (goal {MIN_PLAIN})"),
        *("held / plain", "rounds played"),
    )
    return table(titles, lines)


SUBJECTS = (
    Subject("zoo", "AUTO and every example file, by counts times times", zoo, zoo_table),
    Subject("heads", "AUTO and every length of the same head", heads, heads_table),
)

OWN_OPTIONS = {
    "configs": "",
    "batch_sizes": "1,8,64",
    "acceptances": "0,0.3,0.6,0.9",
    "lengths": "1,2,3,4,5,6,7",
}

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, **OWN_OPTIONS))
