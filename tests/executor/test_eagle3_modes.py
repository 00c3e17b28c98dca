"""EAGLE-3 through the arguments: which heads and options are refused and how, and what the others
are built as."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.executor.draft_caches import (
    HOT,
    MASK,
    assert_drafts_at_once,
    assert_drafts_one_by_one,
    eagle3,
    network_of,
)
from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tests.lossless.other_tokenizer import NUM_REMOVED, write_draft_with_another_tokenizer
from tests.models.eagle3_reference import Eagle3Reference
from tests.models.tiny_eagle3 import edit_config, rewrite, write_tiny_eagle3
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.drafting.heads import DraftPlan
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.llm import LLM
from tllm_spec.models.registry import model_config
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

PROMPT = [3, 14, 15, 9, 26]


def default_layers(head: Path, **options: Any) -> dict[str, Any]:
    return eagle3(head, eagle3_layers_to_capture=None, **options)


@pytest.mark.parametrize("draft_len", [None, 0, -1])
def test_a_draft_length_is_needed_and_plain_decoding_is_something_else(
    head: Path, draft_len: Any
) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)max_draft_len.*integer from 1 to 65536.*speculative_config: null"
    ):
        LlmArgs.from_kwargs("m", **eagle3(head, max_draft_len=draft_len))


def test_a_missing_draft_length_is_named(head: Path) -> None:
    options = eagle3(head)
    del options["speculative_config"]["max_draft_len"]
    with pytest.raises(ValueError, match="max_draft_len"):
        LlmArgs.from_kwargs("m", **options)


def test_a_head_is_needed() -> None:
    options = eagle3(Path("head"))
    del options["speculative_config"]["speculative_model"]
    with pytest.raises(ValueError, match="speculative_model"):
        LlmArgs.from_kwargs("m", **options)


@pytest.mark.parametrize("one_model", [True, False])
def test_a_head_that_is_not_there_is_named_with_its_folder(
    tiny: Path, tmp_path: Path, one_model: bool
) -> None:
    with pytest.raises(ValueError, match="no-such-head"):
        Harness(tiny, **eagle3(tmp_path / "no-such-head", eagle3_one_model=one_model))


def test_a_head_without_weights_is_refused_unless_they_are_to_be_made_up(
    tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2)
    (head / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        Harness(tiny, **eagle3(head))
    harness = Harness(tiny, **eagle3(head, load_format="dummy"))
    request = harness.submit(PROMPT, max_tokens=9)
    harness.run()
    assert request.num_output_tokens == 9 and request.counters.stats().num_drafted_tokens > 0


def test_a_head_that_does_not_fuse_captured_states_is_refused(tiny: Path, tmp_path: Path) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2)
    rewrite(head, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(ValueError, match=r"no fc\.weight"):
        Harness(tiny, **eagle3(head))


@pytest.mark.parametrize(("layers", "outside"), [((0, 2), r"\[2\]"), ((5, 7), r"\[5, 7\]")])
def test_capture_layers_outside_the_target_are_named_with_what_it_has(
    tiny: Path, head: Path, layers: tuple[int, ...], outside: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"eagle3_layers_to_capture = .*0 to 1, and not {outside}"
    ):
        Harness(tiny, **eagle3(head, eagle3_layers_to_capture=layers))


def test_capture_layers_of_the_heads_own_config_are_checked_too(tiny: Path, tmp_path: Path) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2)
    edit_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4]})
    with pytest.raises(ValueError, match=r"layers 0 to 1, and not \[4\]"):
        Harness(tiny, **default_layers(head))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_size": 64},
            "fc.weight of the EAGLE-3 head takes 128 inputs; 2 captured layers of 32 each give 64",
        ),
        ({"vocab_size": 80}, "d2t of the EAGLE-3 head leads to the token id 6"),
        (
            {"num_captured": 3},
            "fc.weight of the EAGLE-3 head takes 96 inputs; 2 captured layers of 32 each give 64",
        ),
    ],
)
def test_a_head_of_other_sizes_is_refused_with_both_numbers(
    tiny: Path, tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    head = write_tiny_eagle3(tmp_path, **{"num_captured": 2, **sizes})
    with pytest.raises(ValueError, match=message):
        Harness(tiny, **eagle3(head))


def test_one_capture_layer_too_few_for_what_the_config_says_is_refused_with_both_numbers(
    tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2, num_aux_hidden_states=2)
    with pytest.raises(ValueError, match=r"1 layers .* reads 2 .*Set eagle3_layers_to_capture"):
        Harness(tiny, **eagle3(head, eagle3_layers_to_capture=[1]))


@pytest.mark.parametrize("num_layers", [2, 5])
def test_a_shallow_target_has_no_default_capture_layers_and_the_message_says_what_to_set(
    tmp_path: Path, num_layers: int
) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=num_layers)
    head = write_tiny_eagle3(tmp_path / "head")
    with pytest.raises(
        ValueError, match=rf"{num_layers} layers .* need 7; set eagle3_layers_to_capture"
    ):
        Harness(target, **default_layers(head))


@pytest.mark.parametrize(
    ("given", "in_config", "captured"),
    [(None, None, (1, 2, 3)), (None, [4, 0, 5], (4, 0, 5)), ([5, 3, 0], [4, 0, 1], (0, 3, 5))],
)
def test_the_option_counts_before_the_heads_config_and_that_before_the_default(
    deep: Path, tmp_path: Path, given: list[int] | None, in_config: list[int] | None, captured: Any
) -> None:
    head = write_tiny_eagle3(tmp_path)
    if in_config is not None:
        edit_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": in_config})
    harness = Harness(deep, **eagle3(head, eagle3_layers_to_capture=given))
    spec = harness.parts.runner.engine.spec
    assert spec is not None and spec.layers == captured
    request, reference = harness.submit(PROMPT, max_tokens=9), Harness(deep)
    expected = reference.submit(PROMPT, max_tokens=9)
    harness.run()
    reference.run()
    assert output_of(request) == output_of(expected)


def test_every_third_of_the_captured_states_is_written_on_the_shallowest_target_that_is_served(
    tmp_path: Path,
) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=7)
    harness = Harness(target, **default_layers(write_tiny_eagle3(tmp_path / "head")))
    harness.submit(PROMPT, max_tokens=2)
    harness.run()
    spec = harness.parts.runner.engine.spec
    assert spec is not None
    assert all(part.any() for part in spec.captured(4).chunk(3, dim=-1))


def test_a_head_with_a_reduced_vocabulary_drafts_the_targets_ids(
    tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, num_captured=2, draft_vocab_size=20)
    ids = load_file(head / "model.safetensors")["d2t"] + torch.arange(20)
    harness = Harness(tiny, **eagle3(head), disable_overlap_scheduler=True)
    token_map = network_of(harness).net.token_map
    assert token_map is not None and token_map.tolist() == ids.tolist() and max(ids.tolist()) > 20
    requests = [
        harness.submit([i, *PROMPT], 20, temperature=t) for i, t in enumerate((None, 6.0) * 3)
    ]
    drafted: set[int] = set()
    for _ in range(15):
        harness.round()
        slots = [request.slot for request in requests if request.state is RequestState.GENERATION]
        drafted |= set(harness.parts.slots.window[slots, 1:].flatten().tolist())
    assert drafted <= set(ids.tolist()) and len(drafted) > 10


def test_the_longest_request_fits_with_all_that_is_written_after_it(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    """A request up to max_seq_len: the block table and the rotary tables end after the last
    position ever written."""
    for options in (
        eagle3(head, 5),
        eagle3(head, 5, eagle3_one_model=False),
        draft_target(tiny, 5, draft_target_one_model=True),
        draft_target(tiny_draft, 5, draft_target_one_model=True),
    ):
        for max_seq_len in (29, 31, 32):
            pages = {"tokens_per_block": 1}
            harness = Harness(tiny, max_seq_len=max_seq_len, kv_cache_config=pages, **options)
            requests = [
                harness.submit(PROMPT, max_seq_len - 5 - i, temperature=6.0) for i in range(3)
            ]
            harness.run()
            assert [request.num_tokens for request in requests] == [
                max_seq_len - i for i in range(3)
            ]


# EAGLE-3 heads in the published formats through the engine.


DRAFT_LEN = 3
LAYERS = (0, 2, 5)
INPUTS = [1, 3, 6]  # as the speculators format counts the same layers

SPECULATORS: dict[str, Any] = {
    "speculators": True,
    "spelling": "layers",
    "eagle_aux_hidden_state_layer_ids": INPUTS,
}
NAMED: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
WIDER: dict[str, Any] = {"hidden_size": 48, "target_hidden_size": 32, "own_modules": True}
HEADS: dict[str, dict[str, Any]] = {
    "speculators": SPECULATORS | {"norm_before_residual": True},
    "speculators, EAGLE-3.1": SPECULATORS
    | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "speculators, a Qwen3 layer": SPECULATORS | {"model_type": "qwen3"},
    "flat, EAGLE-3.1": {"fc_norm": True, "norm_output": True, "eagle_config": NAMED},
    "flat, another width": WIDER | {"eagle_config": NAMED},
    "flat, norm_before_fc in eagle_config": {
        "norm_before_fc": True,
        "eagle_config": {"norm_before_fc": True, **NAMED},
    },
}
PARALLEL_HEADS: dict[str, dict[str, Any]] = {
    "speculators": SPECULATORS,
    "speculators, two Qwen3 layers and own embedding": SPECULATORS
    | {"model_type": "qwen3", "num_layers": 2, "own_modules": True, "norm_before_fc": True},
    "flat": {"eagle_config": NAMED},
    "flat, another width": HEADS["flat, another width"],
}


def head_options(head: Path, **options: Any) -> dict[str, Any]:
    return eagle3(head, DRAFT_LEN, eagle3_layers_to_capture=None, **options)


def submit(harness: Harness) -> list[LlmRequest]:
    return [
        harness.submit([number, *PROMPT], 24, temperature=HOT if number % 2 else None, seed=number)
        for number in range(4)
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", HEADS)
def test_the_engine_drafts_the_tokens_of_the_plain_torch_reference(
    name: str, deep: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, **HEADS[name])
    harness = Harness(deep, **head_options(head), disable_overlap_scheduler=True)
    spec = harness.parts.runner.engine.spec
    assert spec is not None and spec.layers == LAYERS
    assert network_of(harness).net.token_map is not None
    submit(harness)
    reference = Eagle3Reference(head, harness.parts.runner.engine.model)
    assert_drafts_one_by_one(harness, LAYERS, reference, DRAFT_LEN)


def test_one_warning_names_the_keys_that_are_not_known(
    deep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_tiny_eagle3(
        tmp_path, decoder_sparse_step=1, modal_type="VLM", **HEADS["flat, EAGLE-3.1"]
    )
    Harness(deep, **head_options(head))
    named = [record.message for record in caplog.records if "unknown keys" in record.message]
    assert [text.rpartition(": ")[2] for text in named] == ["decoder_sparse_step, modal_type"]


@pytest.mark.thinned(9)
@pytest.mark.parametrize("path", ["one model", "two models"])
@pytest.mark.parametrize("name", PARALLEL_HEADS)
def test_a_p_eagle_head_drafts_all_tokens_of_the_reference_at_once(
    name: str, path: str, deep: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, mask_token=MASK, **PARALLEL_HEADS[name])
    options = head_options(head, eagle3_one_model=path == "one model")
    harness = Harness(deep, **options, disable_overlap_scheduler=True)
    reference = Eagle3Reference(head, harness.parts.runner.engine.model)
    assert network_of(harness).net.token_map is not None
    submit(harness)

    def block(tokens: list[int], captured: torch.Tensor, _: list[int]) -> torch.Tensor:
        return reference.block(tokens[1:], reference.fuse(captured), DRAFT_LEN)

    assert_drafts_at_once(harness, LAYERS, block, DRAFT_LEN)


def test_a_p_eagle_head_is_refused_outside_torch(deep: Path, tmp_path: Path) -> None:
    head = write_tiny_eagle3(tmp_path, mask_token=MASK, **PARALLEL_HEADS["flat"])
    options = head_options(head, eagle3_one_model=False, draft_backend="onnxruntime")
    with pytest.raises(ValueError, match="one draft after the other, and a P-EAGLE head all at"):
        Harness(deep, **options)


# A head given as a draft model, and the reverse, are refused by option and cause.


ZOO = resolve_model("zoo:llama")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("decoding_type", "model", "sentences"),
    [
        ("Draft_Target", "zoo:llama-eagle3", ["is an EAGLE-3 head", "decoding_type: Eagle3"]),
        ("Eagle3", "zoo:llama-draft", ["layers, not an EAGLE-3 head", "Draft_Target"]),
        ("Eagle3", "zoo:llama", ["layers, not an EAGLE-3 head", "Draft_Target"]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"skip_tokenizer_init": True}])
def test_a_model_of_the_wrong_kind_is_refused_by_option_and_cause(
    decoding_type: str, model: str, sentences: list[str], options: dict[str, Any]
) -> None:
    spec = {"decoding_type": decoding_type, "max_draft_len": 3, "speculative_model": model}
    with pytest.raises(ValueError) as refusal:
        LLM("zoo:llama", max_seq_len=64, speculative_config=spec, **options)
    assert f"speculative_config.speculative_model = {model!r}" in str(refusal.value)
    for sentence in sentences:
        assert sentence in str(refusal.value)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    spec = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": tmp_path}
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        LLM("zoo:llama", max_seq_len=64, speculative_config=spec)


def draft_model(folder: Path, **options: str) -> DraftPlan:
    args = LlmArgs(
        model="zoo:llama",
        speculative_config={
            "decoding_type": "Draft_Target",
            "max_draft_len": 3,
            "speculative_model": str(folder),
            **options,
        },
    )
    draft = draft_plan_of(args.speculative_config)
    assert draft is not None
    return draft


def test_a_draft_model_without_a_tokenizer_is_taken_to_have_the_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = resolve_model("zoo:llama"), resolve_model("zoo:llama-draft")
    shutil.copy(draft / "config.json", tmp_path)
    sizes = model_config(target)
    check_draft(draft_model(tmp_path), load_tokenizer(target), sizes)
    assert f"{tmp_path} has no tokenizer; its token ids are taken to be the target's" in caplog.text
    (tmp_path / "tokenizer.json").write_text("[]")
    problem = "speculative_config.speculative_model: no tokenizer can be loaded from"
    with pytest.raises(ValueError, match=problem):
        check_draft(draft_model(tmp_path), load_tokenizer(target), sizes)


def test_a_draft_model_of_a_family_that_is_not_served_is_refused_by_its_option(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    problem = r"speculative_config\.speculative_model: architectures is \['BertModel'\]"
    with pytest.raises(ValueError, match=problem):
        check_draft(draft_model(tmp_path), load_tokenizer("zoo:llama"), model_config(ZOO))


def test_another_tokenizer_is_mapped_by_bytes_and_refused_where_the_network_has_no_map(
    tmp_path: Path,
) -> None:
    folder = write_draft_with_another_tokenizer(tmp_path / "draft")
    target, sizes = load_tokenizer("zoo:llama"), model_config(ZOO)
    tokens = check_draft(draft_model(folder), target, sizes)
    assert tokens is not None and len(tokens.ids) == 2048 - NUM_REMOVED
    names = load_tokenizer(str(folder)).get_vocab()
    pairs = dict(zip(tokens.ids.tolist(), tokens.rows.tolist(), strict=True))
    [word] = target.encode(" the")
    assert pairs[word] == names["▁the"] and pairs[1] == names["<|endoftext|>"]
    hot = "zoo:llama-draft/token_map.json"
    limited = check_draft(draft_model(folder, speculative_token_map=hot), target, sizes)
    assert limited is not None and 900 < len(limited.ids) < 1024
    assert {*limited.ids.tolist()} < pairs.keys()
    with pytest.raises(ValueError, match="draft_backend = 'onnxruntime' is refused: the draft mod"):
        check_draft(draft_model(folder, draft_backend="onnxruntime"), target, sizes)


def test_a_tokenizer_with_few_of_the_targets_tokens_is_refused_by_option_and_figure(
    tmp_path: Path,
) -> None:
    folder = write_draft_with_another_tokenizer(tmp_path / "draft", num_removed=1300)
    sizes = model_config(ZOO)
    with pytest.raises(ValueError) as refusal:
        check_draft(draft_model(folder), load_tokenizer("zoo:llama"), sizes)
    assert "speculative_config.speculative_model: the draft model's tokenizer shares 748" in str(
        refusal.value
    )
