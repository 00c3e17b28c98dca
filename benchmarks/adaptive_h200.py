"""Adaptive draft lengths on one GPU: round times, steady cells and moving traffic, in one engine.

    python -m benchmarks.adaptive_h200 [--quick] [--time-limit 440] [--output result.json]
    python -m benchmarks.adaptive_h200 --batch-sizes 4,16,32          # steady cells of these only
    python -m benchmarks.adaptive_h200 --shape zoo --device cpu --quick    # shows that it runs

The model has the shape of an 8B Llama in bf16 with random weights and a one-model EAGLE-3 head.
Decoding is greedy after prompts of 512 random tokens. Acceptance is scripted: every draft is
accepted with the same probability, given that those before it were. A static draft length is the
same engine with the same graphs, held to that length. Times are measured; tokens are counted by
their expectation from the drafts that each round verified.

- Steady cells, batch size x acceptance: each begins with a controller that knows only the round
  times of start-up. Static lengths play before and after it in mirrored order, so that growing
  contexts affect both alike. Untimed rounds come first, because a busy GPU lowers its clock.
- Moving traffic (the simulator's): every policy and every static length plays each phase for the
  same time with new requests, in rotating order. A policy keeps its controller. Prompts are not
  timed. The presets' draft lengths are clipped to the longest one here.

The exit status is 1 if a bar is missed or the time limit left parts out; both are named.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.adaptive_tables import (
    COST_MODEL,
    LADDER,
    Cell,
    Found,
    Phase,
    RoundTimes,
    cells_table,
    misses,
    times_table,
    traffic_table,
)
from benchmarks.harness.forced_rounds import Block, ForcedRounds
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.simulator import Traffic, bursts, phases
from tllm_spec.bench.report import machine_section
from tllm_spec.config.adaptive_config import PRESETS
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

ACCEPTANCES = (0.2, 0.4, 0.6, 0.8, 0.9)
# Below this acceptance the best length is often 0, the decision that takes longest.
SLOW_BELOW = 0.5
STEADY_SHARE = 0.6  # of the time limit, after which no steady cell begins


@dataclass(frozen=True)
class Sizes:
    """Numbers of rounds are per block. `batch_sizes` are measured in this order."""

    batch_sizes: tuple[int, ...] = (1, 8, 64, 128, 4, 16, 32)
    acceptances: tuple[float, ...] = ACCEPTANCES
    prompt_len: int = 512
    traffic_prompt_len: int = 256
    room: int = 2304  # tokens that a request may have after its prompt
    plain_rounds: int = 32  # four blocks each of plain decoding and of draft length 0
    table_rounds: int = 12  # two blocks of each draft length
    settling_rounds: int = 60  # before the adaptive block; doubled below SLOW_BELOW
    adaptive_rounds: int = 80
    traffic_moves: bool = True
    static_rounds: int = 24  # one block before and one after the adaptive block
    untimed_rounds: int = 8  # before each static block

    def quick(self) -> "Sizes":
        return replace(self, batch_sizes=self.batch_sizes[:4], settling_rounds=40, plain_rounds=16)


ZOO = Sizes(
    batch_sizes=(1, 4, 2),
    acceptances=(0.2, 0.9),
    prompt_len=32,
    traffic_prompt_len=32,
    room=480,
    plain_rounds=4,
    table_rounds=2,
    settling_rounds=4,
    adaptive_rounds=8,
    static_rounds=2,
    untimed_rounds=2,
)


class Measurement:
    """Holds two engines on the same weights, so that plain decoding and draft length 0 take
    turns."""

    def __init__(
        self, setup: Models, sizes: Sizes, time_limit_s: float, phase_seconds: float
    ) -> None:
        self._sizes, self._phase_seconds = sizes, phase_seconds
        self._began, self._time_limit_s = time.perf_counter(), time_limit_s
        self.found = Found()
        adaptive = {"candidate_steps": list(LADDER)}
        config = setup.eagle3(LADDER[-1], adaptive=adaptive)
        self._rounds = _engine(setup, sizes, sizes.room, speculative_config=config)
        self._say("EAGLE-3 engine is built")
        own_room = 4 * sizes.plain_rounds + 64
        self._plain = _engine(setup, sizes, own_room, weights_of=self._rounds)
        self._say("plain engine is built")
        self._fresh = self._rounds.executor.parts.controller
        self._static = {length: AdaptiveController.fixed(length) for length in LADDER}

    def run(self) -> None:
        for batch_size in self._sizes.batch_sizes:
            if self._is_over(STEADY_SHARE, f"batch size {batch_size}"):
                continue
            self._rounds.start(batch_size, self._sizes.prompt_len)
            self.found.times.append(self._round_times(batch_size))
            for acceptance in self._sizes.acceptances:
                if not self._is_over(
                    STEADY_SHARE, f"batch size {batch_size}, acceptance {acceptance}"
                ):
                    self.found.cells.append(self._cell(batch_size, acceptance))
        if not self._sizes.traffic_moves:
            return
        seconds = self._phase_seconds
        for name, traffic, number in (
            ("phases", phases(seconds), 4),
            ("bursts", bursts(seconds), 6),
        ):
            self._traffic(name, traffic, number)

    def _round_times(self, batch_size: int) -> RoundTimes:
        """No draft is accepted, so contexts grow by one token in every round."""
        rounds, sizes = self._rounds, self._sizes
        rounds.set_acceptance(0.0)
        self._plain.start(batch_size, sizes.prompt_len)
        plain, zero = Block(), Block()
        for engines in ((self._plain, rounds), (rounds, self._plain)) * 2:
            for engine in engines:
                block = plain if engine is self._plain else zero
                block += engine.play(self._static[0], rounds=sizes.plain_rounds)
        self._plain.stop()
        by_draft_len = {
            length: block.round_ms for length, block in self._blocks(sizes.table_rounds).items()
        }
        row = RoundTimes(
            batch_size, plain.round_ms, zero.round_ms, by_draft_len, self._of_dummies(batch_size)
        )
        self._say(
            f"batch {batch_size}: plain {row.plain:.3f} ms, {_listed(by_draft_len, '.3f')} ms"
        )
        return row

    @torch.inference_mode()
    def _of_dummies(self, batch_size: int) -> dict[int, float]:
        """Milliseconds by draft length, with dummy requests as at start-up."""
        parts = self._rounds.executor.parts
        # Replays would overwrite the results of a round in flight.
        self._rounds.executor._complete_rounds(0)
        place = len(parts.slots.kv_lens) - 1, parts.slots.device
        keys = {length: GraphKey(batch_size, chain_of(length), False) for length in LADDER}
        return {length: parts.runner.seconds(key, *place) * 1e3 for length, key in keys.items()}

    def _blocks(self, number: int) -> dict[int, Block]:
        """Every static length twice, in mirrored order."""
        blocks = {length: Block() for length in LADDER}
        for length in (*LADDER, *reversed(LADDER)):
            blocks[length] += self._rounds.play(self._static[length], rounds=number)
        return blocks

    def _cell(self, batch_size: int, acceptance: float) -> Cell:
        rounds, sizes = self._rounds, self._sizes
        rounds.set_acceptance(acceptance)
        settling_rounds = sizes.settling_rounds * (1 + (acceptance < SLOW_BELOW))
        static_rounds = sizes.untimed_rounds + sizes.static_rounds
        num_rounds = settling_rounds + sizes.adaptive_rounds + 2 * len(LADDER) * static_rounds
        # An average; `play` checks again.
        if not rounds.has_room(num_rounds * (0.3 + 0.7 * acceptance)):
            rounds.refill()
        adaptive = copy.deepcopy(self._fresh)
        settling = rounds.play(adaptive, rounds=settling_rounds)
        static = {length: Block() for length in LADDER}
        played = Block()
        # In the middle, contexts have their average length.
        for length in (*LADDER, None, *reversed(LADDER)):
            if length is None:
                played += rounds.play(adaptive, rounds=sizes.adaptive_rounds)
            else:
                rounds.play(self._static[length], rounds=sizes.untimed_rounds)
                static[length] += rounds.play(self._static[length], rounds=sizes.static_rounds)
        cell = Cell(
            batch_size,
            acceptance,
            {length: block.rate for length, block in static.items()},
            played.rate,
            played.counted / played.seconds,
            settling.rate,
            dict(played.rounds_by_draft_len),
            *_controller_view(adaptive, batch_size),
        )
        self._say(
            f"batch {batch_size}, acceptance {acceptance}: {cell.over_best:.3f} of K={cell.best}; "
            f"{_listed(cell.static)} tok/s; played {cell.rounds_by_draft_len}"
        )
        return cell

    def _traffic(self, name: str, traffic: Traffic, num_phases: int) -> None:
        players: dict[str | int, AdaptiveController] = {COST_MODEL: copy.deepcopy(self._fresh)}
        players |= {preset: _preset(preset, self._sizes.batch_sizes) for preset in PRESETS}
        players |= self._static
        for number in range(num_phases):
            requests = traffic((number + 0.5) * self._phase_seconds)
            batch_size = min(len(requests), max(self._sizes.batch_sizes))
            if not self._is_over(1.0, f"phase {number} of {name}"):
                self.found.phases.append(self._phase(name, batch_size, float(requests[0]), players))
            turned = list(players.items())
            players = dict([*turned[4:], *turned[:4]])

    def _phase(
        self,
        name: str,
        batch_size: int,
        acceptance: float,
        players: Mapping[str | int, AdaptiveController],
    ) -> Phase:
        rounds, played = self._rounds, dict[str | int, Block]()
        rounds.set_acceptance(acceptance)
        for player, controller in players.items():
            rounds.start(batch_size, self._sizes.traffic_prompt_len)
            played[player] = rounds.play(controller, seconds=self._phase_seconds)
        static = {length: played[length].rate for length in LADDER}
        policies = {policy: played[policy].rate for policy in (COST_MODEL, *PRESETS)}
        lengths = dict(played[COST_MODEL].rounds_by_draft_len)
        self._say(
            f"{name}: batch {batch_size}, acceptance {acceptance}: {_listed(static)}; {policies}; "
            f"{lengths}"
        )
        return Phase(name, batch_size, acceptance, static, policies, lengths)

    def _is_over(self, share: float, what: str) -> bool:
        is_over = time.perf_counter() - self._began > share * self._time_limit_s
        if is_over:
            self.found.left_out.append(what)
        return is_over

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._began:6.1f} s | {text}", file=sys.stderr, flush=True)


def _engine(setup: Models, sizes: Sizes, room: int, **options: Any) -> ForcedRounds:
    largest, max_seq_len = max(sizes.batch_sizes), sizes.prompt_len + room
    kv = {"enable_block_reuse": False, "max_tokens": largest * (max_seq_len + 128)}
    own = {"cuda_graph_config": {"batch_sizes": sorted(sizes.batch_sizes)}, "kv_cache_config": kv}
    common = {"max_batch_size": largest, "max_seq_len": max_seq_len}
    return ForcedRounds(setup.target, **(setup.options | own | common | options))


def _preset(name: str, batch_sizes: tuple[int, ...]) -> AdaptiveController:
    """Its draft lengths are clipped to the longest one that has graphs."""

    def shortened(slot: Any) -> Any:
        if not isinstance(slot, Mapping):
            return slot
        return {
            **slot,
            "candidate_steps": [min(steps, LADDER[-1]) for steps in slot["candidate_steps"]],
        }

    config = {key: shortened(value) for key, value in PRESETS[name].items()}
    return AdaptiveController.from_config(config, graph_batch_sizes=batch_sizes)


def _controller_view(
    controller: AdaptiveController, batch_size: int
) -> tuple[dict[str, float], list[str]]:
    """The controller's expected milliseconds by draft length at a batch size, and its switches."""
    state = controller.state()
    switches = state["decisions"]["last"]
    return state["round_ms"].get(str(batch_size), {}), [
        f"{switch['old_steps']} -> {switch['new_steps']}: {switch['reason']}" for switch in switches
    ]


