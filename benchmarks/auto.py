"""`speculative_config: auto` next to every example file on the zoo, and next to every draft length
of the same EAGLE-3 head on a GPU.

    python -m benchmarks.auto [zoo] [heads] [--quick] [--configs 'sa;AUTO'] [--batch-sizes 1,8,64]
        [--acceptances 0,0.6] [--lengths 1,3,5,7] [--times times.json] [--processes 14]
        [--output result.json]

zoo: on a CPU, speed is the number of rounds that a configuration takes for given texts, by batch
size and by what is drafted, times what such a round takes. Times are ratios to plain
decoding's round of the same batch, which is timed before and after it: medians of 7 turns, in
seconds of the process. So the figures do not depend on what else the machine does. Rounds without
drafts count as plain decoding's in every configuration; what they took is shown, too: on a CPU each
small operation that keeps what is read later counts, which a GPU hardly notices (`heads`: held).
Adaptive configurations decide by the same times. Texts are those of plain decoding.

--times: a file of round times to read, to which those that it lacks are added. Counts follow from
them: `--times benchmarks/results/auto_times.json` plays what was recorded again.
--processes: configurations are measured and played in so many.

code     held-out code as it is: drafts are seldom right
edits    an edit of the code in the prompt (harness/edited_code.py)
sampled  zoo:llama's own text at temperature 0.8

Prompts of up to 900 tokens, 96 tokens each; adaptive configurations first see as many other texts.
Left out are files whose drafts are those of another file (`max_utilization`, `no_overlap`,
`tensor_parallel`, `*_onnxruntime`), that give other texts (`rejection_sampling`), or that run the
user's code.
Goals: 0.97 of the best file that has the same weights or none, and 0.99 of plain decoding.

heads: 8B shape, bf16, random weights, greedy, scripted acceptance (harness/forced_rounds.py). AUTO
runs its own engine, plain decoding and the lengths two others with the same weights. AUTO is timed
after 200 rounds from start-up's round times, between two blocks of each other side. `held`: rounds
without drafts in its engine, so that what these and what probes cost can be told apart. The same
goals."""

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.forced_rounds import (
    Block,
    ForcedRounds,
    Profile,
    by_rank,
    scripted_candidates,
)
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from benchmarks.harness.zoo_rounds import (
    BATCH_SIZES,
    DRAFTS,
    Job,
    ZooTimes,
    all_texts,
    configs,
    play,
    processes,
)
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.models.automatic import with_drafter

MIN_BEST, MIN_PLAIN = 0.97, 0.99
PIECE_ROUNDS = 48
TURNS = 7  # in which rounds are timed


def zoo(options: Options) -> Iterator[Row]:
    names, file = options.text("configs", ""), options.text("times", "")
    found = configs(names.split(";") if names else ["sa", "AUTO"] if options.quick else ())
    texts = all_texts(is_quick=options.quick)
    times = ZooTimes.read(Path(file)) if file and Path(file).exists() else ZooTimes()
    sizes = BATCH_SIZES[:1] if options.quick else BATCH_SIZES
    jobs = [(config, kind) for config in found for kind in texts]
    plain: dict[tuple[str, str, int], float] = {}
    with processes(int(options.text("processes", "1"))) as each:
        times.add(found, 1 if options.quick else TURNS, each)
        if file:
            times.write(Path(file))
        played = each(play, (Job(config, kind, texts[kind], times, sizes) for config, kind in jobs))
        for (config, kind), outcomes in zip(jobs, played, strict=True):
            for size, (seconds, rounds) in zip(sizes, outcomes, strict=True):
                yield {
                    "config": config.name,
                    "target": config.target,
                    "weights": config.weights,
                    "traffic": kind,
                    "batch_size": size,
                    "speed": plain.setdefault((config.target, kind, size), seconds) / seconds,
                    "rounds": rounds,
                    "without_drafts": times.ratios[config.name][str(size)]["0"],
                }


def zoo_table(rows: Sequence[Row]) -> list[str]:
    """Speed over plain decoding; for AUTO also over the best file of the same weights."""
    cells = list(dict.fromkeys((row["traffic"], row["batch_size"]) for row in rows))
    speeds = {(r["config"], r["traffic"], r["batch_size"]): r["speed"] for r in rows}
    about = {row["config"]: row for row in rows}
    lines = []
    for name, row in about.items():
        own = [speeds[(name, *cell)] for cell in cells]
        by_size = {r["batch_size"]: r["without_drafts"] for r in rows if r["config"] == name}
        without = " / ".join(f"{ratio:.2f}" for ratio in by_size.values())
        lines.append([name, *(f"{speed:.2f}" for speed in own), without])
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
        lines.append([f"{name} / best", *shown, ""])
    titles = (f"{kind}, batch {size}" for kind, size in cells)
    return table(("speed / plain", *titles, "a round without drafts / plain"), lines)


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
    Subject("zoo", "AUTO and every example file", zoo, zoo_table),
    Subject("heads", "AUTO and every length of the same head", heads, heads_table),
)

OWN_OPTIONS = {
    "configs": "",
    "batch_sizes": "1,8,64",
    "times": "",
    "processes": "1",
    "acceptances": "0,0.3,0.6,0.9",
    "lengths": "1,2,3,4,5,6,7",
}

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, **OWN_OPTIONS))
