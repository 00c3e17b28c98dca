"""Small models of every family through the engine: windows and trees over the borders of chunks
(Llama 4) and of sliding windows (Mistral; in some layers Qwen2, Gemma 3 and gpt-oss), latents
(DeepSeek), recurrent states (Qwen3-Next), a further layer that drafts (GLM-4.5), the original
length of longrope (Phi-3), experts, and text parts of models that also see images. No drafter,
tier, chunk, prefix hit or preemption changes a text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.lossless.drafters import AdversarialDrafter, AdversarialTreeDrafter
from tests.lossless.small_models import (
    HOST,
    NGRAM,
    ON_GPU,
    PROMPTS,
    SETTINGS,
    TREES,
    assert_deterministic_texts_do_not_depend_on_drafts,
    by_default,
    over_codes,
    plain_texts,
    texts,
    write_head,
)
from tests.lossless.test_adaptive import EVERY_ROUND
from tests.models import mtp_reference, qwen3_next
from tests.models.deepseek import MISTRAL4, save_deepseek
from tests.models.gemma4 import save_assistant, save_larger
from tests.models.gpt_oss import in_mxfp4, save_gpt_oss
from tests.models.helpers import VOCAB_SIZE, random_tokens, save_checkpoint
from tests.models.test_families import MINIMAX, MINISTRAL
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tests.models.test_phi3 import save as save_phi3
from tests.models.with_images import FAMILIES as WITH_IMAGES
from tests.models.with_images import save_with_images
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

# Options, and the least acceptance length of the best request.
Drafters = dict[str, tuple[dict[str, Any] | None, float]]
TIERS: dict[Any, Any] = {"strategy": "ema", **EVERY_ROUND, 1: {"candidate_steps": [0, 1, 3]}}
SHAPES: dict[str, dict[str, Any]] = {"chain": {"max_draft_len": 3}} | TREES
ONE, TWO = "one-model", "two-model"
FOUR = [("chain", ONE), ("dynamic", ONE), ("chain", TWO), ("static", TWO)]


def drafters(
    name: str,
    spec: dict[str, Any],
    one_model: str,
    floor: float,
    ways: Iterable[tuple[str, str]] = FOUR,
    shapes: dict[str, dict[str, Any]] = SHAPES,
) -> Drafters:
    """One for each shape and path. one_model: the option that says which path."""
    return {
        f"{name}, {shape}, {path}": (spec | shapes[shape] | {one_model: path == ONE}, floor)
        for shape, path in ways
    }


def heads(ways: Iterable[tuple[str, str]] = FOUR, name: str = "head") -> Drafters:
    """They were not trained."""
    return drafters(name, {"decoding_type": "Eagle3"}, "eagle3_one_model", 1.0, ways)


def draft_models(ways: Iterable[tuple[str, str]] = FOUR, floor: float = 2.5) -> Drafters:
    """The target is its own draft model, so that most windows over a border are accepted."""
    spec = {"decoding_type": "Draft_Target"}
    return drafters("draft model", spec, "draft_target_one_model", floor, ways)


def modules(shapes: dict[str, dict[str, Any]], floor: float, name: str = "mtp") -> Drafters:
    ways, spec = product(shapes, (ONE, TWO)), {"decoding_type": "MTP"}
    return drafters(name, spec, "mtp_eagle_one_model", floor, ways, shapes)


def assistants(shapes: dict[str, dict[str, Any]]) -> Drafters:
    """They were not trained."""
    return modules(shapes, 1.0, "assistant")


NONE: Drafters = {"none": (None, 1.0), "ngram": (NGRAM, 1.1)}
KNOWN: dict[str, Any] = {"decoding_type": "User_Provided", "max_draft_len": 4}
COMMON: Drafters = NONE | {
    "ngram tree": (NGRAM | TREES["dynamic"], 1.1),
    "sa": ({"decoding_type": "SA", "max_draft_len": 3}, 1.01),
    "known": (KNOWN, 1.5),
}
ALL_WAYS = [*product(SHAPES, (ONE, TWO))]
OVER_BORDERS = NONE | draft_models(ALL_WAYS) | heads(FOUR)
MATCHES = {"max_draft_len": 2, "sa_config": {"threshold": 1}}
VANILLA = {"use_mtp_vanilla": True, "max_draft_len": 2}
OF_DEEPSEEK = modules(
    {"three": {"num_nextn_predict_layers": 3}, "two": {"num_nextn_predict_layers": 2}}
    | {"vanilla": VANILLA, "matches": MATCHES, "vanilla with matches": VANILLA | MATCHES}
    | {"vanilla trees": VANILLA | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3}},
    1.3,
)
OF_DEEPSEEK |= modules(TREES | {"tree": TREES["dynamic"] | {"sa_config": {"threshold": 1}}}, 1.5)
OF_STATES = {
    "chain": {"max_draft_len": 3},
    "adaptive": {"max_draft_len": 3, "adaptive": TIERS},
    "draft lengths by batch": {"max_draft_len": 3, "draft_len_schedule": {1: 3, 2: 0, 3: 2}},
    "shared rows": {"max_draft_len": 3, "verify_budget": 2},
    "matches": MATCHES,
    **TREES,
}

# Of rows that see more keys than are chosen.
OF_SPARSE = modules(OF_STATES | {"vanilla": VANILLA}, 1.3)
# Two requests, which are left while the third is preempted, have no drafts.
BY_BATCH = "draft lengths by batch"
OF_SPARSE |= modules({BY_BATCH: OF_STATES[BY_BATCH]}, 1.1)

OF_ASSISTANTS = OF_STATES | {
    "rejection sampling": {"max_draft_len": 3, "use_rejection_sampling": True},
    "tree with matches": TREES["dynamic"] | {"sa_config": {"threshold": 1}},
}

NO_OVERLAP = {"no_overlap": SETTINGS["prefix_reuse"] | {"disable_overlap_scheduler": True}}
TRITON = {"triton": SETTINGS["prefix_reuse"] | {"attn_backend": "TRITON"}}
WAYS = SETTINGS | TRITON | NO_OVERLAP
# Where all layers have windows, requests give pages back, and none is preempted.
FEW_PAGES = {"few_pages": {"kv_cache_config": SETTINGS["preemption"]["kv_cache_config"]}}
OF_WINDOWS = {name: own for name, own in WAYS.items() if name != "preemption"} | FEW_PAGES
SNAPSHOTS = {"tokens_per_block": 4, "state_snapshot_tokens": 8}
STATES = {
    name: own | {"kv_cache_config": own["kv_cache_config"] | SNAPSHOTS}
    for name, own in (SETTINGS | NO_OVERLAP).items()
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOW = {"max_position_embeddings": 128, "sliding_window": 7}
LONG = {"max_position_embeddings": 128}
# A request has 43 tokens: three chunks, six windows, and a change of Llama 4's temperature.
CHUNKS = {"attention_chunk_size": 16, "floor_scale": 24, "attn_scale": 0.7}


@dataclass(frozen=True)
class Family:
    """layers: that a head captures."""

    save: Callable[[Path], object]
    settings: dict[str, dict[str, Any]]
    drafters: Drafters
    layers: tuple[int, int] = (0, 2)


def checkpoint(name: str, **sizes: Any) -> Callable[[Path], object]:
    return lambda path: save_checkpoint(path, name, **sizes)


def predictable(family: str) -> Callable[[Path], object]:
    return partial(qwen3_next.save_predictable, family=family)


GLM = {"chain": {"max_draft_len": 3}, "vanilla": VANILLA, "dynamic": TREES["dynamic"]}
ALL_OF_STATES = COMMON | {
    "known tree": (KNOWN | {"max_total_draft_tokens": 8}, 1.5),
    "known, shared rows": (KNOWN | {"verify_budget": 3.5}, 1.2),
}
ALL_OF_STATES |= draft_models([("chain", ONE), ("dynamic", TWO)], 1.0) | heads()
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        partial(save_gemma3, **LONG), SETTINGS | TRITON, COMMON | draft_models() | heads()
    ),
    "gemma4": Family(
        save_larger, WAYS, COMMON | draft_models(ALL_WAYS) | heads() | assistants(OF_ASSISTANTS)
    ),
    "gemma4, per layer": Family(
        partial(save_larger, kind="per layer"),
        *(WAYS, COMMON | draft_models() | heads() | assistants({"chain": SHAPES["chain"]})),
    ),
    "gemma4, experts": Family(partial(save_larger, kind="experts"), WAYS, NONE | draft_models()),
    "gpt-oss": Family(
        lambda path: in_mxfp4(path, save_gpt_oss(path, **LONG)),
        *(WAYS, COMMON | draft_models() | heads()),
    ),
    "phi3": Family(partial(save_phi3, **LONG), SETTINGS, COMMON | draft_models() | heads(), (0, 1)),
    "glm": Family(
        partial(mtp_reference.save_predictable, num_modules=2, family="Glm4Moe"),
        *(SETTINGS, NONE | modules(GLM, 1.3)),
    ),
    "Llama4": Family(
        partial(save_llama4, no_rope_layer_interval=2, **LONG, **CHUNKS),
        *(WAYS, OVER_BORDERS, (0, 1)),
    ),
    "Mistral": Family(checkpoint("Mistral", **WINDOW), OF_WINDOWS, OVER_BORDERS, (0, 1)),
    "Qwen2": Family(
        checkpoint("Qwen2", use_sliding_window=True, max_window_layers=1, **WINDOW),
        *(WAYS, OVER_BORDERS, (0, 1)),
    ),
    "Mixtral": Family(checkpoint("Mixtral"), WAYS, NONE),
    "Olmo2": Family(checkpoint("Olmo2"), WAYS, NONE),
    "Mistral4": Family(checkpoint("Mistral4", **MISTRAL4), SETTINGS, NONE),
    "Ministral3": Family(checkpoint("Ministral3", **MINISTRAL), WAYS, NONE),
    "MiniMaxM2": Family(checkpoint("MiniMaxM2", **MINIMAX), WAYS, NONE),
    "Qwen2Moe": Family(
        checkpoint("Qwen2Moe", shared_expert_intermediate_size=40, **EXPERTS), WAYS, NONE
    ),
    "Qwen3Moe": Family(
        checkpoint("Qwen3Moe", head_dim=16, norm_topk_prob=True, mlp_only_layers=[0], **EXPERTS),
        *(WAYS, NONE),
    ),
    **{name: Family(partial(save_with_images, family=name), WAYS, NONE) for name in WITH_IMAGES},
    **{
        name: Family(
            partial(save_deepseek, architecture=name),
            *(SETTINGS, NONE | draft_models([("dynamic", ONE), ("dynamic", TWO)])),
        )
        for name in ("DeepseekV3", "DeepseekV2", "DeepseekV32")
    },
    "deepseek, mtp": Family(
        partial(mtp_reference.save_predictable, num_modules=2),
        *(SETTINGS, OF_DEEPSEEK | heads(ALL_WAYS) | heads(ALL_WAYS, "latent head")),
    ),
    **{
        f"{name}, mtp": Family(
            partial(mtp_reference.save_predictable, num_modules=2, family=name),
            *(WAYS | HOST, NONE | OF_SPARSE | heads([("chain", ONE), ("dynamic", TWO)])),
        )
        for name in ("DeepseekV32", "GlmMoeDsa")
    },
    "qwen3-next": Family(qwen3_next.save_qwen3_next, STATES, ALL_OF_STATES),
    "qwen3-next, mtp": Family(qwen3_next.save_predictable, STATES, modules(OF_STATES, 1.1)),
    **{
        name: Family(
            predictable(name),
            *(STATES, NONE | modules({"chain": SHAPES["chain"]}, 1.1) | heads([("chain", ONE)])),
        )
        for name in ("Qwen3_5", "Qwen3_5Moe")
    },
}
QUICK = [
    ("gemma4", "assistant, rejection sampling, one-model", "preemption"),
    ("gemma4, per layer", "head, dynamic, one-model", "triton"),
    ("Llama4", "draft model, dynamic, one-model", "prefix_reuse"),
    ("Qwen2", "draft model, dynamic, two-model", "preemption"),
    ("deepseek, mtp", "mtp, static, two-model", "chunks"),
    ("GlmMoeDsa, mtp", "mtp, chain, one-model", "host"),
    ("qwen3-next", "ngram tree", "chunks"),
    ("qwen3-next, mtp", "mtp, dynamic, two-model", "preemption"),
    ("Qwen3_5", "mtp, chain, one-model", "no_overlap"),
]


class Models:
    """Checkpoints and their plain texts by family, made when they are first asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.make_folder = make_folder
        self.folder = cache(self.saved)
        self.plain = cache(lambda family: plain_texts(self.folder(family)))
        self.assistant = cache(self.saved_assistant)
        self.head = cache(lambda latent: write_head(make_folder("head"), latent=latent))

    def saved(self, family: str) -> Path:
        path = self.make_folder("model")
        FAMILIES[family].save(path)
        return path

    def saved_assistant(self, family: str) -> Path:
        path = self.folder(family)
        target = transformers.Gemma4ForCausalLM.from_pretrained(path)
        save_assistant(path / "assistant", target)
        return path / "assistant"

    def config(self, family: str, drafter: str) -> dict[str, Any] | None:
        """What makes the drafts: the family's own model, a head, or a drafter that knows texts."""
        config, _ = FAMILIES[family].drafters[drafter]
        kind = None if config is None else config["decoding_type"]
        own: dict[str, Any] = {}
        if kind == "Eagle3":
            head = self.head(drafter.startswith("latent"))
            layers = [*FAMILIES[family].layers]
            own = {"speculative_model": str(head), "eagle3_layers_to_capture": layers}
        elif drafter.startswith("assistant"):
            own = {"speculative_model": str(self.assistant(family))}
        elif kind == "Draft_Target":  # a model with states is no draft model
            model = "Llama" if family == "qwen3-next" else family
            own = {"speculative_model": str(self.folder(model))}
        elif kind == "User_Provided":
            known = dict(zip(map(tuple, PROMPTS), self.plain(family), strict=False))
            maker = AdversarialTreeDrafter if "tree" in drafter else AdversarialDrafter
            own = {"drafter": maker(known, VOCAB_SIZE)}
        return None if config is None else config | own

    def texts(self, family: str, drafter: str, **options: Any) -> tuple[list[list[int]], float]:
        config = self.config(family, drafter)
        own = {} if config is None else {"speculative_config": config}
        return texts(self.folder(family), **own, **options)


