"""Every file in yaml_examples is a complete set of options, speculates if it says so, and changes no text."""

from pathlib import Path

import pytest

from tllm_spec.config import read_yaml
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

EXAMPLES = sorted((Path(__file__).parent.parent / "yaml_examples").glob("*.yaml"), key=lambda path: path.stem)
REPEATING = "self.items.append(item)\n        self.count += 1\n        "
PROMPTS = [
    "def factorial(n):\n    if n == 0:\n        return 1\n    return ",
    "class Stack:\n    def push(self, item):\n        " + REPEATING * 3,
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def generate(llm: LLM) -> tuple[list[list[int]], int]:
    """The token ids of every prompt, and how many drafts were proposed for them."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert isinstance(outputs, list)
    llm.check_integrity()
    stats = [output.speculative_decoding for output in outputs]
    num_drafted = sum(one.num_drafted_tokens for one in stats if one is not None)
    return [output.outputs[0].token_ids for output in outputs], num_drafted


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    with LLM("zoo:llama") as llm:
        return generate(llm)[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_generates_what_plain_greedy_decoding_does(
    path: Path, plain_tokens: list[list[int]]
) -> None:
    with LLM("zoo:llama", **read_yaml(path)) as llm:
        tokens, num_drafted = generate(llm)
    assert tokens == plain_tokens and all(len(each) == 8 for each in tokens)
    assert (num_drafted > 0) == (llm.args.speculative_config is not None)


def test_there_is_an_example_for_every_way_of_running() -> None:
    ways = {"plain", "ngram", "draft_target", "user_provided"}
    assert ways | {"max_utilization", "rejection_sampling", "schedule"} <= {path.stem for path in EXAMPLES}
