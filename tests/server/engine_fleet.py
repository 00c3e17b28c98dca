"""Two engines in threads, and fronts of them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, random_pairs, write_adapter
from tests.executor.test_draft_weights import copy_of
from tests.server.engine_thread import OPTIONS, PROMPT, Engine
from tests.server.http_answers import SECONDS, wait_for
from tllm_spec import SamplingParams
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.server.engine_process import with_served_target
from tllm_spec.server.fleet import FleetAdapters
from tllm_spec.server.replicas import Replicas
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

TARGET, DRAFT = "zoo:llama", "zoo:llama-draft"
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=5)


def write_adapters(root: Path, *names: str) -> None:
    """An adapter folder of each name, with numbers of its own."""
    tensors = load_file(Path(resolve_model(TARGET)) / "model.safetensors")
    shapes = linear_shapes(tensors, "q_proj", "down_proj")
    for name in names:
        write_adapter(root / name, random_pairs(shapes, seed=sum(name.encode())))


class Fleet:
    """draft, target: weights with other drafts, and with other answers, than those at the start.
    root: of the adapters' folders; the first adapter is x, of the folder a."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        lora = None if root is None else {"lora_dir": {"x": str(root / "a")}, "max_loras": 2}
        own = {"guided_decoding_backend": None, "lora_config": lora}
        self.root, self.args = root, LlmArgs.from_kwargs(TARGET, **OPTIONS | own)
        self.engines = [Engine(folder, f"engine{n}", 0, self.args) for n in range(2)]
        self.paths = [engine.path for engine in self.engines]
        self.draft = str(copy_of(DRAFT, folder / "draft", 0.9))
        self.target = str(copy_of(TARGET, folder / "target", 0.9))
        if root is not None:
            for engine in self.engines:
                FleetAdapters(self.paths[0]).publish(engine.part("adapters").infos)

    @property
    def parts(self) -> list[Any]:
        """The executors' parts."""
        return [engine.process._executor.parts for engine in self.engines]

    def use(self, function: Callable[[Replicas], Awaitable[Any]]) -> Any:
        """The function's result with a front that is connected to both."""

        async def run() -> Any:
            tokenizer = load_tokenizer(TARGET)
            replicas = await Replicas.connected(self.args, tokenizer, self.paths, SECONDS)
            await asyncio.to_thread(wait_for, lambda: len(replicas.running_engines()) == 2)
            try:
                return await function(replicas)
            finally:
                replicas.shutdown()

        return asyncio.run(run())

    def ask(self, question: Callable[[Replicas], Any]) -> Any:
        """What a front's method returns, which waits for the engines."""

        async def ask(replicas: Replicas) -> Any:
            return await asyncio.to_thread(question, replicas)

        return self.use(ask)

    def texts(self) -> list[str]:
        """What each engine answers."""

        async def ask(replicas: Replicas) -> list[str]:
            handles = [each.submit(PROMPT, PARAMS) for each in replicas.running_engines()]
            return [(await handle).outputs[0].text for handle in handles]

        found: list[str] = self.use(ask)
        return found

    def start_again(self, number: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ends an engine, if it has not, and starts one in its place."""
        path = Path(self.paths[number])
        self.engines[number].close()
        meanwhile()
        path.unlink()
        args, _ = with_served_target(self.args, self.paths)
        self.engines[number] = Engine(path.parent, path.name, 0, args)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            engine.process._executor.check_integrity()
