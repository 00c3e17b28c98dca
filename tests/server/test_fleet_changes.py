"""Whatever several engines share, all of them change it or none: a refusal, a failure and a
front that ends in the middle leave what was before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.engine_fleet import Fleet, write_adapters
from tests.server.http_answers import wait_for
from tllm_spec.server.fleet import ServedAdapter
from tllm_spec.server.replicas import Replicas


class Kind(NamedTuple):
    """checks, serves: the methods of an engine for what is new. state: what it serves. change: by a
    front. alone: of one engine, as a front leaves it that is killed."""

    checks: str
    serves: str
    state: Callable[[Any], Any]
    change: Callable[[Fleet, Replicas], Any]
    alone: Callable[[Fleet, Any], Any]


def weights_state(weights: Any) -> tuple[str, str, float]:
    """The sum tells the weights apart."""
    models = weights._model if isinstance(weights._model, list) else [weights._model]
    tensors = [each.double().abs().sum() for model in models for each in model.parameters()]
    return weights.folder, str(weights.version), float(sum(tensors))


def replace_x(fleet: Fleet, front: Replicas) -> ServedAdapter:
    wanted = ServedAdapter.of_folder("x", f"{fleet.root}/b")
    return front.adapters.load(wanted, str(fleet.root), replaces=True)


KINDS = {
    "draft": Kind(
        *("draft_weights.stage", "draft_weights.swap"),
        lambda parts: weights_state(parts.draft_weights),
        lambda fleet, front: front.load_draft_weights(fleet.draft),
        lambda fleet, own: [own.stage(fleet.draft, 1, False, True), own.keep(fleet.draft, 1)],
    ),
    "target": Kind(
        *("target_weights.stage", "executor.replace_weights"),
        lambda parts: weights_state(parts.target_weights),
        lambda fleet, front: front.update_weights(fleet.target, None, "target", "retract"),
        lambda fleet, own: [
            own.stage(fleet.target, "1", "target", "retract"), own.keep(fleet.target, "1")
        ],
    ),
    "adapters": Kind(
        *("adapters.read", "adapters.add"),
        lambda parts: {name: info.folder for name, info in parts.adapters.infos.items()},
        replace_x,
        lambda fleet, own: own.load("x", f"{fleet.root}/b", replace=True),
    ),
    "sleep": Kind(
        *("sleep.begin", "sleep.begin"),
        lambda parts: parts.sleep.asleep,
        lambda fleet, front: front.sleep(1),
        lambda fleet, own: own.sleep(1),
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("name", KINDS)
def test_no_engine_changes_if_one_refuses_it_or_fails_when_another_has_changed(
    name: str, error: type[Exception], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        if error is RuntimeError:
            wait_for(lambda: kind.state(fleet.parts[0]) != before[0])
        raise error("not in this engine")

    kind = KINDS[name]
    before = states(kind, fleet)
    owner, method = (kind.checks if error is ValueError else kind.serves).split(".")
    second = fleet.engines[1].process._executor
    monkeypatch.setattr(getattr(second.parts, owner, second), method, fail)
    with pytest.raises(error, match="not in this engine"):
        fleet.ask(lambda front: kind.change(fleet, front))
    assert states(kind, fleet) == before
    assert not any(getattr(each.part(name), "_staged", ()) for each in fleet.engines)
    monkeypatch.undo()
    fleet.ask(lambda front: None)  # a front that connects
    assert states(kind, fleet) == before
    fleet.ask(lambda front: kind.change(fleet, front))
    after = states(kind, fleet)
    assert after[0] == after[1] != before[0]
    if name in ("draft", "target"):  # the version of a change that failed would have two folders
        assert after[0][1] == ("1" if error is ValueError else "2")


@pytest.mark.parametrize("name", KINDS)
def test_a_front_that_connects_ends_what_a_killed_front_had_begun(name: str, fleet: Fleet) -> None:
    def begin(front: Replicas) -> None:
        shared: Any = front.adapters if name == "adapters" else getattr(front, f"_{name}")
        with shared.held() as served:
            shared.write(served)

    kind = KINDS[name]
    before = states(kind, fleet)
    fleet.ask(begin)
    kind.alone(fleet, fleet.engines[0].part(name))
    assert states(kind, fleet)[0] != before[0]
    fleet.ask(lambda front: wait_for(lambda: states(kind, fleet) == before))
