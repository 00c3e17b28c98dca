"""The target's weights of several engines: all of them are updated, or none, and all sleep."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.executor.test_draft_weights import copy_of
from tests.server.engine_thread import ARGS, PROMPT
from tests.server.http_answers import wait_for
from tests.server.test_draft_swaps import PARAMS, Fleet
from tllm_spec.executor.target_weights import TargetWeights
from tllm_spec.server.engine_process import with_served_target
from tllm_spec.server.fleet import ServedWeights, weights_in_force
from tllm_spec.server.replicas import Replicas

FIRST = "zoo:llama"


class TargetFleet(Fleet):
    """other: a checkpoint with other answers than those of `FIRST`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.other = str(copy_of(FIRST, folder / "target", 0.9))

    @property
    def targets(self) -> list[TargetWeights]:
        found = [engine.process._executor.parts.target_weights for engine in self.engines]
        return [each for each in found if each is not None]

    @property
    def versions(self) -> list[tuple[str, str]]:
        return [(each.folder, each.version) for each in self.targets]

    def texts(self) -> list[str]:
        """What each engine answers."""

        async def ask(replicas: Replicas) -> list[str]:
            handles = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
            return [(await handle).outputs[0].text for handle in handles]

        found: list[str] = self.use(ask)
        return found

    def update(self, folder: str, version: str | None = None) -> dict[str, Any]:
        async def ask(replicas: Replicas) -> Any:
            own = folder, version, "target", "retract"
            return await asyncio.to_thread(replicas.update_weights, *own)

        found: dict[str, Any] = self.use(ask)
        return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TargetFleet]:
    fleet = TargetFleet(tmp_path)
    yield fleet
    for engine in fleet.engines:
        engine.close()
        engine.process._executor.check_integrity()


def test_all_engines_are_updated_and_one_that_starts_again_has_the_same(
    fleet: TargetFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fleet.texts()
    assert with_served_target(ARGS, fleet.paths) == (ARGS, None)
    assert fleet.update(fleet.other)["version"] == "1"
    assert fleet.versions == [(fleet.other, "1")] * 2
    after = fleet.texts()
    assert len(set(before)) == len(set(after)) == 1 and before != after
    args, version = with_served_target(ARGS, fleet.paths)
    assert (args.model, args.tokenizer, version) == (fleet.other, ARGS.model, "1")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the executor has died")

    monkeypatch.setattr(fleet.engines[1].process._executor, "replace_weights", fail)
    with pytest.raises(RuntimeError, match="the executor has died"):
        fleet.update(FIRST, "back")
    monkeypatch.undo()
    assert fleet.versions == [(fleet.other, "1")] * 2 and fleet.texts() == after
    assert fleet.update(FIRST)["version"] == "3" and fleet.texts() == before


@pytest.mark.slow
def test_an_engine_that_connects_is_brought_to_what_is_in_force(
    fleet: TargetFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str, part: str) -> None:
        raise ValueError(f"the weights do not fit: {folder}")

    before = fleet.texts()
    monkeypatch.setattr(fleet.targets[1], "stage", refuse)
    with pytest.raises(ValueError, match="do not fit"):
        fleet.update(fleet.other)
    assert fleet.versions == [(FIRST, "default")] * 2 and fleet.texts() == before
    monkeypatch.undo()
    in_force = weights_in_force(fleet.paths[0], "target")
    with in_force.held():
        in_force.write(ServedWeights(fleet.other, "b", FIRST, 1))
    assert fleet.texts() != before  # before it gets a request
    assert fleet.versions == [(fleet.other, "b")] * 2


def test_an_engine_without_the_weights_in_force_serves_no_more(fleet: TargetFleet) -> None:
    update = fleet.engines[0].process.parts["target"]
    with pytest.raises(ValueError, match="missing"):
        update.keep("missing", "b")
    failure = fleet.engines[0].process._worker.failure
    assert failure is not None and "which all engines serve" in failure


def test_several_engines_pause_and_sleep_together(fleet: TargetFleet) -> None:
    async def ask(replicas: Replicas) -> list[str]:
        texts = [(await replicas.submit(PROMPT, PARAMS)).outputs[0].text]
        await asyncio.to_thread(replicas.sleep, 1)
        assert await asyncio.to_thread(lambda: replicas.is_sleeping)
        waiting = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
        await asyncio.to_thread(replicas.pause, "keep")
        await asyncio.to_thread(replicas.wake_up, ["weights", "kv_cache"])
        assert not await asyncio.to_thread(lambda: replicas.is_sleeping)
        assert replicas.pause_mode == "keep" and replicas.num_unfinished == 2
        await asyncio.to_thread(replicas.resume)
        return texts + [(await each).outputs[0].text for each in waiting]

    assert len(set(fleet.use(ask))) == 1


def test_resume_ends_a_pause_of_several_engines_that_waits(
    fleet: TargetFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in fleet.engines:
        monkeypatch.setattr(engine.process._executor, "step", lambda: True)

    async def ask(replicas: Replicas) -> None:
        engines = replicas.running_engines()
        pausing = asyncio.create_task(asyncio.to_thread(replicas.pause, "wait"))
        await asyncio.to_thread(wait_for, lambda: all(each.pause_mode for each in engines))
        await asyncio.to_thread(replicas.resume)
        await pausing
        monkeypatch.undo()
        await asyncio.to_thread(wait_for, lambda: replicas.pause_mode is None)

    fleet.use(ask)
    assert len(set(fleet.texts())) == 1


def test_no_engine_sleeps_if_one_of_them_cannot(
    fleet: TargetFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no host memory is left")

    async def ask(replicas: Replicas) -> None:
        with pytest.raises(RuntimeError, match="no host memory is left"):
            await asyncio.to_thread(replicas.sleep, 1)
        assert not await asyncio.to_thread(lambda: replicas.is_sleeping)

    monkeypatch.setattr(fleet.engines[1].process._executor.parts.sleep, "begin", fail)
    fleet.use(ask)
    assert len(set(fleet.texts())) == 1


@pytest.mark.parametrize(
    ("level", "tags"),
    [(1, []), pytest.param(2, ["weights"], marks=pytest.mark.slow)],
)
def test_an_engine_that_is_started_while_the_others_sleep_sleeps_too(
    fleet: TargetFleet, level: int, tags: list[str]
) -> None:
    def states() -> list[dict[str, Any]]:
        return [each.process._executor.parts.sleep.state() for each in fleet.engines]

    async def sleep(replicas: Replicas) -> None:
        await asyncio.to_thread(replicas.sleep, level)
        await asyncio.to_thread(replicas.wake_up, tags)

    async def wake(replicas: Replicas) -> list[str]:
        await asyncio.to_thread(wait_for, lambda: states() == before)
        if level == 2:
            own = fleet.other, "b", "target", "retract"
            await asyncio.to_thread(replicas.update_weights, *own)
        await asyncio.to_thread(replicas.wake_up, None)
        handles = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
        return [(await handle).outputs[0].text for handle in handles]

    fleet.use(sleep)
    before = states()
    assert before[0]["asleep"] == sorted({"weights", "kv_cache"} - {*tags})
    # As one that has just been started.
    sleeping = fleet.engines[1].process._executor.parts.sleep
    fleet.engines[1].process.parts["sleep"].wake_up(None)
    sleeping.note_target()
    assert states()[1]["asleep"] == [] and states() != before
    assert len(set(fleet.use(wake))) == 1
    assert [each["asleep"] for each in states()] == [[], []]
    assert len(set(fleet.texts())) == 1, "what connects later changes nothing"
    assert [each["lacks_weights"] for each in states()] == [False, False]