def _listed(by_draft_len: Mapping[int, float], how: str = ".0f") -> str:
    return " ".join(f"{length}: {value:{how}}" for length, value in by_draft_len.items())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four batch sizes, fewer rounds")
    parser.add_argument("--batch-sizes", type=_numbers, help="steady cells of these only")
    parser.add_argument("--shape", choices=("llama-8b", "zoo"), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--time-limit", type=float, default=200.0, help="seconds after which no part begins"
    )
    parser.add_argument(
        "--phase-seconds", type=float, default=1.0, help="of each policy in a phase of traffic"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    sizes = ZOO if args.shape == "zoo" else Sizes()
    sizes = sizes.quick() if args.quick else sizes
    if args.batch_sizes:
        sizes = replace(sizes, batch_sizes=args.batch_sizes, traffic_moves=False)
    with open_models(args.shape, args.device) as models:
        measurement = Measurement(models, sizes, args.time_limit, args.phase_seconds)
        measurement.run()
    found = measurement.found
    tables = [times_table(found.times), cells_table(found.cells), traffic_table(found.phases)]
    print("\n\n".join("\n".join(lines) for lines in tables))
    missed = misses(found)
    print("\n" + "\n".join(missed or ["every bar is met"]))
    if args.output is not None:
        machine = machine_section(args.device)
        result = {
            "shape": args.shape,
            "machine": machine,
            "torch": torch.__version__,
            "missed": missed,
        }
        args.output.write_text(
            json.dumps(result | asdict(found), indent=1) + "\n", encoding="utf-8"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
