"""The lists of the neighbours' names say what is true: a renamed option gets the value, an ignored
one changes nothing, and there is no option that `ABSENT` says is absent."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.decoding_options import speculate
from tllm_spec.attention.recurrent import RecurrentGeometry, RecurrentMemory
from tllm_spec.cli.serve import main
from tllm_spec.config import neighbours
from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.engine_config import KVEventsConfig, SchedulerConfig
from tllm_spec.config.llm_args import CudaGraphConfig, KvCacheConfig, LlmArgs
from tllm_spec.config.neighbours import ABSENT, Ignored, Renamed
from tllm_spec.config.option_checks import absent_reason
from tllm_spec.config.speculative_config import CONFIG_OF_TYPE
from tllm_spec.kernels.states.gated_delta import DeltaShape
from tllm_spec.sampling_params import IGNORED, SamplingParams
from tllm_spec.server.chat_message import ChatMessage
from tllm_spec.server.protocol import ChatCompletionRequest, CompletionRequest
from tllm_spec.server.responses_api import ResponsesRequest

NEEDED = {"speculative_model": "draft", "drafter": object()}
DECODING = {
    name: {
        "decoding_type": name,
        "max_draft_len": 4,
        **{key: NEEDED[key] for key in NEEDED if key in kind.model_fields and name != "MTP"},
    }
    for name, kind in CONFIG_OF_TYPE.items()
    if name == kind.model_fields["decoding_type"].default
}
EVENTS = {"publisher": "zmq", "enable_kv_cache_events": True}
ALGORITHM = ("speculative_algorithm", "speculative_algo")
SAMPLES: tuple[Any, ...] = (
    *(True, False, 1, 2, 16, 0.5, "auto", "priority", "x", [1], {"a": 1}, "AUTO", EVENTS),
    *("greedy", "newest", [[1, 8, 2], [9, 64, 0]], {"periodic_snapshot_interval": 512}),
)


def given(path: str, value: object) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: given(rest, value) if rest else value}


def made(model: type[ConfigModel], options: dict[str, Any], base: Mapping[str, Any]) -> Any:
    try:
        return model(**{**base, **options})
    except ValueError:
        return None


OF_SPECULATION = {
    name: row
    for name, row in neighbours.LLM_RENAMED.items()
    if row.path.startswith("speculative_config.")
}


def test_a_flag_of_speculation_has_its_name_in_the_other_table() -> None:
    assert {row.path for row in OF_SPECULATION.values()} == {
        f"speculative_config.{name}" for name in OF_SPECULATION
    }


@pytest.mark.parametrize("name", sorted(neighbours.LLM_RENAMED.keys() - OF_SPECULATION))
def test_a_renamed_argument_gets_the_value(name: str) -> None:
    base = {"model": "m"}
    row = neighbours.LLM_RENAMED[name]
    if row.path == "model":
        base = {}
    pairs = [
        (made(LlmArgs, given(row.path, row.value(each)), base), made(LlmArgs, {name: each}, base))
        for each in SAMPLES
    ]
    assert any(ours is not None for ours, _ in pairs)
    assert all(ours == theirs for ours, theirs in pairs)
    assert made(LlmArgs, {name: None}, {"model": "m"}) == LlmArgs(model="m")


def gets_the_value(name: str, row: Renamed, options: dict[str, Any]) -> bool:
    base = {key: each for key, each in options.items() if key != row.path}
    values = (*SAMPLES, *neighbours.DECODING_TYPES, 4, 0.9)
    if name in ALGORITHM:  # whose EAGLE without a model is MTP
        values = tuple(value for value in values if value != "EAGLE")
    pairs = [
        [made(LlmArgs, speculate({**base, **each}), {"model": "m"}) for each in pair]
        for value in values
        for pair in [(given(row.path, row.value(value)), {name: value})]
    ]
    if name == neighbours.NUM_CHILDREN:  # which says whether there is a tree, too
        return any(theirs is not None for _, theirs in pairs)
    assert all(ours == theirs for ours, theirs in pairs)
    return any(ours is not None for ours, _ in pairs)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", sorted(neighbours.SPECULATIVE_RENAMED))
def test_a_renamed_option_of_speculation_gets_the_value(name: str) -> None:
    row = neighbours.SPECULATIVE_RENAMED[name]
    kinds = [
        options
        for decoding_type, options in DECODING.items()
        if row.path in CONFIG_OF_TYPE[decoding_type].model_fields
    ]
    trees = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "use_rejection_sampling": True}
    kinds.append({**DECODING["Eagle3"], **trees})
    kinds.append({**DECODING["Eagle3"], "draft_window_size": 64})
    kinds.append({**DECODING["NGram"], "external_corpus_path": "x"})
    kinds.append({**DECODING["Eagle3"], "adaptive": {}})
    found = [gets_the_value(name, row, options) for options in kinds]
    assert any(found)


def test_two_names_of_an_option_must_agree() -> None:
    assert LlmArgs(model="m", max_num_seqs=4, max_batch_size=4).max_batch_size == 4
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", max_batch_size=8, **{"max-num-seqs": 4, "tp_size": 2, "tp": 4})
    assert str(refusal.value).splitlines() == [
        "max-num-seqs = 4 means max_batch_size = 4, which is given as 8",
        "tp = 4 means tensor_parallel_size = 4, which is given as 2",
    ]


MODELS: list[tuple[type[ConfigModel], dict[str, Any]]] = [
    (LlmArgs, {"model": "m"}),
    (KvCacheConfig, {}),
    (SchedulerConfig, {}),
    (CudaGraphConfig, {}),
    (KVEventsConfig, {}),
    *((CONFIG_OF_TYPE[name], options) for name, options in DECODING.items()),
    (CompletionRequest, {"model": "m", "prompt": "a"}),
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    (ResponsesRequest, {"model": "m", "input": "a"}),
    (ChatMessage, {"role": "user", "content": "a"}),
]


def values_of(accepted: object) -> list[Any]:
    if isinstance(accepted, type):
        return [accepted(7)]
    if isinstance(accepted, frozenset):
        return sorted(accepted)
    if isinstance(accepted, Mapping):
        return [{key: values_of(each)[0] for key, each in accepted.items()}, {}]
    return [accepted]


@pytest.mark.parametrize(("model", "needed"), MODELS)
def test_an_ignored_value_changes_nothing_and_any_other_is_refused(
    model: type[ConfigModel], needed: dict[str, Any]
) -> None:
    plain = model(**needed)
    for name, row in model.ignored.items():
        if name in model.model_fields:
            continue  # of another decoding type
        for value in [None, *(each for accepted in row for each in values_of(accepted))]:
            assert model(**needed, **{name: value}) == plain, name
        with pytest.raises(ValueError) as refusal:
            model(**needed, **{name: "mistral_large3"})
        expected = absent_reason(name) or "it has no counterpart here"
        assert f"{name} = 'mistral_large3' is refused: {expected}; accepted: " in str(refusal.value)


def test_the_options_of_requests_are_ignored_likewise() -> None:
    for name, row in IGNORED.items():
        for value in (None, *row):
            assert SamplingParams.from_dict({name: value}) == SamplingParams()


def test_a_value_without_effect_is_warned_of_once_and_one_that_asks_for_nothing_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LlmArgs(
        model="m",
        trust_remote_code=True,
        enable_lora=False,
        moe_config={"backend": "TRTLLM"},
        quant_config={"quant_algo": None},
        kv_cache_config={"use_kv_cache_manager_v2": False, "copy_on_partial_reuse": True},
    )
    assert sorted(line.partition(" = ")[0] for line in caplog.messages) == [
        "copy_on_partial_reuse",
        "moe_config",
        "trust_remote_code",
    ]


def all_options() -> set[str]:
    kinds: list[type[ConfigModel]] = [LlmArgs, KvCacheConfig, SchedulerConfig, CudaGraphConfig]
    kinds += [KVEventsConfig, *CONFIG_OF_TYPE.values()]
    paths = {name: row.path for kind in kinds for name, row in kind.renamed.items()}
    renamed = {name for name, path in paths.items() if path not in LlmArgs.ignored}
    return renamed.union(*(kind.model_fields for kind in kinds))


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_is_absent_is_no_option_and_what_to_use_instead_is_one(name: str) -> None:
    assert not any(f"_{name}_" in f"_{option}_" for option in all_options())
    with pytest.raises(ValueError, match=rf"^{name} = 5 is refused: ") as refusal:
        LlmArgs(**{"model": "m", name: 5})
    assert ABSENT[name] in str(refusal.value)
    options = {*all_options(), *SamplingParams.__dataclass_fields__}
    options |= {*ChatCompletionRequest.model_fields, "threshold"}
    for use in re.findall(r"\buse ([\w.]+)", ABSENT[name]):
        assert use.rpartition(".")[2] in options, use
    for flag in re.findall(r"--\w+", ABSENT[name]):
        assert any(flag in option.opts for option in main.params)


def test_few_names_are_absent_with_a_reason() -> None:
    assert len(ABSENT) <= 60


def test_a_family_of_names_has_one_reason() -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", mm_encoder=8, **{"limit-mm-images": ["q"]}, mmx=1)
    lines = str(refusal.value).splitlines()
    assert [line.partition(" is ")[2].partition(";")[0] for line in lines] == [
        "refused: only text is served",
        "refused: only text is served",
        "not a known option",
    ]


def test_the_lists_of_a_model_do_not_overlap() -> None:
    for model, _ in MODELS:
        assert not model.renamed.keys() & model.ignored.keys()
        for name in model.renamed.keys() & model.model_fields:
            assert model.renamed[name].path == name  # with other values


def test_recurrent_states_are_in_float32_by_default() -> None:
    shape = DeltaShape(1, 1, 8, 8, 2)
    geometry = RecurrentGeometry(1, shape, window=1, block=0)
    memory = RecurrentMemory(geometry, 2, torch.bfloat16, torch.device("cpu"))
    assert memory.states.dtype is torch.float32


def test_who_asks_for_another_window_learns_that_the_checkpoint_says_it() -> None:
    with pytest.raises(ValueError, match=r"= \[128\] is refused: config.json says which tokens"):
        LlmArgs(model="m", kv_cache_config={"max_attention_window": [128]})


def test_ignored_lists_hold_no_null() -> None:
    lists: list[Ignored] = [model.ignored for model, _ in MODELS] + [IGNORED]
    assert not any(None in values for each in lists for values in each.values())
