"""Whatever several engines have alike, all of them change it or none: a refusal, a failure and a
front that ends in the middle leave what was before."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.engine_fleet import Fleet, write_adapters
from tests.server.engine_thread import Engine
from tests.server.http_answers import wait_for
from tllm_spec.server.fleet import ServedAdapter
from tllm_spec.server.replicas import Replicas


@dataclass(frozen=True)
class Kind:
    """change: by a front. alone: of one engine, as a front leaves it that is killed. state: what an
    engine serves. stages, serves: the methods of an engine that check what is new, and that serve
    it."""

    change: Callable[[Fleet, Replicas], Any]
    alone: Callable[[Fleet, Engine], Any]
    state: Callable[[Any], Any]
    stages: Callable[[Engine], tuple[object, str]]
    serves: Callable[[Engine], tuple[object, str]]


def executor_of(engine: Engine) -> Any:
    return engine.process._executor


def weights_state(weights: Any) -> tuple[str, Any, float]:
    """The sum tells the weights apart."""
    models = weights._model if isinstance(weights._model, list) else [weights._model]
    tensors = [each.double().abs().sum() for model in models for each in model.parameters()]
    return weights.folder, weights.version, float(sum(tensors))


def load_x(fleet: Fleet, replicas: Replicas) -> ServedAdapter:
    wanted = ServedAdapter.of_folder("x", str(fleet.root / "b"))
    return replicas.adapters.load(wanted, str(fleet.root), replaces=True)


def update_alone(fleet: Fleet, engine: Engine) -> None:
    engine.part("target").stage(fleet.target, "1", "target", "retract")
    engine.part("target").keep(fleet.target, "1")


def swap_alone(fleet: Fleet, engine: Engine) -> None:
    engine.part("draft").stage(fleet.draft, 1, keep_cache=False, force=True)
    engine.part("draft").keep(fleet.draft, 1)


KINDS = {
    "draft": Kind(
        lambda fleet, front: front.load_draft_weights(fleet.draft),
        swap_alone,
        lambda parts: weights_state(parts.draft_weights),
        lambda engine: (executor_of(engine).parts.draft_weights, "stage"),
        lambda engine: (executor_of(engine).parts.draft_weights, "swap"),
    ),
    "target": Kind(
        lambda fleet, front: front.update_weights(fleet.target, None, "target", "retract"),
        update_alone,
        lambda parts: weights_state(parts.target_weights),
        lambda engine: (executor_of(engine).parts.target_weights, "stage"),
        lambda engine: (executor_of(engine), "replace_weights"),
    ),
    "adapters": Kind(
        load_x,
        lambda fleet, engine: engine.part("adapters").load("x", f"{fleet.root}/b", replace=True),
        lambda parts: {name: info.folder for name, info in parts.adapters.infos.items()},
        lambda engine: (executor_of(engine).parts.adapters, "read"),
        lambda engine: (executor_of(engine).parts.adapters, "add"),
    ),
    "sleep": Kind(
        lambda fleet, front: front.sleep(1),
        lambda fleet, engine: engine.part("sleep").sleep(1),
        lambda parts: parts.sleep.asleep,
        lambda engine: (executor_of(engine).parts.sleep, "begin"),
        lambda engine: (executor_of(engine).parts.sleep, "begin"),
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapters(root, "a", "b")
    return root


@pytest.fixture
def fleet(tmp_path: Path, root: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, root)
    yield fleet
    fleet.close()


def states(kind: Kind, fleet: Fleet) -> list[Any]:
    return [kind.state(each) for each in fleet.parts]


def check_change(kind: Kind, fleet: Fleet, before: list[Any]) -> None:
    fleet.ask(lambda front: kind.change(fleet, front))
    after = states(kind, fleet)
    assert after[0] == after[1] != before[0]


@pytest.mark.parametrize("name", KINDS)
def test_no_engine_changes_if_one_of_them_refuses(
    name: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("it does not fit")

    kind = KINDS[name]
    before = states(kind, fleet)
    monkeypatch.setattr(*kind.stages(fleet.engines[1]), refuse)
    with pytest.raises(ValueError, match="it does not fit"):
        fleet.ask(lambda front: kind.change(fleet, front))
    assert states(kind, fleet) == before
    assert not any(getattr(each.part(name), "_staged", ()) for each in fleet.engines)
    monkeypatch.undo()
    check_change(kind, fleet, before)


@pytest.mark.parametrize("name", KINDS)
def test_engines_that_have_changed_go_back_when_another_one_fails(
    name: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        wait_for(lambda: kind.state(fleet.parts[0]) != before[0])
        raise RuntimeError("the executor has died")

    kind = KINDS[name]
    before = states(kind, fleet)
    monkeypatch.setattr(*kind.serves(fleet.engines[1]), fail)
    with pytest.raises(RuntimeError, match="the executor has died"):
        fleet.ask(lambda front: kind.change(fleet, front))
    assert states(kind, fleet) == before
    monkeypatch.undo()
    fleet.use(lambda front: asyncio.sleep(0))  # a front that connects
    assert states(kind, fleet) == before
    check_change(kind, fleet, before)
    if name in ("draft", "target"):
        versions = [version for _, version, _ in states(kind, fleet)]
        assert list(map(str, versions)) == ["2", "2"], "a failed one's would have two folders"


@pytest.mark.parametrize("name", KINDS)
def test_a_front_that_connects_ends_what_a_killed_front_had_begun(name: str, fleet: Fleet) -> None:
    def begin(replicas: Replicas) -> None:
        alike: Any = replicas.adapters if name == "adapters" else getattr(replicas, f"_{name}")
        with alike.held() as served:
            alike._in_force.write(served)

    kind = KINDS[name]
    before = states(kind, fleet)
    fleet.ask(begin)
    kind.alone(fleet, fleet.engines[0])
    assert states(kind, fleet)[0] != before[0]
    fleet.ask(lambda front: wait_for(lambda: states(kind, fleet) == before))
