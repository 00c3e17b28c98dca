"""Every file in yaml_examples is a complete set of options, gives the text of plain decoding, and
has accepted drafts if it drafts."""

from pathlib import Path

import pytest

from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.config.option_checks import read_yaml
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

ALL_EXAMPLES = sorted(
    (Path(__file__).parent.parent / "yaml_examples").glob("*.yaml"), key=lambda path: path.stem
)
EXAMPLES = [path for path in ALL_EXAMPLES if path.stem != "mtp"]  # of zoo:llama
REPEATING = "self.items.append(item)\n        self.count += 1\n        "
PROMPTS = [
    "def factorial(n):\n    if n == 0:\n        return 1\n    return ",
    "class Stack:\n    def push(self, item):\n        " + REPEATING * 3,
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
]
OVERLAPPING = {
    *("plain", "eagle3_one_model", "eagle3_two_model", "adaptive", "adaptive_ema"),
    *("eagle3_dynamic_tree", "eagle3_static_tree", "eagle3_onnxruntime", "adaptive_trees"),
    *("draft_target", "draft_target_one_model", "draft_target_onnxruntime"),
    *("rejection_sampling", "schedule", "tensor_parallel", "mtp", "draft_target_token_map"),
    *("sa", "eagle3_sa", "peagle", "pard", "shared_rows", "lora"),
    *("ngram", "ngram_tree", "max_utilization"),
}
# By adaptive example: the kind of its strategy's slots, and its tiers.
STRATEGIES: dict[str, tuple[type, list[int | str]]] = {
    "adaptive": (CostModelSlot, [0, 1, 3, 5]),
    "adaptive_ema": (AdaptiveSpeculativeParams, [0, 1, 3, 7]),
    "adaptive_trees": (CostModelSlot, [0, 1, 3, 5, "3x2/6", "5x4/16"]),
}
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def generate(llm: LLM) -> tuple[list[list[int]], int]:
    """The token ids of every prompt, and how many drafts were accepted for them."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert isinstance(outputs, list)
    llm.check_integrity()
    stats = [output.speculative_decoding for output in outputs]
    num_accepted = sum(one.num_accepted_tokens for one in stats if one is not None)
    return [output.outputs[0].token_ids for output in outputs], num_accepted


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    with LLM("zoo:llama") as llm:
        return generate(llm)[0]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_gives_the_text_of_plain_greedy_decoding_by_its_strategy(
    path: Path, plain_tokens: list[list[int]]
) -> None:
    with LLM("zoo:llama", **read_options(path)) as llm:
        parts = llm._executor.parts
        tokens, num_accepted = generate(llm)
    if path.stem in STRATEGIES:
        kind, tiers = STRATEGIES[path.stem]
        assert {type(slot) for slot in parts.controller._buckets[0].slots} == {kind}
        assert parts.controller.state()["draft_lens"] == tiers
        assert parts.tier_for == parts.controller.tier_for
    assert tokens == plain_tokens and all(len(each) == 8 for each in tokens)
    if path.stem in (
        "adaptive",
        "adaptive_trees",
    ):  # it measures times, and may find that plain decoding is faster
        return
    assert (num_accepted > 0) == (llm.args.speculative_config is not None)


def test_there_is_an_example_for_every_way_of_running() -> None:
    others = {"user_provided", "no_overlap"}
    assert OVERLAPPING | others <= {path.stem for path in ALL_EXAMPLES}


def test_the_mtp_example_gives_the_text_of_plain_greedy_decoding() -> None:
    [path] = [path for path in ALL_EXAMPLES if path.stem == "mtp"]
    with LLM("zoo:deepseek") as llm:
        plain, _ = generate(llm)
    with LLM("zoo:deepseek", **read_yaml(path)) as llm:
        tokens, _ = generate(llm)
        state = llm._executor.parts.controller.state()
    assert tokens == plain and all(len(each) == 8 for each in tokens)
    assert state["draft_lens"] == [0, 1, 3]


def test_rounds_overlap_in_the_examples_without_drafts_on_the_host() -> None:
    args = {path.stem: LlmArgs.from_yaml(path, model="zoo:llama") for path in ALL_EXAMPLES}
    assert {name for name, each in args.items() if each.why_no_overlap is None} == OVERLAPPING
