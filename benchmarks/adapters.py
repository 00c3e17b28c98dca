"""LoRA adapters of rank 16 on all linear layers: what they cost in a round.

    python -m benchmarks.adapters

rounds  milliseconds of a round with overlap, plain and with EAGLE-3 (K = 3, synthetic acceptance):
        of an engine without lora_config; and of one with it, where no request has an adapter, or
        all requests have 1, 8 or 64 different ones; and the ratio over the first

Random prompts; with `--shape llama-8b` random weights. The sides take turns."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.models import open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from benchmarks.rounds import Case
from tllm_spec.adapters.adapter_folder import Adapter, LowRank
from tllm_spec.models.llama import CausalLM

RANK, K = 16, 3
NUMBERS = (1, 8, 64)


def random_pairs(model: CausalLM) -> dict[str, LowRank]:
    """By module of the checkpoint, for a Llama on one device."""
    config, pairs = model.config, {}
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes = {f"self_attn.{name}": each for name, each in shapes.items()}
    shapes |= {"self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden)}
    shapes |= {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for name, (outputs, inputs) in shapes.items():
        pair = LowRank(torch.randn(RANK, inputs) / 100, torch.randn(outputs, RANK) / 100)
        pairs |= {f"model.layers.{i}.{name}": pair for i in range(config.num_layers)}
    return pairs


def load_adapters(engine: Rounds, number: int) -> list[str]:
    """Names of adapters, whose matrices are the same: it takes no other time."""
    slots = engine.executor.parts.adapters
    assert slots is not None
    pairs, names = random_pairs(engine.executor.parts.runner.engine.model), list[str]()
    slots.tables.check(Adapter("", RANK, pairs))
    for index in range(number):
        adapter = Adapter(f"{index:x}", RANK, pairs)
        names.append(slots.add(f"a{index}", "", adapter).name)
    return names


def rounds(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        case = Case(options, models)
        case.prompt_len = 256 if case.is_8b else 32
        case.rounds, case.turns = (48, 3) if case.is_8b else (8, 1)
        sizes = ((1, 8) if options.quick else (1, 8, 64)) if case.is_8b else (1, 2)
        for path, spec in (("plain", None), ("EAGLE-3", models.eagle3(K))):
            bare = case.engine(*sizes, speculative_config=spec)
            lora = {"max_loras": max(sizes), "max_lora_rank": RANK}
            adapted = case.engine(
                *sizes, weights_of=bare, speculative_config=spec, lora_config=lora
            )
            names = load_adapters(adapted, max(sizes))
            for size in sizes:
                yield from _of_batches(case, (bare, adapted), names, size, {"path": path})
            del bare, adapted
            release()


def _of_batches(
    case: Case, engines: tuple[Rounds, Rounds], names: list[str], size: int, about: Row
) -> Iterator[Row]:
    def restarted_ms(engine: Rounds, number: int) -> float:
        own = [names[index % number] for index in range(size)] if number else []
        adapted.executor.parts.runner.engine.use_adapters(False)  # both have one target
        engine.start(size, case.prompt_len, adapters=own)
        return engine.round_ms(case.rounds)

    bare, adapted = engines
    sides = {"no lora_config": partial(restarted_ms, bare, 0)}
    for number in (0, *(each for each in NUMBERS if each <= size)):
        sides[str(number)] = partial(restarted_ms, adapted, number)
    found = in_turns(sides, case.turns)
    for name, values in found.items():
        pairs = zip(values, found["no lora_config"], strict=True)
        ratio, ms = statistics.median(own / free for own, free in pairs), statistics.median(values)
        yield about | {"batch_size": size, "adapters": name, "ms": ms, "ratio": ratio}
    for engine in engines:
        engine.stop()


def ratios(rows: Sequence[Row]) -> list[str]:
    kinds = ("no lora_config", "0", *map(str, NUMBERS))
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        text = f"{row['ms']:.3f} ({row['ratio']:.3f})"
        cells.setdefault((row["path"], row["batch_size"]), {})[row["adapters"]] = text
    lines = [
        (path, str(size), *(own.get(kind, "–") for kind in kinds))
        for (path, size), own in cells.items()
    ]
    return table(("", "batch", *kinds), lines)


SUBJECTS = (Subject("rounds", "Rounds with adapters, ms (over none)", rounds, ratios),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
