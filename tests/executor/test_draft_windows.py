"""Draft networks that see the last tokens only, or the first ones besides: `draft_window_size`,
`draft_sink_size`, and a window in the network's own config.json."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TREE,
    assert_texts_are,
    eagle,
    eagle3,
    generating,
    network_of,
    one_model,
    slow_drafters,
    submit_traffic,
)
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_dflash import write_tiny_dflash
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import edit_config, rewrite, write_tiny_eagle3
from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.executor.engine.rows import SinkWindow
from tllm_spec.executor.request import LlmRequest
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.models.linear import OutputLinear
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


@pytest.mark.thinned(3)
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


@pytest.mark.slow
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


def test_a_dflash_head_takes_a_window_unless_only_some_layers_have_one(
    tiny: Path, tmp_path: Path
) -> None:
    all_slide = {"layer_types": ["sliding_attention"] * 2, "sliding_window_non_causal": True}
    drafts = []
    for own, options in (
        ({**all_slide, "sliding_window": SIZE}, {}),
        ({}, {"draft_window_size": SIZE}),
        ({}, {}),
    ):
        head = write_tiny_dflash(tmp_path, **own)
        spec = {"decoding_type": "DFlash", "max_draft_len": 3, "speculative_model": str(head)}
        harness = Harness(tiny, speculative_config=spec | options, disable_overlap_scheduler=True)
        request, seen = harness.submit([3, 14, 15, 9, 26, 5, 35], 12), []
        while harness.round():
            seen.append(harness.parts.slots.window[request.slot or 0].tolist())
        drafts.append(seen)
    assert drafts[0] == drafts[1] != drafts[2]
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    head = write_tiny_dflash(tmp_path, **mixed)
    spec |= {"speculative_model": str(head), "draft_window_size": SIZE}
    with pytest.raises(ValueError, match="draft_window_size = 4 is refused: some layers have a w"):
        Harness(tiny, speculative_config=spec)


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


# Attention of a draft network that sees the first and the last tokens of a text: its tables have
# the pages of both, whatever the chunks, windows and trees are.


PAGE, PAGES = 4, 20
CHUNKS = ((3, 3), (31, 31), (17, 52), (1, 70))  # tokens, and the length with them
KV_LENS = (2, 9, 33, 64, 80)
WINDOW = 3


def metadata_of(tree: TreeMask | None = None, *, chunks: bool = True) -> AttentionMetadata:
    """Chunks and windows of requests with pages of random numbers."""
    own = CHUNKS if chunks else ()
    rows = RoundRows.rectangle(len(KV_LENS), WINDOW)
    num_rows = sum(length for length, _ in own) + rows.num_rows
    number = len(own) + len(KV_LENS)
    return AttentionMetadata(
        context_lens=tuple(length for length, _ in own),
        context_kv_lens=tuple(end for _, end in own),
        rows=rows,
        block_tables=torch.randperm(number * PAGES, dtype=torch.int32).view(number, PAGES),
        kv_lens=torch.tensor([*(end for _, end in own), *KV_LENS], dtype=torch.int32),
        positions=torch.arange(num_rows),
        kv_slots=torch.arange(num_rows),
        max_kv_len=max(KV_LENS),
        tree=tree,
    )


def slots_of(table: torch.Tensor, number: int) -> list[int]:
    """The slots of the first tokens of a request with these pages."""
    pages = table.tolist()
    return [pages[token // PAGE] * PAGE + token % PAGE for token in range(number)]


def rows_of(metadata: AttentionMetadata, num_last: int) -> list[list[int]]:
    """The slots that each row sees; of a tree's row, those before the region, `num_last` long."""
    chunks = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
    tables = list(metadata.block_tables)
    found = [
        slots_of(tables[chunk], end - length + 1 + row)
        for chunk, (length, end) in enumerate(chunks)
        for row in range(length)
    ]
    first = len(metadata.context_lens)
    for table, kv_len in zip(tables[first:], metadata.kv_lens[first:].tolist(), strict=True):
        own = range(1, WINDOW + 1) if metadata.tree is None else [0] * WINDOW
        found += [slots_of(table, max(0, kv_len - num_last + row)) for row in own]
    return found


