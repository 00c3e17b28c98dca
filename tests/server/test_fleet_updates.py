"""The target's weights of several engines: all of them are updated, or none, and all sleep."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.engine_fleet import PARAMS, TARGET, Fleet
from tests.server.engine_thread import ARGS, PROMPT
from tests.server.http_answers import wait_for
from tllm_spec.server.engine_client import EngineClient
from tllm_spec.server.engine_process import with_served_target
from tllm_spec.server.fleet import FleetAdapters, FleetSleep, FleetTarget, ServedWeights, SleepState
from tllm_spec.server.replicas import Replicas


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def update(fleet: Fleet, folder: str, version: str | None = None) -> dict[str, Any]:
    own = folder, version, "target", "retract"
    found: dict[str, Any] = fleet.ask(lambda front: front.update_weights(*own))
    return found


def versions(fleet: Fleet) -> list[tuple[str, str]]:
    return [(each.target_weights.folder, each.target_weights.version) for each in fleet.parts]


def test_all_engines_are_updated_and_one_that_starts_again_has_the_same(fleet: Fleet) -> None:
    before = fleet.texts()
    assert with_served_target(ARGS, fleet.paths) == (ARGS, None)
    assert update(fleet, fleet.target)["version"] == "1"
    assert versions(fleet) == [(fleet.target, "1")] * 2
    after = fleet.texts()
    assert len(set(before)) == len(set(after)) == 1 and before != after
    args, version = with_served_target(ARGS, fleet.paths)
    assert (args.model, args.tokenizer, version) == (fleet.target, ARGS.model, "1")
    assert update(fleet, TARGET)["version"] == "2" and fleet.texts() == before


@pytest.mark.slow
def test_an_engine_that_connects_is_brought_to_what_is_in_force(fleet: Fleet) -> None:
    before, in_force = fleet.texts(), FleetTarget(fleet.paths)
    with in_force.held():
        in_force.write(ServedWeights(fleet.target, "b", TARGET, 1))
    assert fleet.texts() != before  # before it gets a request
    assert versions(fleet) == [(fleet.target, "b")] * 2


def test_an_engine_without_the_weights_in_force_serves_no_more(fleet: Fleet) -> None:
    own = fleet.engines[0].part("target")
    with pytest.raises(ValueError, match="missing"):
        own.keep("missing", "b")
    failure = fleet.engines[0].process._worker.failure
    assert failure is not None and "which all engines serve" in failure


def test_several_engines_pause_and_sleep_together(fleet: Fleet) -> None:
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
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
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


def test_an_engine_that_ends_while_it_joins_a_pause_is_connected_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, errors = EngineClient.step, [RuntimeError("the engine has ended")]

    def end_once(client: EngineClient, *asked: Any) -> dict[str, Any]:
        if errors:
            client._in_loop(client.shutdown)
            raise errors.pop()
        return step(client, *asked)

    fleet.ask(lambda front: front.pause("keep"))
    monkeypatch.setattr(EngineClient, "step", end_once)
    fleet.ask(Replicas.resume)  # of a front that connects to both
    assert not errors and len(set(fleet.texts())) == 1


def test_no_engine_stays_paused_if_one_of_them_cannot_pause(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (each.part("sleep") for each in fleet.engines)

    def fail(mode: str) -> None:
        wait_for(lambda: first.mode == mode)
        raise RuntimeError("not in this engine")

    monkeypatch.setattr(second, "_check", fail)
    for mode in ("keep", "wait"):
        with pytest.raises(RuntimeError, match="not in this engine"):
            fleet.ask(lambda front, mode=mode: front.pause(mode))  # type: ignore[misc] # its own
        assert (first.mode, second.mode) == (None, None)
    monkeypatch.undo()
    assert len(set(fleet.texts())) == 1
    fleet.ask(lambda front: front.pause("keep"))
    assert (first.mode, second.mode) == ("keep", "keep")


@pytest.mark.parametrize("last_before", [None, FleetTarget, FleetSleep, FleetAdapters])
def test_a_pause_that_begins_while_an_engine_is_started_again_is_one_of_this_engine_too(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, last_before: type[Any] | None
) -> None:
    """last_before: has brought the engine to what is in force; None: it has not been started."""

    async def start_again(replicas: Replicas) -> None:
        def pause() -> None:
            while pauses:
                wait_for(lambda: len(replicas.running_engines()) == 1)
                replicas.pause(pauses.pop())

        def settle_and_pause(state: Any, *own: Any) -> None:
            settle(state, *own)
            pause()

        pauses = ["keep"]
        if last_before is not None:
            settle = last_before.settle
            monkeypatch.setattr(last_before, "settle", settle_and_pause)
        at_first = pause if last_before is None else lambda: None
        await asyncio.to_thread(fleet.start_again, 1, at_first)
        await asyncio.to_thread(wait_for, lambda: len(replicas.running_engines()) == 2)

    fleet.use(start_again)
    assert [each.part("sleep").mode for each in fleet.engines] == ["keep", "keep"]
    assert all(each.process._executor.is_paused for each in fleet.engines)


def test_an_engine_that_is_brought_to_a_pause_which_is_about_to_end_cancels_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fleet.engines[1]

    async def resume(replicas: Replicas) -> str | None:
        client, own = replicas.running_engines()[1], engine.part("sleep")
        await asyncio.to_thread(replicas.pause, "wait")
        await asyncio.to_thread(own.resume)
        await asyncio.to_thread(wait_for, lambda: client.pause_mode is None)
        monkeypatch.setattr(engine.process._executor, "step", lambda: False)
        handle = client.submit(PROMPT, PARAMS)
        await asyncio.to_thread(replicas._sleep.settle, client)
        assert own.mode == "wait"
        monkeypatch.undo()
        await asyncio.to_thread(replicas.resume)
        return (await handle).outputs[0].finish_reason

    assert fleet.use(resume) == "length"


def test_a_front_that_connects_to_paused_engines_that_sleep_uses_all_of_them(fleet: Fleet) -> None:
    before = fleet.texts()
    fleet.ask(lambda front: front.pause("wait"))
    fleet.ask(lambda front: front.sleep(1))
    fleet.ask(Replicas.resume)
    fleet.ask(lambda front: front.wake_up(None))
    assert fleet.texts() == before


def test_dropped_weights_come_back_from_the_same_folder_under_the_same_version(
    fleet: Fleet,
) -> None:
    update(fleet, fleet.target, "b")
    before = fleet.texts()
    fleet.ask(lambda front: front.sleep(2))
    fleet.ask(lambda front: front.wake_up(None))
    assert update(fleet, fleet.target, "b")["version"] == "b"
    assert [each.sleep.lacks_weights for each in fleet.parts] == [False, False]
    assert fleet.texts() == before


def test_the_others_have_their_weights_again_if_an_engine_ends_in_a_sleep_that_drops_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        wait_for(lambda: first.sleep.lacks_weights)
        fleet.engines[1].process._worker.fail("the engine has ended")
        raise RuntimeError

    update(fleet, fleet.target, "b")
    before, (first, second) = fleet.texts(), fleet.parts
    monkeypatch.setattr(second.sleep, "begin", end)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        fleet.ask(lambda front: front.sleep(2))
    assert (first.sleep.asleep, first.sleep.lacks_weights) == ([], False)
    fleet.start_again(1)
    assert fleet.texts() == before
    fleet.ask(lambda front: front.sleep(2))
    fleet.ask(lambda front: front.wake_up(None))
    update(fleet, fleet.target)
    assert fleet.texts() == before


def test_no_engine_serves_if_an_update_fails_that_comes_after_a_sleep_which_drops_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        wait_for(lambda: not first.sleep.lacks_weights)
        raise RuntimeError("not in this engine")

    async def errors(replicas: Replicas) -> list[str | None]:
        handles = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
        return [(await each).error for each in handles]

    first, _ = fleet.parts
    fleet.ask(lambda front: front.sleep(2))
    fleet.ask(lambda front: front.wake_up(None))
    monkeypatch.setattr(fleet.engines[1].process._executor, "replace_weights", fail)
    with pytest.raises(RuntimeError, match="not in this engine"):
        update(fleet, fleet.target)
    assert [each.sleep.lacks_weights for each in fleet.parts] == [True, True]
    monkeypatch.undo()
    assert all("has dropped the weights" in str(each) for each in fleet.use(errors))
    update(fleet, fleet.target)
    assert len(set(fleet.texts())) == 1


def test_an_engine_that_connects_during_the_first_change_gets_it(tmp_path: Path) -> None:
    kept = list[Any]()

    class Engine:
        is_running = True

        def resume(self) -> None:
            kept.append("resume")

        def step(self, part: str, step: str, *arguments: Any) -> dict[str, Any]:
            kept.append((part, step, *arguments))
            return {}

    class Changing(FleetSleep):
        @contextmanager
        def held(self) -> Iterator[SleepState]:
            with super().held():  # of another front, which ends its first change
                self.write(SleepState(["weights"], lacks_weights=False))
            with super().held() as served:
                yield served

    engine: Any = Engine()
    Changing(str(tmp_path / "engine")).settle(engine)
    assert kept == ["resume", ("sleep", "keep", ["weights"], False, None)]


@pytest.mark.parametrize(
    ("level", "tags"),
    [(1, []), pytest.param(2, ["weights"], marks=pytest.mark.slow)],
)
def test_an_engine_that_is_started_while_the_others_sleep_sleeps_too(
    fleet: Fleet, level: int, tags: list[str]
) -> None:
    def states() -> list[dict[str, Any]]:
        return [each.sleep.state() for each in fleet.parts]

    async def sleep(replicas: Replicas) -> None:
        await asyncio.to_thread(replicas.sleep, level)
        await asyncio.to_thread(replicas.wake_up, tags)

    async def wake(replicas: Replicas) -> list[str]:
        await asyncio.to_thread(wait_for, lambda: states() == before)
        if level == 2:
            own = fleet.target, "b", "target", "retract"
            await asyncio.to_thread(replicas.update_weights, *own)
        await asyncio.to_thread(replicas.wake_up, None)
        handles = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
        return [(await handle).outputs[0].text for handle in handles]

    fleet.use(sleep)
    before = states()
    assert before[0]["asleep"] == sorted({"weights", "kv_cache"} - {*tags})
    # As one that has just been started.
    sleeping = fleet.parts[1].sleep
    fleet.engines[1].part("sleep").wake_up(None)
    sleeping.note_target()
    assert states()[1]["asleep"] == [] and states() != before
    assert len(set(fleet.use(wake))) == 1
    assert [each["asleep"] for each in states()] == [[], []]
    assert len(set(fleet.texts())) == 1, "what connects later changes nothing"
    assert [each["lacks_weights"] for each in states()] == [False, False]
