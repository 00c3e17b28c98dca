"""What a decoding round costs by how it is run. Every engine of a table takes turns with the one
that it is compared with.

    python -m benchmarks.rounds [launch] [zero_drafts] [sampling_params] [deterministic]

launch           CUDA graph or not, overlap or not, one-model or two-model EAGLE-3
zero_drafts      an engine with a drafter at draft length 0, over one without speculation
sampling_params  one request with parameters that the round's graph does not cover, over greedy
deterministic    `deterministic: true` over the default

Random prompts; with `--shape llama-8b` random weights and synthetic acceptance."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, number, table

K = 3
PARAMS: Mapping[str, dict[str, Any]] = {
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},  # the round's graph covers these
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "logit_bias": {"logit_bias": {7: 2.0}},
}
NEVER = {"draft_len_schedule": {1: 0}}


class Case:
    """Sizes of a run, and engines that fit them. `turns`: those that count."""

    def __init__(self, options: Options, models: Models) -> None:
        self.models, self.is_8b = models, models.is_8b
        self.batch_sizes = (1, 8, 64) if self.is_8b else (1, 2)
        self.prompt_len = 1024 if self.is_8b else 48
        self.rounds, self.turns = (60, 3) if self.is_8b else (4, 2)
        if options.quick:
            self.batch_sizes, self.turns = self.batch_sizes[:1], 1
            self.rounds = min(20, self.rounds)

    def engine(self, batch_size: int, **options: Any) -> Rounds:
        """Filled with requests, and with room for all turns."""
        speculates = bool(options.get("speculative_config"))
        room = (40 + (self.turns + 2) * 2 * self.rounds) * (1 + K * speculates)
        engine = Rounds(
            self.models.target,
            max_batch_size=batch_size,
            max_seq_len=self.prompt_len + room,
            **(self._options(batch_size, self.prompt_len + room) | options),
        )
        engine.start(batch_size, self.prompt_len)
        return engine

    def compare(self, engines: Mapping[str, Rounds]) -> dict[str, float]:
        """Median milliseconds of a round."""
        sides = {name: partial(each.round_ms, self.rounds) for name, each in engines.items()}
        return {name: statistics.median(v) for name, v in in_turns(sides, self.turns).items()}

    def restarted_ms(self, engine: Rounds, params: dict[str, Any]) -> float:
        engine.start(len(engine.requests), self.prompt_len, **params)
        return engine.round_ms(self.rounds)

    def _options(self, batch_size: int, max_seq_len: int) -> dict[str, Any]:
        """A bounded KV cache, because several engines are alive at a time."""
        tokens = (batch_size + 1) * (max_seq_len + 100)
        kv_cache = {"enable_block_reuse": False, "max_tokens": tokens}
        return self.models.options | {"kv_cache_config": kv_cache}


def cases(measure: Callable[[Case], Iterator[Row]]) -> Callable[[Options], Iterator[Row]]:
    def run(options: Options) -> Iterator[Row]:
        with open_models(options.shape, options.device) as models:
            for row in measure(Case(options, models)):
                yield row
                release()

    return run


def launch(case: Case) -> Iterator[Row]:
    eagle3 = {"speculative_config": case.models.eagle3(K)}
    two_model = {"speculative_config": case.models.eagle3(K, eagle3_one_model=False)}
    eager, serial = {"cuda_graph_config": None}, {"disable_overlap_scheduler": True}
    for batch_size in case.batch_sizes[:2]:
        for path, options in (("plain", {}), ("EAGLE-3", eagle3), ("EAGLE-3 two-model", two_model)):
            for how, more in (("graph, overlap", {}), ("graph", serial), ("eager, overlap", eager)):
                ms = case.compare({how: case.engine(batch_size, **options, **more)})[how]
                yield {"path": path, "batch_size": batch_size, "how": how, "ms": ms}
                release()


def zero_drafts(case: Case) -> Iterator[Row]:
    models = case.models
    configs = {
        "EAGLE-3": models.eagle3(K, **NEVER),
        "EAGLE-3 two-model": models.eagle3(K, eagle3_one_model=False, **NEVER),
        "Draft/Target one-model": models.draft_target(K, draft_target_one_model=True, **NEVER),
        "Draft/Target": models.draft_target(K, **NEVER),
        "NGram": {"decoding_type": "NGram", "max_draft_len": K, **NEVER},
    }
    for batch_size in case.batch_sizes:
        for drafter, config in configs.items():
            drafting = case.engine(batch_size, speculative_config=config)
            plain = case.engine(batch_size, weights_of=drafting)
            found = case.compare({"plain": plain, "zero": drafting})
            ratio = found["zero"] / found["plain"]
            yield {"path": drafter, "batch_size": batch_size, "ms": found["plain"], "ratio": ratio}
            del drafting, plain
            release()


def sampling_params(case: Case) -> Iterator[Row]:
    """The same engine with new requests, the last of which has the parameters or not."""
    for batch_size in sorted({case.batch_sizes[0], case.batch_sizes[-1]}):
        for path, config in (("plain", None), ("EAGLE-3", case.models.eagle3(K))):
            engine = case.engine(batch_size, speculative_config=config)
            for name, params in PARAMS.items():
                sides = {
                    "greedy": partial(case.restarted_ms, engine, {}),
                    "with": partial(case.restarted_ms, engine, params),
                }
                found = in_turns(sides, case.turns)
                pairs = zip(found["with"], found["greedy"], strict=True)
                yield {
                    "path": path,
                    "batch_size": batch_size,
                    "params": name,
                    "ms": statistics.median(found["greedy"]),
                    "ratio": statistics.median(own / greedy for own, greedy in pairs),
                }
            del engine


def deterministic(case: Case) -> Iterator[Row]:
    for path, config in (("plain", None), ("EAGLE-3", case.models.eagle3(K))):
        for batch_size in case.batch_sizes:
            engines = {
                name: case.engine(batch_size, speculative_config=config, deterministic=name == "on")
                for name in ("off", "on")
            }
            found = case.compare(engines)
            ratio = found["on"] / found["off"]
            yield {"path": path, "batch_size": batch_size, "ms": found["off"], "ratio": ratio}
            del engines
            release()


def ratios(name: str) -> Callable[[Sequence[Row]], list[str]]:
    return lambda rows: pivot(rows, (name,), lambda row: f"{row['ratio']:.3f}")


def pivot(rows: Sequence[Row], names: Sequence[str], cell: Callable[[Row], str]) -> list[str]:
    """One column per batch size, and per path where that is not a name of the rows."""

    def column(row: Row) -> str:
        path = "" if "path" in names else f"{row['path']}, "
        return f"{path}batch {row['batch_size']}"

    columns = list(dict.fromkeys(map(column, rows)))
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        found[", ".join(row[name] for name in names)][column(row)] = cell(row)
    lines = [[key, *(own.get(each, "–") for each in columns)] for key, own in found.items()]
    return table(("", *columns), lines)


SUBJECTS = (
    Subject(
        "launch",
        "ms of a round by graph, overlap and path",
        cases(launch),
        lambda rows: pivot(rows, ("path", "how"), lambda row: number(row["ms"])),
        needs_cuda=True,
    ),
    Subject(
        "zero_drafts", "Draft length 0 over plain decoding", cases(zero_drafts), ratios("path")
    ),
    Subject(
        "sampling_params",
        "Sampling parameters over greedy",
        cases(sampling_params),
        ratios("params"),
    ),
    Subject(
        "deterministic",
        "`deterministic: true` over default",
        cases(deterministic),
        ratios("path"),
        needs_cuda=True,
    ),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