def seen_by_rule(whole: list[int], first: int, sink: int, size: int) -> list[int]:
    """The slots of the sink's pages, and those from the page on that has the first of the `size`
    last tokens of the row at position `first`. whole: all slots up to the row's own."""
    end = -(-sink // PAGE) * PAGE
    start = max(0, first - size + 1) // PAGE * PAGE
    return [slot for key, slot in enumerate(whole) if key < end or key >= start]


@pytest.mark.covering
@pytest.mark.parametrize(("sink", "size"), [(1, 1), (4, 6), (5, 13), (9, 24)])
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("region", [0, 5])
def test_a_row_sees_the_pages_of_the_first_and_of_the_last_tokens(
    region: int, chunks: bool, sink: int, size: int
) -> None:
    torch.manual_seed(sink)
    bits = torch.ones(len(KV_LENS), WINDOW, dtype=torch.int64)
    metadata = metadata_of(TreeMask(bits, region) if region else None, chunks=chunks)
    num_last = region or WINDOW
    cut = SinkWindow(sink, size).cut(metadata, PAGE)
    firsts = [
        end - length + row for length, end in (CHUNKS if chunks else ()) for row in range(length)
    ]
    firsts += [max(0, kv_len - num_last) for kv_len in KV_LENS for _ in range(WINDOW)]
    whole = rows_of(metadata, num_last)
    expected = [
        seen_by_rule(own, first, sink, size) for own, first in zip(whole, firsts, strict=True)
    ]
    assert rows_of(cut, num_last) == expected
    assert any(len(own) < len(all_of) for own, all_of in zip(expected, whole, strict=True))
    assert cut.max_kv_len >= int(cut.kv_lens[len(cut.context_lens) :].max())
    assert cut.kv_slots is metadata.kv_slots and cut.positions is metadata.positions


def test_texts_that_are_seen_whole_stay_as_they_are() -> None:
    metadata = metadata_of()
    assert SinkWindow(4, 80).cut(metadata, PAGE) is metadata


def test_a_window_of_fewer_rows_sees_the_pages_that_its_own_first_row_sees() -> None:
    metadata, counts = metadata_of(chunks=False), (1, 3, 1, 2, 1)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    window = SinkWindow(5, 7)
    part = replace(metadata, rows=RoundRows(len(counts), WINDOW, sum(counts), offsets))
    own = window.cut(part, PAGE)
    for number, count in enumerate(counts):
        rows = RoundRows.rectangle(len(counts), count)
        alone = window.cut(replace(metadata, rows=rows), PAGE)
        seen, expected = (
            slots_of(cut.block_tables[number], int(cut.kv_lens[number])) for cut in (own, alone)
        )
        assert seen == expected


# `speculative_token_map` through the engine: drafts are limited to its tokens and mapped back to
# the target's ids, for draft models and heads, chains and trees, on both paths.


PROMPT = [3, 14, 15, 9, 26]
HOT_IDS = Random(0).sample(range(64), 40)
PATHS = {"eagle": "eagle_two_model", "draft_target": "draft_target_two_model"}
TOKEN_MAPS_MODES = [*PATHS, *PATHS.values()]
WITH_TREES = [*TOKEN_MAPS_MODES, *(f"{mode}_tree" for mode in TOKEN_MAPS_MODES)]


def write_map(folder: Path, ids: list[int]) -> str:
    torch.save(torch.tensor(ids), folder / "hot.pt")
    return str(folder / "hot.pt")


def figures(requests: list[LlmRequest]) -> list[Any]:
    return [(output_of(each), each.counters.stats()) for each in requests]


@pytest.mark.thinned
@pytest.mark.parametrize("mode", WITH_TREES)
def test_a_map_of_all_tokens_in_any_order_changes_no_draft(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, tmp_path: Path
) -> None:
    token_map, found = write_map(tmp_path, Random(1).sample(range(64), 64)), []
    for options in ({}, {"speculative_token_map": token_map}):
        harness = Harness(tiny, **one_model(tiny_draft, head, mode, **options))
        requests = submit_traffic(harness, Random(2), 8)
        harness.run()
        found.append(figures(requests))
    assert found[0] == found[1]
    assert sum(stats.num_accepted_tokens for _, stats in found[0]) > 0


@pytest.mark.thinned
@pytest.mark.parametrize("ending", ["", "_tree"])
@pytest.mark.parametrize("mode", PATHS)
def test_the_text_is_plain_decodings_and_both_paths_draft_only_tokens_of_the_map(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, ending: str, tmp_path: Path
) -> None:
    token_map, found = write_map(tmp_path, HOT_IDS), []
    plain = Harness(tiny)
    expected = submit_traffic(plain, Random(2), 8)
    plain.run()
    for path in (mode, PATHS[mode]):
        options = one_model(tiny_draft, head, path + ending, speculative_token_map=token_map)
        harness, drafted = Harness(tiny, **options), set[int]()
        requests, slots = submit_traffic(harness, Random(2), 8), harness.parts.slots
        while harness.round():
            for request in generating(harness):
                num_drafts = request.py_num_draft_tokens
                drafted |= set(slots.window[request.slot, 1 : 1 + num_drafts].tolist())
        assert_texts_are(requests, expected)
        assert all_pages_are_back(harness.executor)
        assert len(drafted) > 20 and drafted <= set(HOT_IDS)
        found.append(figures(requests))
    assert found[0] == found[1]
    assert sum(stats.num_accepted_tokens for _, stats in found[0]) > 0


@pytest.mark.thinned
@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
@pytest.mark.parametrize("mode", PATHS)
def test_drafts_are_those_of_a_slow_loop_over_the_maps_tokens(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, sampling: str, tmp_path: Path
) -> None:
    own = {"speculative_token_map": write_map(tmp_path, HOT_IDS), "draft_sampling": sampling}
    options = one_model(tiny_draft, head, mode, 3, **own)
    harness, num_checked = Harness(tiny, **options, disable_overlap_scheduler=True), 0
    net, slots = network_of(harness).net, harness.parts.slots
    assert net.token_map is not None and net.token_map.tolist() == HOT_IDS
    for number in range(3):
        harness.submit([number, *PROMPT], 20, temperature=HOT if number else None, seed=number)
    while harness.round():
        running = generating(harness)
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            temperature = request.rules.temperature if sampling == "coupled" else None
            assert slow._logits.shape == (40,)
            expected = slow.drafts(3, temperature or None, request.seed)
            assert slots.window[request.slot, 1:].tolist() == expected
            num_checked += 1
    assert num_checked > 20


@pytest.mark.parametrize("mode", PATHS)
def test_for_rejection_sampling_a_drafts_distribution_is_over_the_targets_ids(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, tmp_path: Path
) -> None:
    own = {"speculative_token_map": write_map(tmp_path, HOT_IDS), "use_rejection_sampling": True}
    options = one_model(tiny_draft, head, mode, **own)
    harness = Harness(tiny, **options, disable_overlap_scheduler=True)
    request = harness.submit(PROMPT, 30, temperature=0.8)
    absent = [token for token in range(64) if token not in HOT_IDS]
    for _ in range(5):
        harness.round()
        group = harness.parts.sampler.groups.get([request], 4)
        probs = network_of(harness).draft_probs(group)
        assert probs is not None and probs.shape == (1, 3, 64)
        assert torch.allclose(probs.sum(-1), torch.ones(1, 3)) and not probs[..., absent].any()
        first = slow_drafters(harness, [request])[0]._logits / 0.8
        assert torch.allclose(probs[0, 0, HOT_IDS], first.softmax(-1), atol=1e-4)


def test_the_output_layer_of_the_draft_has_the_maps_rows_and_the_targets_has_all(
    tiny: Path, tiny_draft: Path, head: Path, tmp_path: Path
) -> None:
    token_map = write_map(tmp_path, HOT_IDS)
    for mode in ("draft_target", "eagle"):
        harness = Harness(
            tiny, **one_model(tiny_draft, head, mode, speculative_token_map=token_map)
        )
        net: Any = network_of(harness).net
        draft = net._model if mode == "draft_target" else net.head
        sizes = [
            len(module.weight) for module in draft.modules() if isinstance(module, OutputLinear)
        ]
        assert sizes == [40] and net.vocab_size == draft.num_logits == 40
        assert len(harness.parts.runner.engine.model.lm_head.weight) == 64


def test_ids_are_those_of_the_smaller_of_both_vocabularies(tiny: Path, tmp_path: Path) -> None:
    draft = write_tiny_llama(tmp_path / "draft", vocab_size=50)
    token_map = write_map(tmp_path, [3, 49, 50])
    with pytest.raises(ValueError, match=r"token_map: .*hot\.pt has the token id 50; .* 0 to 49"):
        Harness(tiny, **draft_target(draft, speculative_token_map=token_map))
    token_map = write_map(tmp_path, [3, 49, 20])
    harness = Harness(tiny, **draft_target(draft, speculative_token_map=token_map))
    request = harness.submit(PROMPT, 20, temperature=HOT)
    harness.run()
    assert request.num_output_tokens == 20 and request.counters.stats().num_drafted_tokens > 20


def test_an_eagle3_head_with_a_vocabulary_of_its_own_refuses_a_map_with_the_reason(
    tiny: Path, head: Path, tmp_path: Path
) -> None:
    token_map = write_map(tmp_path, HOT_IDS)
    with pytest.raises(ValueError, match=r"hot\.pt' is refused: .* 48 tokens that its d2t maps"):
        Harness(tiny, **eagle3(head, speculative_token_map=token_map))


@pytest.mark.parametrize("draft_vocab_size", [64, None], ids=["own layer", "the target's layer"])
def test_an_eagle3_head_with_all_tokens_takes_a_map(
    tiny: Path, tmp_path: Path, draft_vocab_size: int | None
) -> None:
    whole = write_tiny_eagle3(tmp_path / "head", num_captured=2, draft_vocab_size=draft_vocab_size)
    reordered = write_tiny_eagle3(tmp_path / "other", num_captured=2, draft_vocab_size=64)
    rewrite(reordered, lambda tensors: tensors.update(d2t=63 - 2 * torch.arange(64)))
    token_map, found = write_map(tmp_path, Random(1).sample(range(64), 64)), []
    with pytest.raises(ValueError, match="d2t of the head already says which tokens it drafts"):
        Harness(tiny, **eagle3(reordered, speculative_token_map=token_map))
    for options in ({}, {"speculative_token_map": token_map}):
        harness = Harness(tiny, **eagle3(whole, **options))
        requests = submit_traffic(harness, Random(2), 8)
        harness.run()
        found.append(figures(requests))
    assert found[0] == found[1]