FAMILIES["Llama"] = Family(checkpoint("Llama"), {}, {})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    ("family", "drafter", "setting"),
    [
        each
        for name, family in FAMILIES.items()
        for each in by_default(
            [quick for quick in QUICK if quick[0] == name], [name], family.drafters, family.settings
        )
    ],
)
def test_no_drafter_chunk_prefix_hit_or_preemption_changes_the_text(
    family: str, drafter: str, setting: str, models: Models
) -> None:
    found, length = models.texts(family, drafter, **FAMILIES[family].settings[setting])
    assert found == models.plain(family)
    assert length >= FAMILIES[family].drafters[drafter][1], "no draft was accepted"


@pytest.mark.parametrize("drafter", ["head", "draft model", "ngram"])
@pytest.mark.thinned(3)
def test_adaptive_tiers_leave_the_text_alone(drafter: str, models: Models) -> None:
    name = drafter if drafter == "ngram" else f"{drafter}, chain, one-model"
    config = models.config("gpt-oss", name) | {"adaptive": TIERS}
    options = SETTINGS["prefix_reuse"]
    found, _ = texts(models.folder("gpt-oss"), speculative_config=config, **options)
    assert found == models.plain("gpt-oss")


@pytest.mark.parametrize(
    ("family", "drafter", "setting"),
    [
        ("gpt-oss", "ngram tree", "preemption"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("GlmMoeDsa, mtp", "mtp, chain, one-model", "chunks"),
                ("gemma4", "assistant, chain, one-model", "triton"),
                ("Llama4", "ngram", "triton"),
                ("Qwen2", "ngram", "chunks"),
                ("Mistral", "ngram", "few_pages"),
                ("Qwen2", "ngram", "triton"),
                ("gemma4", "head, chain, one-model", "chunks"),
                ("gemma4, per layer", "ngram", "triton"),
                ("gpt-oss", "draft model, chain, one-model", "preemption"),
                ("gpt-oss", "head, chain, one-model", "preemption"),
            )
        ),
    ],
)
def test_over_an_fp8_cache_drafts_leave_the_text_alone(
    family: str, drafter: str, setting: str, models: Models
) -> None:
    alone, _ = texts(models.folder(family), max_batch_size=1, **over_codes(SETTINGS["undisturbed"]))
    found, length = models.texts(family, drafter, **over_codes((WAYS | FEW_PAGES)[setting]))
    assert found == alone
    assert length >= FAMILIES[family].drafters[drafter][1]
    assert family != "gpt-oss" or alone != models.plain(family)


