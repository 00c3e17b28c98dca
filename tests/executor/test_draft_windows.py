"""Draft networks that see the last tokens only, or the first ones besides: `draft_window_size`,
`draft_sink_size`, and a window in the network's own config.json."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import HOT, SMALL_POOL, TREE, eagle, eagle3
from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_dflash import write_tiny_dflash
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import edit_config, write_tiny_eagle3
from tllm_spec.outputs import SpeculativeStats

SIZE = 4
WHOLE = 500  # more than a request may have
Options = dict[str, Any]
MODES: dict[str, Options] = {
    "head, one-model": {},
    "head, two-model": {"eagle3_one_model": False},
    "head, trees": TREE,
    "EAGLE-1 head": {},
    "model, two-model": {},
    "model, one-model": {"draft_target_one_model": True},
}
WITNESSES = ("head, one-model", "head, trees", "model, two-model")


def draft(folder: Path, mode: str, window: int | None = None) -> Path:
    """Draft weights for the mode. window: in their config.json."""
    own: Options = {} if window is None else {"sliding_window": window}
    if "head" not in mode:
        path = write_tiny_llama(folder, noise=0.2)
        own |= {"architectures": ["MistralForCausalLM"]} if own else {}
    elif mode == "EAGLE-1 head":
        path = write_tiny_eagle(folder)
        own |= {"architectures": ["MistralForCausalLMEagle"]} if own else {}
    else:
        path = write_tiny_eagle3(folder, num_captured=2)
        own |= {"layer_types": ["sliding_attention"]} if own else {}
    edit_config(path, **own)
    return path


def options_of(path: Path, mode: str, **more: Any) -> Options:
    make = draft_target if "head" not in mode else eagle if mode == "EAGLE-1 head" else eagle3
    return make(path, 3, **MODES[mode], **more)


def served(tiny: Path, **options: Any) -> list[tuple[list[int], SpeculativeStats]]:
    """Texts and counts of the same requests, in a small cache with chunks and preemptions."""
    harness, random = Harness(tiny, **SMALL_POOL, **options), Random(6)
    requests = [
        harness.submit(
            [random.randrange(64) for _ in range(random.randrange(1, 20))],
            max_tokens=24,
            temperature=HOT if index % 3 else None,
        )
        for index in range(6)
    ]
    harness.run()
    return [(output_of(each), each.counters.stats()) for each in requests]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    return [text for text, _ in served(tiny)]


modes = pytest.mark.parametrize(
    "mode",
    [mode if mode in WITNESSES else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES],
)


@modes
def test_a_window_changes_drafts_and_no_text_and_is_that_of_the_config(
    mode: str, tiny: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    path = draft(tmp_path / "draft", mode)
    found = {
        size: served(tiny, **options_of(path, mode, draft_window_size=size))
        for size in (None, SIZE, WHOLE)
    }
    assert all([text for text, _ in each] == plain for each in found.values())
    assert found[WHOLE] == found[None] != found[SIZE]
    own = draft(tmp_path / "own", mode, SIZE)
    assert served(tiny, **options_of(own, mode)) == found[SIZE]
    assert served(tiny, **options_of(own, mode, draft_window_size=WHOLE)) == found[None]


@modes
def test_a_sink_changes_drafts_and_no_text(
    mode: str, tiny: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    path = draft(tmp_path / "draft", mode)
    sizes: dict[str, Options] = {
        "all": {},
        "sink": {"draft_window_size": 1, "draft_sink_size": 1},
        "wide": {"draft_window_size": SIZE, "draft_sink_size": WHOLE},
    }
    found = {name: served(tiny, **options_of(path, mode, **own)) for name, own in sizes.items()}
    assert all([text for text, _ in each] == plain for each in found.values())
    assert found["wide"] == found["all"] != found["sink"]


def test_a_sink_is_instead_of_the_window_of_the_config(tiny: Path, tmp_path: Path) -> None:
    own = {"draft_window_size": SIZE, "draft_sink_size": WHOLE}
    without, with_window = (
        draft(tmp_path / str(size), "head, one-model", size) for size in (None, SIZE)
    )
    assert served(tiny, **eagle3(with_window, 3, **own)) == served(tiny, **eagle3(without, 3))


def test_a_dflash_head_refuses_a_window(tiny: Path, tmp_path: Path) -> None:
    options = {"decoding_type": "DFlash", "max_draft_len": 3, "draft_window_size": SIZE}
    head = {"speculative_model": str(write_tiny_dflash(tmp_path))}
    with pytest.raises(ValueError, match="draft_window_size = 4 is refused: a DFlash head"):
        Harness(tiny, speculative_config=options | head)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"draft_window_size": 0}, "draft_window_size"),
        ({"draft_window_size": None, "draft_sink_size": 4}, "draft_sink_size = 4 needs draft_w"),
        ({"draft_backend": "onnxruntime", "eagle3_one_model": False}, "sees all keys"),
    ],
)
def test_a_window_that_cannot_be_is_refused(
    more: Options, message: str, tiny: Path, tmp_path: Path
) -> None:
    path = draft(tmp_path / "draft", "head, two-model")
    with pytest.raises(ValueError, match=message):
        Harness(tiny, **eagle3(path, 3, **({"draft_window_size": SIZE} | more)))


def test_a_window_of_the_config_that_no_text_goes_beyond_is_none(
    tiny: Path, tmp_path: Path
) -> None:
    """A network outside torch takes no window."""
    path = draft(tmp_path, "head, two-model", 64)
    options = eagle3(path, 3, draft_backend="onnxruntime", eagle3_one_model=False)
    Harness(tiny, max_seq_len=64, **options)
    with pytest.raises(ValueError, match="sees all keys, and the draft network's window is 64"):
        Harness(tiny, max_seq_len=65, **options)


@pytest.mark.parametrize("more", [{}, {"draft_sink_size": 4}])
def test_a_network_with_windows_in_some_layers_only_refuses_another_one(
    more: Options, tiny: Path, tmp_path: Path
) -> None:
    """Its layers are in two groups, and with one window they would be in one."""
    head = write_tiny_eagle3(tmp_path, num_captured=2, num_layers=2)
    edit_config(head, sliding_window=SIZE, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ValueError, match="refused: some layers have a window and others have none"):
        Harness(tiny, **eagle3(head, 3, draft_window_size=SIZE + 1, **more))
