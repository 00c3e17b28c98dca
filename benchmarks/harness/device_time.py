"""Time on the device alone: calls in a CUDA graph, and idle gaps between the graphs of a trace."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

Calls = Sequence[Callable[[], object]]
TURNS, TURN_US = 5, 20e3


def graph_of(calls: Calls) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()  # the inputs are made on another stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def call_us(sides: Mapping[str, Calls]) -> dict[str, float]:
    """Microseconds of one call of each side, in a graph of all its calls. The sides take turns of
    about 20 ms; medians."""
    graphs = {name: (graph_of(calls), len(calls)) for name, calls in sides.items()}
    counts = {n: max(1, round(TURN_US / _replay_us(g, 2))) for n, (g, _) in graphs.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(TURNS):
        for name, (graph, number) in graphs.items():
            times[name].append(_replay_us(graph, counts[name]) / number)
    return {name: statistics.median(found) for name, found in times.items()}


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def idle_us(events: Sequence[Mapping[str, Any]], num_rounds: int) -> float:
    """Median microseconds of a round in which nothing runs before and between its graph launches,
    of which all rounds have equally many. Copies count as work."""
    launches = {e["args"]["correlation"] for e in events if e.get("name") == "cudaGraphLaunch"}
    work: list[tuple[float, float]] = []
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((event["ts"], event["ts"] + event["dur"]))
            if event["args"].get("correlation") in launches:
                spans[event["args"]["correlation"]] += work[-1]
    graphs = sorted((min(times), max(times)) for times in spans.values())
    a_round, rest = divmod(len(graphs), num_rounds)
    if rest or not a_round:
        raise RuntimeError(f"{len(graphs)} graph launches in {num_rounds} rounds: none is steady")
    gaps = []
    for (_, end), (start, _) in pairwise(graphs):
        between = [(begin, stop) for begin, stop in work if begin < start and stop > end]
        busy = sum(min(stop, start) - max(begin, end) for begin, stop in between)
        gaps.append(start - end - busy)
    # Round 0 begins with the first launch, so the gap before it is not known.
    whole_rounds = (gaps[a_round * i - 1 :][:a_round] for i in range(1, num_rounds))
    return statistics.median(map(sum, whole_rounds))
