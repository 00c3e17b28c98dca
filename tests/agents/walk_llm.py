import random, sys, json, collections
from pathlib import Path
from tests.agents.fuzz import *
from tllm_spec import LLM, SamplingParams
from tllm_spec.chat_formats.names import tools_format
from tllm_spec.chat_formats.chat_format import Function

stat = collections.Counter()
for fam in FAMILIES:
    for seed in range(3):
        rng = random.Random(seed)
        answers = [random_answer(rng, fam, i) for i in range(12)]
        used = set()
        try:
            scripts = {
                f"<|start {i}|>": pieces_of(rng, a.text, [], used) for i, a in enumerate(answers)
            }
        except AssertionError as e:
            print("cut", e)
            continue
        f = save_scripted(Path("/tmp/agents/d"), scripts, template_of(fam, answers))
        with LLM(
            str(f),
            max_num_tokens=4096,
            max_seq_len=4096,
            reasoning_parser=fam.reasoning,
            kv_cache_config={"max_tokens": 8192},
        ) as llm:
            tk = llm.tokenizer
            form = tools_format(fam.tools, "")
            for i, a in enumerate(answers):
                if not a.calls:
                    continue
                fs = [
                    Function(t["function"]["name"], t["function"]["parameters"], True)
                    for t in a.tools
                ]
                for kind in ("auto", "required"):
                    if kind == "required" and a.content:
                        continue
                    part = (
                        form.answer_tag(fs, is_parallel=True)
                        if kind == "auto"
                        else form.calls_tag(fs, is_parallel=True)
                    )
                    prompt = tk.apply_chat_template(
                        [{"role": "user", "content": str(i)}],
                        tokenize=True,
                        add_generation_prompt=True,
                    )
                    prompt = list(prompt["input_ids"]) if hasattr(prompt, "keys") else list(prompt)
                    try:
                        o = llm.generate(
                            prompt,
                            {
                                "max_tokens": 80,
                                "guided_decoding": {
                                    "structural_tag": {"type": "structural_tag", "format": part}
                                },
                            },
                        ).outputs[0]
                    except ValueError as e:
                        print(fam.tools, kind, "ERR", str(e)[:300])
                        stat[fam.tools, kind, "err"] += 1
                        continue
                    s = f"<|start {i}|>"
                    ids = tk.convert_tokens_to_ids([s, *scripts[s], "<|end|>"])
                    ok = list(o.token_ids) == ids[1:] or list(o.token_ids) == ids[1:-1]
                    stat[fam.tools, kind, ok] += 1
                    if not ok and stat[fam.tools, kind, False] < 3:
                        got = list(o.token_ids)
                        n = next((k for k, (x, y) in enumerate(zip(got, ids[1:])) if x != y), -1)
                        print(
                            fam.tools,
                            kind,
                            a.section,
                            "at",
                            n,
                            repr("".join(scripts[s][:n])[-60:]),
                            "wanted",
                            repr((scripts[s] + ["END"])[n]),
                            "got",
                            repr(tk.decode(got[n : n + 2])),
                            o.finish_reason,
                        )
for k, v in sorted(stat.items(), key=str):
    print(k, v)
