"""The process that runs chat templates (`template_process.py` starts it): a template that takes too
long or too much memory is ended with its process, and harms nothing else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tllm_spec.child_messages import answer_messages, read_message
from tllm_spec.executor.faults import described

MAX_CHARS = 16 << 20  # of a rendered text, and of an error
MAX_EXTRA_BYTES = 1 << 30  # of address space, on top of what the libraries have taken
TOO_LARGE = f"the chat template made more than {MAX_CHARS} characters"


def _answer(message: Mapping[str, Any]) -> dict[str, str]:
    from transformers import PreTrainedTokenizerBase  # heavy

    class Template:
        """What transformers reads of a tokenizer when it renders a text."""

        chat_template = message["template"]
        special_tokens_map = message["special_tokens"]
        get_chat_template = PreTrainedTokenizerBase.get_chat_template
        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    render: Any = Template().apply_chat_template
    try:
        text = render(message["messages"], tokenize=False, **message["options"])
    except MemoryError:
        return {"over_limit": TOO_LARGE}
    except Exception as error:  # noqa: BLE001 # a template is a program: any can come out of it
        return {"error": described(error)[:MAX_CHARS]}
    return {"over_limit": TOO_LARGE} if len(text) > MAX_CHARS else {"text": text}


def main() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but messages goes to the pipe
    _answer(read_message(source))  # imports the libraries before memory is limited
    answer_messages(source, out, _answer, max_extra_bytes=MAX_EXTRA_BYTES)


if __name__ == "__main__":
    main()
