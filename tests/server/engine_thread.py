"""An engine process' insides in a thread, and clients of it."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.sampling_params import RequestOptions
from tllm_spec.server.engine_client import EngineClient, EngineConnection
from tllm_spec.server.engine_process import EngineProcess
from tllm_spec.text.tokenizer import load_tokenizer

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_batch_size": 4,
    "kv_cache_config": {"max_tokens": 4096},
    "enable_iter_perf_stats": True,
    "speculative_config": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "zoo:llama-draft",
    },
}
ARGS = LlmArgs.from_kwargs("zoo:llama", **OPTIONS)
# Without the tokenizer of masks.
WITHOUT_GRAMMARS = LlmArgs.from_kwargs("zoo:llama", **OPTIONS, guided_decoding_backend=None)
PROMPT = "def f("
STREAMED = RequestOptions(streaming=True)

Use = Callable[[EngineClient], Awaitable[Any]]


class Engine:
    """An engine process' insides, in a thread. draft_version: as of `EngineProcess`."""

    def __init__(
        self,
        folder: Path,
        name: str = "engine",
        draft_version: int | None = None,
        args: LlmArgs = ARGS,
    ) -> None:
        self.path = str(folder / name)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self.process = EngineProcess(args, self._listener, lambda: None, draft_version)
        self._thread = threading.Thread(target=self.process.run)
        self._thread.start()

    def part(self, name: str) -> Any:
        """What of it can be changed, as `EngineProcess.parts` has it."""
        return self.process.parts[name]

    def close(self) -> None:
        self.process.stop()
        self._thread.join()
        self._listener.close()
        for link in self.process._loop._links:  # as the system does at the end of a process
            link.close()

    def use(self, function: Use, timeout: float | None = None) -> Any:
        """The function's result with a client that is connected."""

        async def run() -> Any:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(EngineConnection, self.path)
            limits = await connection.limits
            tokenizer = load_tokenizer("zoo:llama")
            client = EngineClient(ARGS, tokenizer, connection, limits, timeout)
            try:
                return await function(client)
            finally:
                client.shutdown()

        return asyncio.run(run())
