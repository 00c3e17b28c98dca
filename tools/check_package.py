"""Whether the installed package is whole: `make dist` runs it on a wheel that was made from the
sdist, outside of the working tree.

    python tools/check_package.py     # with the package in PYTHONPATH"""

import sys
from pathlib import Path

import tllm_spec
from tllm_spec.cli.version import commit, version_line

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    folder = Path(tllm_spec.__file__).parent
    assert folder != ROOT / "tllm_spec", "this is the working tree"
    speculative = {"decoding_type": "Eagle3", "max_draft_len": 3}
    speculative["speculative_model"] = "zoo:llama-eagle3"
    params = tllm_spec.SamplingParams(max_tokens=8)
    with tllm_spec.LLM("zoo:llama", device="cpu", speculative_config=speculative) as llm:
        output = llm.generate("import os", params)
    assert output.outputs[0].token_ids, "no text"
    sources = {path.name for path in (ROOT / "kernels").rglob("*.cu*")}
    assert sources <= {path.name for path in folder.rglob("*.cu*")}, "a kernel's source is missing"
    assert commit() != "unknown", "the commit is not in the package"
    print(version_line("tllm-serve"), "in", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
