"""A GGUF file is served as the folder with the same weights, and drafts do not change its text."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.lossless.engines import engine
from tests.server.served_process import ServedProcess, complete
from tllm_spec.distributed.rank_checks import fingerprint
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

gguf = pytest.importorskip("gguf")

from tests.models.gguf_checkpoint import add_tokenizer, save_gguf  # noqa: E402 (skips without it)

TEXT = "def größe(self):\n    return '日本語' + \"🙂\"\n"
CHAT = [{"role": "user", "content": "import os"}]
OPTIONS: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 512}


@pytest.fixture(scope="module")
def zoo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's target in one file, unquantised."""
    from transformers import AutoConfig

    folder = resolve_model("zoo:llama")
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    tensors = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    return save_gguf(
        path, "llama", config, tensors, settle=lambda writer: add_tokenizer(writer, folder)
    )


def test_its_tokenizer_is_that_of_the_file(zoo_file: Path) -> None:
    found, expected = load_tokenizer(zoo_file), load_tokenizer("zoo:llama")
    assert found.get_vocab() == expected.get_vocab()
    assert found.eos_token_id == expected.eos_token_id
    tokens = found.encode(TEXT, add_special_tokens=False)
    assert found.decode(tokens) == expected.decode(tokens) == TEXT
    rendered = [
        each.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        for each in (found, expected)
    ]
    assert rendered[0] == rendered[1]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", ["eagle3", "plain", "ngram", "draft_target"])
def test_its_text_is_that_of_the_folder(mode: str, zoo_file: Path) -> None:
    prompts = [load_tokenizer("zoo:llama").encode(text) for text in (TEXT, "import os\nimport ")]
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=3)
    with LLM("zoo:llama", **OPTIONS) as llm:
        expected = llm.generate(prompts, params)
    options = engine(mode, 3)
    if mode == "draft_target":
        options["speculative_config"]["speculative_model"] = str(zoo_file)
    with LLM(zoo_file, **OPTIONS, **options) as llm:
        found = llm.generate(prompts, params)
        llm.check_integrity()
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in expected
    ]


def test_ranks_compare_samples_of_the_file(zoo_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(zoo_file.read_bytes())
    assert fingerprint(str(other)) == fingerprint(str(zoo_file))
    other.write_bytes(zoo_file.read_bytes()[:-1] + b"\1")
    assert fingerprint(str(other)) != fingerprint(str(zoo_file))


@pytest.mark.slow
def test_http_fronts_read_its_tokenizer(zoo_file: Path, tmp_path: Path) -> None:
    """transformers needs torch for it, which fronts do without otherwise."""
    with ServedProcess(tmp_path, tokenizer=str(zoo_file)) as served:
        assert complete(served.url) == 200