def test_dummy_weights_need_only_the_config(models: Models) -> None:
    folder = models.saved("Qwen3Moe")
    (folder / "model.safetensors").unlink()
    plain, _ = texts(folder, load_format="dummy")
    speculated, _ = texts(folder, load_format="dummy", speculative_config=NGRAM)
    assert speculated == plain and all(len(set(tokens)) > 1 for tokens in plain)


BORDERS = (
    "gemma3",
    "gemma4",
    "gemma4, per layer",
    "gpt-oss",
    "Llama4",
    "Mistral",
    "Qwen2",
    "qwen3-next",
)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["prefix_reuse", "chunks"])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        (name, each)
        for name in (*BORDERS, "glm", "deepseek, mtp", "GlmMoeDsa, mtp", "qwen3-next, mtp")
        for each in FAMILIES[name].drafters
    ],
)
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    family: str, drafter: str, setting: str, models: Models
) -> None:
    options = FAMILIES[family].settings[setting] | ON_GPU
    found, length = models.texts(family, drafter, **options)
    assert found == models.plain(family)
    assert length >= FAMILIES[family].drafters[drafter][1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", BORDERS)
def test_deterministic_gives_the_same_text_with_and_without_drafts(
    family: str, models: Models
) -> None:
    assert_deterministic_texts_do_not_depend_on_drafts(models.folder(family))


# Recurrent states.


def test_a_prefix_is_reused_up_to_a_copy_of_the_states(models: Models) -> None:
    """40 of 44 tokens are reused, the greatest multiple of 8. There are as many copies as requests
    may run; a prompt takes 5, and with only one it takes it away from another prompt."""
    prompts = [random_tokens(44, seed=seed) for seed in (5, 6)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for max_batch_size, expected in ((10, [0, 0, 40, 40]), (1, [0, 0, 0, 0])):
        options: dict[str, Any] = {"max_seq_len": 64, "kv_cache_config": SNAPSHOTS}
        options |= {"skip_tokenizer_init": True, "max_batch_size": max_batch_size}
        with LLM(str(models.folder("qwen3-next")), **options) as llm:
            found = [llm.generate(prompt, params) for prompt in prompts * 2]
            llm.check_integrity()
        assert [output.cached_tokens for output in found] == expected
        assert [each.outputs[0].token_ids for each in found[:2]] == [
            each.outputs[0].token_ids for each in found[2:]
        ]


def test_a_prompt_in_a_broken_round_is_read_again_from_its_start(models: Models) -> None:
    """Its chunk in that round has changed the states, and must not do so twice."""

    def break_third(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 7:
            raise RuntimeError("broken")
        return logits

    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=0)
    broken = SamplingParams(max_tokens=24, ignore_eos=True, logits_processor=break_third)
    options: dict[str, Any] = SETTINGS["chunks"] | {"skip_tokenizer_init": True}
    with LLM(str(models.folder("qwen3-next")), max_seq_len=64, **options) as llm:
        first, second = llm.generate([[1, 2, 3, 4, 5], PROMPTS[0] * 2], [broken, params])
        alone = llm.generate(PROMPTS[0] * 2, params)
        llm.check_integrity()
    assert "broken" in str(first.error)
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_model_with_states_is_refused_as_draft_model(models: Models) -> None:
    folder = str(models.folder("qwen3-next"))
    own = {"decoding_type": "Draft_Target", "speculative_model": folder, "max_draft_len": 2}
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM, which is served as a target only"):
        LLM(folder, skip_tokenizer_init=True, speculative_config=own)
