"""`LLM` with LoRA adapters: which adapter a request has, how adapters come and go, and that every
cache knows them apart."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.adapters.folders import merged
from tests.adapters.tiny_adapters import ALPHA, LORA, NAMES, RANK, pairs_of, write_adapters
from tests.executor.test_draft_weights import copy_of
from tests.lossless.engines import tiny_engine
from tests.server.http_answers import SECONDS
from tllm_spec import LLM, LoraConfig, LoRARequest
from tllm_spec.adapters.adapter_folder import Adapter
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.resources.radix import block_hashes
from tllm_spec.llmapi import LoRARequest as OfLlmapi
from tllm_spec.lora_request import AdapterInfo, UnknownAdapter, salt_of
from tllm_spec.outputs import RequestOutput
from tllm_spec.recording import replay as recorded
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.request_errors import RequestError
from tllm_spec.request_handle import RequestHandle

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PARAMS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), tiny)


def make_llm(model: Path, **options: Any) -> LLM:
    own = {"skip_tokenizer_init": True, "max_batch_size": 4, "max_seq_len": 128}
    return LLM(model, **own | {"lora_config": LORA} | options)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with make_llm(tiny) as llm:
        yield llm
        llm.check_integrity()


def text(llm: LLM, adapter: LoRARequest | None = None) -> list[int]:
    output = llm.generate(PROMPT, PARAMS, lora_request=adapter)
    assert isinstance(output, RequestOutput)
    return output.outputs[0].token_ids


def test_each_prompt_of_a_list_has_its_own_adapter_or_none(llm: LLM, adapters: Path) -> None:
    requests = [None, *(LoRARequest(name, 1, adapters / name) for name in NAMES)]
    alone = [text(llm, request) for request in requests]
    assert len(set(map(tuple, alone))) == 4
    outputs = llm.generate([PROMPT] * 4, PARAMS, False, lora_request=requests)
    assert [each.outputs[0].token_ids for each in outputs] == alone
    both = llm.generate([PROMPT] * 2, PARAMS, False, lora_request=LoRARequest("b"))
    assert [each.outputs[0].token_ids for each in both] == [alone[2]] * 2
    streamed = llm.generate_async(PROMPT, PARAMS, streaming=True, lora_request=LoRARequest("a"))
    assert list(streamed)[-1].outputs[0].token_ids == alone[1]


def test_threads_that_use_a_folder_first_at_the_same_time_load_it_once_each(
    llm: LLM, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, both_read = llm._executor.parts.adapters, Barrier(2)
    assert slots is not None
    expected, read = text(llm, LoRARequest("a", 1, adapters / "a")), slots.read

    def read_with_another(folder: str, root: str | None = None) -> Adapter:
        both_read.wait(SECONDS)
        return read(folder, root)

    monkeypatch.setattr(slots, "read", read_with_another)
    request = LoRARequest("shared", 1, adapters / "a")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: text(llm, request), range(2)))
    assert found == [expected] * 2
    llm.unload_adapter("shared")


def test_an_adapter_that_made_room_before_its_request_was_submitted_is_loaded_again(
    tiny: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (LoRARequest(name, 1, adapters / name) for name in ("a", "b"))
    with make_llm(tiny, lora_config={**LORA, "max_loras": 1, "max_cpu_loras": 1}) as llm:
        alone, loading = text(llm, first), llm._adapters
        llm.unload_adapter("a")
        load = loading.load

        def load_then_others(name: str, folder: str, **options: bool) -> AdapterInfo:
            info = load(name, folder, **options)
            if not others:
                others.append(text(llm, second))
            return info

        others: list[list[int]] = []
        monkeypatch.setattr(loading, "load", load_then_others)
        assert text(llm, first) == alone != others[0]
        submit = llm.submit

        def submit_alone(*given: Any) -> RequestHandle:
            with ThreadPoolExecutor(1) as threads:
                can_change = threads.submit(loading._changing.acquire, blocking=False).result()
            assert not can_change, "none makes room for others while its request is submitted"
            return submit(*given)

        monkeypatch.setattr(llm, "submit", submit_alone)
        assert text(llm, first) == alone
        llm.check_integrity()


def test_what_is_no_adapter_is_refused_by_a_sentence(llm: LLM, adapters: Path) -> None:
    assert OfLlmapi is LoRARequest
    for name in ("", "-a", "a" * 129, "a/b", 3):
        with pytest.raises(ValueError, match="1 to 128 letters, digits and any of"):
            LoRARequest(name)
    with pytest.raises(UnknownAdapter, match="lora_name = 'x': no adapter with this name"):
        text(llm, LoRARequest("x"))
    with pytest.raises(UnknownAdapter, match="'x'"):
        llm.unload_adapter("x")
    llm.load_adapter("c", adapters / "c")
    with pytest.raises(RequestError, match=r"lora_path = .*/b': 'c' is loaded from .*/c"):
        text(llm, LoRARequest("c", 0, str(adapters / "b")))
    with pytest.raises(ValueError, match="is no adapter in PEFT's format"):
        llm.load_adapter("d", adapters)
    assert "d" not in {info.name for info in llm.adapters}
    outputs = llm.generate([PROMPT] * 2, PARAMS, False, lora_request=[LoRARequest("x"), None])
    assert [each.error is None for each in outputs] == [False, True]


def test_without_lora_config_there_are_no_adapters(tiny: Path, adapters: Path) -> None:
    with make_llm(tiny, lora_config=None) as llm:
        assert llm.adapters == ()
        for use in (
            lambda: text(llm, LoRARequest("a", 0, adapters / "a")),
            lambda: llm.load_adapter("a", adapters / "a"),
            lambda: llm.unload_adapter("a"),
        ):
            with pytest.raises(ValueError, match=r"lora_config = \{\} serves them"):
                use()


def test_adapters_of_the_options_are_loaded_at_the_start(tiny: Path, adapters: Path) -> None:
    own = {"lora_dir": str(adapters / "a"), "lora_target_modules": ["attn_q", "v_proj"]}
    with pytest.raises(ValueError, match="lora_target_modules does not have 'o_proj'"):
        make_llm(tiny, lora_config=own)
    with pytest.raises(ValueError, match="no layers for adapters that are named 'attn_qkv'"):
        make_llm(tiny, lora_config=own | {"lora_target_modules": ["q_proj", "attn_qkv"]})
    folders = [adapters / "a", adapters / "b"]
    with make_llm(tiny, lora_config=LoraConfig(lora_dir=folders, max_lora_rank=4)) as llm:
        assert [(each.name, each.rank) for each in llm.adapters] == [("a", 4), ("b", 4)]
        assert text(llm, LoRARequest("a")) != text(llm)
        state = llm.server_info()["internal_states"]
        [own] = [state] if isinstance(state, dict) else state
        assert set(own["adapters"]["loaded"]) == {"a", "b"}
    with pytest.raises(ValueError, match="r is 4; accepted is 1 to max_lora_rank, which is 2"):
        make_llm(tiny, lora_config={"lora_dir": folders, "max_lora_rank": 2})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_cpu_loras": 2}, "max_cpu_loras = 2 must be at least max_loras = 4"),
        ({"max_loras": 0}, "max_loras = 0"),
        ({"lora_target_modules": []}, "it has no entry; null means all linear layers"),
        ({"lora_dtype": "float16"}, "lora_dtype"),
    ],
)
def test_options_of_adapters_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs(model="m", lora_config=options)


def test_an_update_of_the_target_acts_on_its_own_weights_and_adapters_stay(
    tiny: Path, adapters: Path, tmp_path: Path
) -> None:
    other = copy_of(str(tiny), tmp_path / "other", 0.9)
    folder = merged(other, tmp_path / "merged", pairs_of(other, "a"), ALPHA / RANK)
    expected = []
    for model in (other, folder):
        with make_llm(model, lora_config=None) as llm:
            expected.append(text(llm))
    with make_llm(tiny) as llm:
        request = LoRARequest("a", 0, adapters / "a")
        before = [text(llm), text(llm, request)]
        llm.update_weights(other)
        assert [text(llm), text(llm, request)] == expected != before
        llm.check_integrity()


def test_recorded_traffic_and_names_of_blocks_have_the_adapters_content(
    tiny: Path, adapters: Path, tmp_path: Path
) -> None:
    with make_llm(tiny, record_traffic=str(tmp_path)) as llm:
        info = llm.load_adapter("a", adapters / "a")
        text(llm, LoRARequest("a"))
        text(llm)
    assert [each.adapter for each in read_records(tmp_path)] == [info.version, None]
    assert info.version == f"a@{info.content_hash}" and len(info.content_hash) == 64
    salts = [None, "s", info.version, f"{info.version}s", salt_of(None, info.version)]
    salts += [salt_of("s", info.version), salt_of("s", f"{info.version}s")]
    hashes = [block_hashes(PROMPT, 4, salt)[0] for salt in salts]
    assert len(set(hashes)) == len(hashes)


def test_a_replay_reads_the_texts_with_their_adapters(
    tiny: Path, drafts: tuple[Path, Path], adapters: Path, tmp_path: Path
) -> None:
    drafting = tiny_engine("eagle3", drafts, 3)
    with make_llm(tiny, record_traffic=str(tmp_path), **drafting) as llm:
        requests = [None, *(LoRARequest(name, 0, adapters / name) for name in NAMES)]
        llm.generate([PROMPT] * 4, PARAMS | {"max_tokens": 60}, False, lora_request=requests)
    records = sorted(read_records(tmp_path), key=lambda record: record.id)
    served = [record.stats for record in records]
    folders = [str(adapters / name) for name in NAMES]
    found = []
    for lora in (LORA | {"lora_dir": folders}, None):
        options = {"skip_tokenizer_init": True, "max_seq_len": 128, "lora_config": lora}
        found.append(replay(records, LlmArgs.from_kwargs(tiny, **options | drafting)))
    assert found[0].requests == served and not found[0].simulated
    assert found[1].simulated == ["some requests had a LoRA adapter that lora_dir does not have"]


def test_a_replay_shares_n_grams_only_between_requests_with_the_same_adapter(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"decoding_type": "NGram", "max_draft_len": 3, "is_public_pool": True}
    options = {"skip_tokenizer_init": True, "max_batch_size": 1, "speculative_config": spec}
    with make_llm(tiny, record_traffic=str(tmp_path), **options) as llm:
        text(llm)
    monkeypatch.setattr(recorded, "MAX_BATCH_SIZE", 1)
    [record] = read_records(tmp_path)
    args = LlmArgs.from_kwargs(tiny, **options)
    adapted = record.model_copy(update={"adapter": "a@hash"})
    same = replay([record, record], args).requests
    other = replay([record, adapted], args).requests
    both = replay([adapted, adapted], args).requests
    assert same[1].num_accepted_tokens > same[0].num_accepted_tokens
    assert (other[1], both[1]) == (other[0], same[1])
