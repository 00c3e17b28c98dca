"""For the whole suite: one torch thread, tiny checkpoints, which tests are slow. On small models a
second thread costs more than it computes, most of all when the machine is busy. The process that
hands out tests to others imports nothing heavy."""

import atexit
import gc
import logging
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

# A shell ignores SIGINT for what it starts in the background, and children inherit that: tests of
# Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A worker that came to one of these files last would work alone for long, and one that took some
# tests of them from another would start their server again.
LONGEST = (
    "tests/kernels/test_under_interpreter.py",
    "tests/distributed/test_equality.py",
    "tests/server/test_served_llm.py",
    "tests/server/test_processes.py",
    "tests/server/test_replicas.py",
    "tests/test_docs.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """What collection makes lives as long as the process: the garbage collector need not look at
    it, neither now nor again and again during the tests."""
    if session.config.pluginmanager.has_plugin("dsession"):  # its workers collect
        return (yield)
    import torch
    from hypothesis import settings

    from tests.random_examples import QUARTER

    if "not slow" in session.config.option.markexpr:
        settings.load_profile(QUARTER)

    with suppress(ImportError):  # kernels are compiled for a GPU on other machines, too
        import triton  # noqa: F401 (kernels.dispatch sees that it is loaded)
    torch.set_num_threads(1)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """What is left after a file, such as imported modules, stays, too."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


# Extension modules count what is left at the process's end.
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, Any, Any]:
    mark_slow(items)
    result = yield
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_workers > 1:
        items[:] = longest_first(items, num_workers)
    return result


def longest_first(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """`--dist worksteal` gives each worker as many consecutive tests: those of each begin with its
    share of LONGEST."""
    others = [item for item in items if not item.nodeid.startswith(LONGEST)]
    found = list[pytest.Item]()
    for worker in range(num_workers):
        size = (len(items) - len(found)) // (num_workers - worker)
        own = LONGEST[worker::num_workers]
        longest = [item for item in items if own and item.nodeid.startswith(own)]
        rest = max(0, size - len(longest))
        found, others = found + longest + others[:rest], others[rest:]
    return found + others


def mark_slow(items: list[pytest.Item]) -> None:
    """What LONG_ONLY and the markers `thinned` and `covering` say; under Triton's interpreter, all
    but the first combination of each test's parameters, or of each value that the marker
    `interpreted` names."""
    from tests.kernels.interpreter import INTERPRETED
    from tests.lossless.engines import LONG_ONLY

    grids: dict[str, list[pytest.Function]] = {}  # what is not slow by itself, by its test
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if item.callspec.params.get("mode") in LONG_ONLY:
            item.add_marker(pytest.mark.slow)
        is_left_out = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if item.get_closest_marker("thinned") or not is_left_out:
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    for grid in grids.values():
        quick = [item for item in chosen(grid) if not item.get_closest_marker("slow")]
        if INTERPRETED:
            quick = first_interpreted(quick)
        for item in set(grid).difference(quick):
            item.add_marker(pytest.mark.slow)


def chosen(grid: list[pytest.Function]) -> list[pytest.Function]:
    """The combinations of a test's parameters that `thinned` or `covering` leave: each n-th, or few
    that have each value of each parameter."""
    if (thinned := grid[0].get_closest_marker("thinned")) is not None:
        (step,) = thinned.args or (2,)
        values = {name: list[str]() for name in grid[0].callspec.params}
        places = list[int]()
        for item in grid:
            own = [(values[name], repr(each)) for name, each in item.callspec.params.items()]
            for known, each in own:
                if each not in known:
                    known.append(each)
            places.append(sum(known.index(each) for known, each in own))
        return [item for item, place in zip(grid, places, strict=True) if place % step == 0]
    if grid[0].get_closest_marker("covering") is None:
        return grid
    own_values = {
        item: {(name, repr(each)) for name, each in item.callspec.params.items()} for item in grid
    }
    found = list[pytest.Function]()
    missing = {each for own in own_values.values() for each in own}
    while missing:
        found.append(max(grid, key=lambda item: len(own_values[item] & missing)))
        missing -= own_values[found[-1]]
    return found


def first_interpreted(quick: list[pytest.Function]) -> list[pytest.Function]:
    found: dict[object, pytest.Function] = {}
    others = [item for item in quick if "interpreted" not in item.name]
    for item in quick:
        marker = item.get_closest_marker("interpreted")
        parameter, *values = ("", None) if marker is None else marker.args
        value = item.callspec.params.get(parameter)
        if "interpreted" in item.name and value in values:
            found.setdefault(value, item)
    return [*others, *found.values()]


@pytest.fixture(autouse=True)
def quiet_progress() -> Iterator[None]:
    """A command that runs in a test has its process log lines of progress."""
    yield
    logging.getLogger("tllm_spec.progress").setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def few_timed_rounds() -> Iterator[None]:
    """No test depends on how long rounds take. Without CUDA graphs an adaptive engine would run
    each of a hundred rounds four times at its start, which takes longer than most tests."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("tllm_spec.executor.graphs.slot_graphs.TIMED_RUNS", 1)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 tokens."""
    from tests.executor.tiny_llama import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft model and a head for `tiny`."""
    from tests.lossless.engines import write_tiny_drafts

    return write_tiny_drafts(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def fp8_on_cpu() -> Iterator[Mock]:
    """FP8 weights stay so on CPUs, too. Yields what is asked whether a device multiplies them."""
    from tests.models.fp8_checkpoint import keeping_fp8

    with keeping_fp8() as asked:
        yield asked
