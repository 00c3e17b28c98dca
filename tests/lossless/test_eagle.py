"""What an EAGLE-1/2 head drafts does not depend on the cache or the path. That its text is plain
decoding's is in `test_equality`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lossless.cases import Case, generate
from tests.lossless.test_equality import Run, leave_prefixes, make_llm
from tllm_spec.outputs import RequestOutput, SpeculativeStats


def stats_of(outputs: list[RequestOutput]) -> SpeculativeStats:
    return sum(
        (output.speculative_decoding or SpeculativeStats() for output in outputs),
        SpeculativeStats(),
    )


@pytest.mark.parametrize(
    "setting", [pytest.param("chunked_prefill", marks=pytest.mark.slow), "prefix_reuse"]
)
def test_chunks_prefix_hits_and_the_path_change_no_draft(
    fitted_file: Callable[[str], Path], cases: list[Case], setting: str
) -> None:
    found = []
    for mode, own in (("eagle", "undisturbed"), ("eagle", setting), ("eagle_two_model", setting)):
        with make_llm(Run(mode, own, 3, 8, True), {}, fitted_file) as llm:
            if own == "prefix_reuse":
                leave_prefixes(llm, cases)
            found.append(stats_of(generate(llm, cases, 8)))
    assert found[0] == found[1] == found[2]
