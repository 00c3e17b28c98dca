"""An engine of short requests and few pages."""

from collections.abc import Iterator

import pytest

from tllm_spec.llm import LLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "zoo:llama", max_seq_len=256, max_num_tokens=64, kv_cache_config={"max_tokens": 192}
    ) as llm:
        yield llm
        llm.check_integrity()
