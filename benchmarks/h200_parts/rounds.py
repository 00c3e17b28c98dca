"""Points 1 to 5 as far as rounds are driven one by one: their time, the host's share, the GPU's
idle time, prefill.

Each function without an underscore is one job of `h200.py`."""

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.h200_parts.figures import Figure
from benchmarks.h200_parts.setup import Report, Setup
from benchmarks.harness.device_time import idle_us
from benchmarks.harness.engine import Rounds, release
from benchmarks.harness.models import MATMUL_FLOPS, prefill_flops, read_ms, round_bytes

# All linear layers of the 8B shape by cuBLAS in one graph, measured, for numbers of rows where that
# takes much longer than reading the weights, which is 3.4 ms.
LINEARS_MS = {256: 7.14}
ROUNDS_AROUND_A_PROMPT, DELAYS = 10, 5


def floor_ms(
    batch_size: int, context: float, draft: str | None = None, draft_len: int = 0
) -> float:
    """Reading weights and KV; where LINEARS_MS has an entry, that instead of the weights."""
    num_bytes = round_bytes(batch_size * context, draft, draft_len)
    linears = LINEARS_MS.get(batch_size * (1 + draft_len))
    return read_ms(num_bytes) if linears is None else linears + read_ms(num_bytes - round_bytes(0))


def plain_rounds(setup: Setup, report: Report) -> None:
    scale = setup.scale
    engine = _build(setup, scale.batch_sizes + (scale.large_batch,) * (1 in setup.points))
    for batch_size in scale.batch_sizes:
        engine.start(batch_size, scale.prompt_len)
        if 1 in setup.points:
            report(_round_figure(setup, 1, f"plain round, batch {batch_size}", engine))
    _host(setup, report, "plain", engine)
    if 1 in setup.points:
        engine.start(scale.large_batch, scale.large_prompt_len)
        name = f"plain round, batch {scale.large_batch}, {scale.large_prompt_len} context"
        report(_round_figure(setup, 1, name, engine))
    _idle(setup, report, "plain", engine)


def eagle3_rounds(setup: Setup, report: Report) -> None:
    """The draft length that has goals."""
    k = setup.scale.draft_len
    _drafted(setup, report, f"EAGLE-3 K={k}", setup.models.eagle3(k), "eagle3")


def other_rounds(setup: Setup, report: Report) -> None:
    """Other draft lengths, all drafts in one forward, and one-model Draft/Target."""
    models, sizes, k = setup.models, setup.scale.batch_sizes, setup.scale.draft_len
    most = max(setup.scale.other_draft_lens)
    one_model = models.draft_target(k, draft_target_one_model=True)
    for name, batch_sizes, draft, config in (
        *(
            (f"EAGLE-3 K={other}", sizes[:2], "eagle3", models.eagle3(other))
            for other in setup.scale.other_draft_lens
        ),
        (f"P-EAGLE K={most}", sizes[:2], "peagle", models.peagle(most)),
        (f"Draft/Target one-model K={k}", sizes, "draft", one_model),
    ):
        engine = _build(setup, batch_sizes, speculative_config=config)
        _draft_rounds(setup, report, name, engine, batch_sizes, draft)
        del engine
        release()


def eagle3_two_model(setup: Setup, report: Report) -> None:
    k = setup.scale.draft_len
    config = setup.models.eagle3(k, eagle3_one_model=False)
    _drafted(setup, report, f"EAGLE-3 two-model K={k}", config, "eagle3")


def draft_target_two_model(setup: Setup, report: Report) -> None:
    k = setup.scale.draft_len
    config = setup.models.draft_target(k)
    _drafted(setup, report, f"Draft/Target two-model K={k}", config, "draft")


def ngram(setup: Setup, report: Report) -> None:
    """A drafter on the host: the device is idle while the host reads, drafts and launches."""
    k = setup.scale.draft_len
    _drafted(setup, report, f"NGram K={k}", setup.models.ngram(k), None)


def prefill(setup: Setup, report: Report) -> None:
    """Prompts put into an idle executor, until the last has its first token."""
    scale, models = setup.scale, setup.models
    many = scale.batch_sizes[-1]
    engine = Rounds(
        models.target,
        max_batch_size=many,
        max_seq_len=scale.long_prompt_len + 1,
        **(models.options | {"cuda_graph_config": None}),
    )
    for number, prompt_len in ((many, scale.prompt_len), (1, scale.long_prompt_len)):
        engine.prompts_ms(min(number, 8), prompt_len)  # compiles
        ms = statistics.median(engine.prompts_ms(number, prompt_len) for _ in range(scale.repeats))
        details, floor = {"tok/s": number * prompt_len / ms * 1e3}, None
        if models.is_8b:
            flops = prefill_flops(number, prompt_len)
            floor = flops / MATMUL_FLOPS * 1e3
            details |= {"TFLOP/s": flops / ms / 1e9, "percent of 790": 100 * floor / ms}
        name = f"{number} prompt{'s' * (number > 1)} of {prompt_len}"
        report(Figure(3, name, "ms", ms, floor, details))


