"""Points 1 to 5 as far as rounds are driven one by one: their time, the host's share, the GPU's
idle time, prefill.

Each function is one job: it builds its engines, reports figures, and lets go of everything when it
returns."""

import statistics
from typing import Any

from driven_rounds import Rounds, gap_between_launches, release
from h200_figures import Figure
from h200_setup import Report, Setup
from model_shapes import MATMUL_FLOPS, prefill_flops, read_ms, round_bytes

# Of all linears of the 8B shape with so many rows by cuBLAS in one graph, measured, where that is
# far above the time to read their weights, which is 3.4 ms.
LINEARS_MS = {256: 7.14}
ROUNDS_AROUND_A_PROMPT, DELAYS = 10, 5


def plain_rounds(setup: Setup, report: Report) -> None:
    """Points 1, 4 and 5."""
    scale = setup.scale
    sizes = scale.batch_sizes + (scale.large_batch,) * (1 in setup.points)
    rounds = _build(setup, sizes)
    for batch_size in scale.batch_sizes:
        rounds.start(batch_size, scale.prompt_len)
        if 1 in setup.points:
            report(_round_figure(setup, 1, f"plain round, batch {batch_size}", rounds))
    _host(setup, report, "plain", rounds)
    if 1 in setup.points:
        rounds.start(scale.large_batch, scale.large_prompt_len)
        name = f"plain round, batch {scale.large_batch}, {scale.large_prompt_len} context"
        report(_round_figure(setup, 1, name, rounds))
    _traces(setup, report, "plain", rounds)


def floor_ms(
    batch_size: int, context: float, draft: str | None = None, draft_len: int = 0
) -> float:
    """Reading weights and KV; for numbers of rows whose linears take longer than their weights, the
    linears and the other bytes."""
    num_bytes = round_bytes(batch_size * context, draft, draft_len)
    linears = LINEARS_MS.get(batch_size * (1 + draft_len))
    return read_ms(num_bytes) if linears is None else linears + read_ms(num_bytes - round_bytes(0))


def eagle3_rounds(setup: Setup, report: Report) -> None:
    """Points 2, 4 and 5: the draft length that has bars."""
    scale = setup.scale
    name = f"EAGLE-3 K={scale.draft_len}"
    rounds = _build(setup, scale.batch_sizes, speculative_config=setup.eagle3(scale.draft_len))
    for batch_size in scale.batch_sizes:
        rounds.start(batch_size, scale.prompt_len)
        if 2 in setup.points:
            figure = f"{name} round, batch {batch_size}"
            report(_round_figure(setup, 2, figure, rounds, "eagle3"))
    _host(setup, report, name, rounds)
    _traces(setup, report, name, rounds)


def other_rounds(setup: Setup, report: Report) -> None:
    """Point 2: other draft lengths, two-model EAGLE-3, and Draft/Target on both paths."""
    scale = setup.scale
    some, k = scale.batch_sizes[:2], scale.draft_len
    for draft_len in scale.other_draft_lens:
        config = setup.eagle3(draft_len)
        _drafting_rounds(setup, report, f"EAGLE-3 K={draft_len}", some, "eagle3", config)
        release()
    both = [
        ("EAGLE-3 two-model", scale.batch_sizes, "eagle3", setup.eagle3(k, eagle3_one_model=False)),
        ("Draft/Target one-model", scale.batch_sizes, "draft", _one_model(setup, k)),
        ("Draft/Target two-model", some, "draft", setup.draft_target(k)),
    ]
    for name, sizes, draft, config in both:
        _drafting_rounds(setup, report, f"{name} K={k}", sizes, draft, config)
        release()


def _one_model(setup: Setup, draft_len: int) -> dict[str, Any]:
    return setup.draft_target(draft_len, draft_target_one_model=True)


def _drafting_rounds(
    setup: Setup,
    report: Report,
    name: str,
    sizes: tuple[int, ...],
    draft: str,
    config: dict[str, Any],
) -> None:
    rounds = _build(setup, sizes, speculative_config=config)
    for batch_size in sizes:
        rounds.start(batch_size, setup.scale.prompt_len)
        report(_round_figure(setup, 2, f"{name} round, batch {batch_size}", rounds, draft))


