"""zoo:deepseek in the engine, on held-out code: both paths and both kinds of MTP leave the text
alone and accept what the zoo's page says."""

import pytest

from tests.zoo.runs import ZOO
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

MODEL = "zoo:deepseek"
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
Texts = tuple[list[list[int]], float]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(ZOO / "deepseek")
    sources = (read_source(file)[1000:2000] for file in heldout_files())
    return [tokenizer.encode(source)[:100] for source in sources if len(source) == 1000][:8]


def generate(prompts: list[list[int]], **options: object) -> Texts:
    """Each prompt's tokens, and the mean acceptance length."""
    with LLM(MODEL, max_batch_size=6, max_seq_len=160, **options) as llm:
        found = llm.generate(prompts, PARAMS, use_tqdm=False)
        llm.check_integrity()
    lengths = [
        each.speculative_decoding.acceptance_length for each in found if each.speculative_decoding
    ]
    return [each.outputs[0].token_ids for each in found], sum(lengths) / len(found)


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return generate(prompts)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_model", "is_vanilla", "draft_len", "bar"),
    [
        (True, False, 3, 2.2),
        (False, True, 2, 1.9),
        pytest.param(False, False, 3, 2.2, marks=pytest.mark.slow),
        pytest.param(True, True, 2, 1.9, marks=pytest.mark.slow),
    ],
)
def test_the_models_own_modules_are_accepted_on_heldout_code(
    one_model: bool,
    is_vanilla: bool,
    draft_len: int,
    bar: float,
    prompts: list[list[int]],
    plain: list[list[int]],
) -> None:
    mtp = {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": draft_len,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
    }
    found, acceptance_length = generate(prompts, speculative_config=mtp)
    assert found == plain
    assert acceptance_length >= bar


@pytest.mark.slow
@pytest.mark.parametrize("one_model", [True, False], ids=["one", "two"])
def test_a_tree_of_the_models_own_module_is_accepted_further_than_a_chain(
    one_model: bool, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    mtp = {"decoding_type": "MTP", "max_draft_len": 3, "mtp_eagle_one_model": one_model}
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 12}
    found, of_tree = generate(prompts, speculative_config=mtp | tree)
    assert found == plain
    _, of_chain = generate(prompts, speculative_config=mtp)
    assert of_tree > of_chain + 0.2