def _drafted(
    setup: Setup, report: Report, name: str, config: dict[str, Any], draft: str | None
) -> None:
    """Points 2, 4 and 5."""
    sizes = setup.scale.batch_sizes
    engine = _build(setup, sizes, speculative_config=config)
    _draft_rounds(setup, report, name, engine, sizes, draft)
    _host(setup, report, name, engine)
    _idle(setup, report, name, engine)


def _draft_rounds(
    setup: Setup,
    report: Report,
    name: str,
    engine: Rounds,
    batch_sizes: Iterable[int],
    draft: str | None,
) -> None:
    """The requests of the last batch go on running."""
    for batch_size in batch_sizes:
        engine.start(batch_size, setup.scale.prompt_len)
        if 2 in setup.points:
            report(_round_figure(setup, 2, f"{name} round, batch {batch_size}", engine, draft))


def _build(setup: Setup, sizes: tuple[int, ...], **options: Any) -> Rounds:
    """An engine for those batch sizes, with room for some prompts that join."""
    scale, models = setup.scale, setup.models
    return Rounds(
        models.target,
        max_batch_size=max(sizes) + 8,
        max_seq_len=scale.prompt_len + scale.room * (3 if "speculative_config" in options else 1),
        **(models.options | {"cuda_graph_config": {"batch_sizes": sizes}} | options),
    )


def _round_figure(
    setup: Setup, point: int, name: str, engine: Rounds, draft: str | None = None
) -> Figure:
    """The median of three timings of the requests that run."""
    timings = [engine.timed(setup.scale.rounds) for _ in range(3)]
    timed = sorted(timings, key=lambda each: each.round_ms)[1]
    tokens = statistics.mean(each.tokens_per_round for each in timings)
    batch_size, draft_len = len(engine.requests), engine.built.limits.max_draft_len
    details = {"tok/s": batch_size * tokens / timed.round_ms * 1e3, "context": timed.context}
    if draft_len:
        details["tokens a round"] = tokens
    is_8b = setup.models.is_8b
    floor = floor_ms(batch_size, timed.context, draft, draft_len) if is_8b else None
    return Figure(point, name, "ms", timed.round_ms, floor, details)


def _host(setup: Setup, report: Report, name: str, engine: Rounds) -> None:
    """Point 4's host time and point 5's delay, of the requests that run."""
    where = f"{name}, batch {len(engine.requests)}"
    if 4 in setup.points:
        host = engine.host_time(2 * setup.scale.rounds)
        details = {"p99": host.p99, "of it graph launch": host.launch}
        report(Figure(4, f"host time, {where}", "ms", host.median, details=details))
    if 5 in setup.points:
        report(_delay(setup, where, engine))


def _idle(setup: Setup, report: Report, name: str, engine: Rounds) -> None:
    """Point 4's idle GPU. A job's last part: once a profiler has run in a process, its launches
    stay slower."""
    scale = setup.scale
    if 4 not in setup.points or not engine.has_graphs:
        return
    for batch_size in (scale.batch_sizes[0], scale.batch_sizes[-1]):
        engine.start(batch_size, scale.prompt_len)
        idle = idle_us(engine.traced(scale.rounds), scale.rounds)
        report(Figure(4, f"GPU idle between rounds, {name}, batch {batch_size}", "µs", idle))


def _delay(setup: Setup, where: str, engine: Rounds) -> Figure:
    """How much longer the running requests' rounds take when a prompt joins, over the prompt's
    time alone. They are compared with the rounds before and after, because contexts grow and a
    prompt heats the device."""
    prompt_len, number, delays = setup.scale.prompt_len, ROUNDS_AROUND_A_PROMPT, []
    for _ in range(1 + DELAYS):
        before = engine.round_ms(number)
        engine.put(1, prompt_len, 1)
        disturbed = engine.round_ms(number)
        after = engine.round_ms(number)
        delays.append((disturbed - (before + after) / 2) * number)
    engine.stop()
    alone = [engine.prompts_ms(1, prompt_len) for _ in range(1 + DELAYS)]
    delay, own = statistics.median(delays[1:]), statistics.median(alone[1:])
    details = {"delay ms": delay, "alone ms": own, "tokens of the prompt": float(prompt_len)}
    name = f"a prompt's delay of others / its own time, {where}"
    return Figure(5, name, "x", delay / own, details=details)