def prefill(setup: Setup, report: Report) -> None:
    """Point 3: prompts put to an idle executor, until the last has its first token."""
    scale = setup.scale
    many = scale.batch_sizes[-1]
    rounds = Rounds(
        setup.target,
        max_batch_size=many,
        max_seq_len=scale.long_prompt_len + 1,
        **(setup.options | {"cuda_graph_config": None}),
    )
    for number, prompt_len in ((many, scale.prompt_len), (1, scale.long_prompt_len)):
        rounds.seconds_of_prompts(
            min(number, 8), prompt_len
        )  # kernels of these shapes are there now
        timings = [rounds.seconds_of_prompts(number, prompt_len) for _ in range(scale.repeats)]
        seconds = statistics.median(timings)
        details = {"tok/s": number * prompt_len / seconds}
        floor = None
        if setup.is_8b:
            flops = prefill_flops(number, prompt_len)
            floor = flops / MATMUL_FLOPS * 1e3
            details |= {
                "TFLOP/s": flops / seconds / 1e12,
                "percent of 790": 100 * flops / seconds / MATMUL_FLOPS,
            }
        name = f"{number} prompt{'s' * (number > 1)} of {prompt_len}"
        report(Figure(3, name, "ms", seconds * 1e3, floor, details))


def _build(setup: Setup, sizes: tuple[int, ...], **options: Any) -> Rounds:
    """An engine for those batch sizes, and for some prompts that come beside them."""
    scale = setup.scale
    return Rounds(
        setup.target,
        max_batch_size=max(sizes) + 8,
        max_seq_len=scale.prompt_len + scale.room * (3 if "speculative_config" in options else 1),
        **(setup.options | {"cuda_graph_config": {"batch_sizes": sizes}} | options),
    )


def _round_figure(
    setup: Setup, point: int, name: str, rounds: Rounds, draft: str | None = None
) -> Figure:
    """The median of three timings of the requests that run."""
    timings = [rounds.timed(setup.scale.rounds) for _ in range(3)]
    timed = sorted(timings, key=lambda each: each.round_ms)[1]
    tokens = statistics.mean(each.tokens_a_round for each in timings)
    batch_size = len(rounds.requests)
    details = {"tok/s": batch_size * tokens / timed.round_ms * 1e3, "context": timed.context}
    draft_len = rounds.built.max_draft_len
    if draft_len:
        details["tokens a round"] = tokens
    floor = floor_ms(batch_size, timed.context, draft, draft_len) if setup.is_8b else None
    return Figure(point, name, "ms", timed.round_ms, floor, details)


def _host(setup: Setup, report: Report, name: str, rounds: Rounds) -> None:
    """Of the requests that run: point 4's host time, point 5's delay."""
    where = f"{name}, batch {len(rounds.requests)}"
    if 4 in setup.points:
        host = rounds.host_time(2 * setup.scale.rounds)
        details = {
            "p99": host.p99,
            "of it graph launch": host.launch,
            "100,000 additions in Python": host.additions,
        }
        report(Figure(4, f"host time, {where}", "ms", host.median, details=details))
    if 5 in setup.points:
        report(_delay(setup, where, rounds))


def _traces(setup: Setup, report: Report, name: str, rounds: Rounds) -> None:
    """Point 4's idle GPU, for the smallest and the largest batch. A job's last: once a profiler has
    run in a process, its launches stay slower."""
    scale = setup.scale
    if 4 not in setup.points or rounds.executor.parts.runner.graphs is None:
        return
    for batch_size in (scale.batch_sizes[0], scale.batch_sizes[-1]):
        rounds.start(batch_size, scale.prompt_len)
        gap = gap_between_launches(rounds.traced(scale.traced_rounds))
        report(Figure(4, f"GPU idle between rounds, {name}, batch {batch_size}", "µs", gap))


def _delay(setup: Setup, where: str, rounds: Rounds) -> Figure:
    """How much longer the running requests' next rounds take when a prompt joins, than the rounds
    before and behind these, beside the prompt alone. Contexts grow, and a prompt heats the device:
    both are in the rounds behind."""
    prompt_len, delays = setup.scale.prompt_len, []
    for _ in range(1 + DELAYS):
        before = rounds.timed(ROUNDS_AROUND_A_PROMPT)
        rounds.put(1, prompt_len, 1)
        disturbed = rounds.timed(ROUNDS_AROUND_A_PROMPT)
        behind = rounds.timed(ROUNDS_AROUND_A_PROMPT)
        undisturbed_ms = (before.round_ms + behind.round_ms) / 2
        delays.append((disturbed.round_ms - undisturbed_ms) * ROUNDS_AROUND_A_PROMPT)
    rounds.stop()
    alone = [rounds.seconds_of_prompts(1, prompt_len) * 1e3 for _ in range(1 + DELAYS)]
    delay, own = statistics.median(delays[1:]), statistics.median(alone[1:])
    details = {"delay ms": delay, "alone ms": own, "tokens of the prompt": float(prompt_len)}
    return Figure(
        5, f"a prompt's delay of others / its own time, {where}", "x", delay / own, details=details
    )
