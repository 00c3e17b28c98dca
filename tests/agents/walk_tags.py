import random, json, numpy as np
from tests.agents.fuzz import *
from llguidance import LLMatcher
from tllm_spec.grammars import masks_tokenizer, named_tokens, after_reasoning
from tllm_spec.grammar.grammar_text import grammar_text
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.chat_formats.names import tools_format, REASONING
from tllm_spec.chat_formats.chat_format import Function

for fam in FAMILIES:
    for seed in range(3):
        rng = random.Random(seed)
        answers = [random_answer(rng, fam, i) for i in range(12)]
        used = set()
        scripts = {
            f"<|start {i}|>": pieces_of(rng, a.text, [], used) for i, a in enumerate(answers)
        }
        f = save_scripted(Path("/tmp/agents/d6"), scripts, "x")
        tk = load_tokenizer(str(f))
        ll = masks_tokenizer(tk, len(tk), (tk.eos_token_id,))
        nt = named_tokens(tk, frozenset([tk.eos_token_id]))
        form = tools_format(fam.tools, "")
        for i, a in enumerate(answers):
            if not a.calls:
                continue
            fs = [
                Function(t["function"]["name"], t["function"]["parameters"], True) for t in a.tools
            ]
            part = form.answer_tag(fs, is_parallel=True)
            src = after_reasoning(
                GrammarSource("structural_tag", json.dumps({"format": part})),
                REASONING[fam.reasoning],
                a.section,
            )
            t = grammar_text(src, nt)
            m = LLMatcher(ll, t, log_level=0)
            P = scripts[f"<|start {i}|>"]
            ids = tk.convert_tokens_to_ids(P)
            for k, (p, j) in enumerate(zip(P, ids)):
                b = np.unpackbits(
                    np.frombuffer(m.compute_bitmask(), dtype=np.uint8), bitorder="little"
                )[: len(tk)]
                if not b[j]:
                    m2 = m.deep_copy()
                    ok = m2.try_consume_tokens([j])
                    print(
                        fam.tools,
                        a.section,
                        k,
                        repr("".join(P[:k])[-30:]),
                        repr(p),
                        "masked; consume says",
                        ok,
                        "decoded",
                        ll.decode_bytes([j]),
                        "n allowed",
                        int(b.sum()),
                        m.is_error() and m.get_error()[:200],
                    )
                    if fam.tools == "kimi_k2":
                        print(t[:600])
                    break
                m.try_consume_tokens([j])
