"""The model names that requests may give: the served model's own and those of LoRA adapters, and
the routes that list, load and unload them."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from tllm_spec.config.neighbours import Ignored
from tllm_spec.config.option_checks import check_adapter_name
from tllm_spec.intake import max_model_len
from tllm_spec.server.admission import bad_request, engine_running
from tllm_spec.server.bodies import BodyModel
from tllm_spec.server.fleet import FleetAdapters, ServedAdapter, ServedAdapters
from tllm_spec.server.guard import check_key, folder_below
from tllm_spec.server.options import ServerOptions, has_key
from tllm_spec.server.protocol import AdapterChoice
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.server.replicas import Engine


class LoadAdapterRequest(BodyModel):
    """Body of `/v1/load_lora_adapter`, as vLLM's and SGLang's. lora_path: below `--lora_root`.
    load_inplace: it may have the name of a loaded one. client: the only one that may use it, by the
    name of its key."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    client: str | None = None

    ignored: ClassVar[Ignored] = {
        "is_3d_lora_weight": (True, False),  # the tensors say so
        "lora_int_id": (int,),
        "pinned": (False,),
    }


class UnloadAdapterRequest(BodyModel):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: str

    ignored: ClassVar[Ignored] = {"lora_int_id": (int,)}


class ServedModels:
    """name: the model's own. adapters: None without `lora_config`."""

    def __init__(
        self, name: str, llm: Engine, options: ServerOptions, adapters: FleetAdapters | None
    ) -> None:
        self.name = name
        self._llm, self._options, self._adapters = llm, options, adapters
        self._created = int(time.time())  # noqa: TID251  # a date
        self._loading = asyncio.Lock()

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes."""
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{model:path}", self.model)
        if self._options.lora_key is not None:
            post = partial(app.add_api_route, methods=["POST"], response_model=None)
            for prefix in ("/v1", ""):  # the second is SGLang's
                post(f"{prefix}/load_lora_adapter", self.load)
                post(f"{prefix}/unload_lora_adapter", self.unload)

    async def models(self, request: Request) -> dict[str, Any]:
        """A list with the served model and the adapters that the client may use."""
        served = self._served.values()
        adapters = [each.name for each in served if self._may_use(each, request)]
        names = [self.name, *sorted(adapters)]
        return {"object": "list", "data": [self._card(name) for name in names]}

    async def model(self, model: str, request: Request) -> dict[str, Any]:
        """The served model or an adapter, by its name."""
        if model != self.name and self._found(model, request) is None:
            raise self._unknown(model)
        return self._card(model)

    async def choose(
        self, request: Request, model: str | None, wanted: AdapterChoice | None = None
    ) -> None:
        """Leaves in the scope's state, as `model`, the name that answers have, and as `adapter`
        that of the request's adapter, or None. wanted: TensorRT-LLM's way to name one. Raises
        RequestRefused."""
        model = model or self.name
        if wanted is not None:
            if model not in (self.name, wanted.lora_name):
                message = f"lora_request.lora_name = {wanted.lora_name!r} and model = {model!r}"
                raise RequestRefused(400, f"{message}: they name two adapters")
            model = wanted.lora_name
        adapter = None
        if model != self.name or wanted is not None:
            adapter = self._found(model, request) or await self._loaded(model, request)
        request.scope["state"] |= {
            "model": adapter.name if adapter else self.name,
            "adapter": adapter and adapter.name,
        }

    def load(self, body: LoadAdapterRequest, request: Request) -> dict[str, Any]:
        """`/v1/load_lora_adapter`, for the operator's key only: waits until the adapter is served.
        Not async: it runs in a thread."""
        check_key(request, self._options.lora_key, "load adapters")
        with bad_request(), engine_running():
            root = Path(self._options.lora_root or "")
            folder = folder_below(root, body.lora_path, "lora_path", "--lora_root")
            self._check_name(body.lora_name)
            if body.client is not None and not has_key(self._options.api_key, body.client):
                raise ValueError(f"client = {body.client!r} is no key's name in --api_key @FILE")
            wanted = ServedAdapter.of_folder(body.lora_name, str(folder), client=body.client)
            made = self._own.load(wanted, str(root), replaces=body.load_inplace)
        message = f"LoRA adapter {made.name!r} is loaded"
        told = {"lora_name": made.name, "content_hash": made.content_hash, "rank": made.rank}
        return {"success": True, "message": message, **told}

    def unload(self, body: UnloadAdapterRequest, request: Request) -> dict[str, Any]:
        """`/v1/unload_lora_adapter`, likewise. Requests that run with it end as they would."""
        check_key(request, self._options.lora_key, "unload adapters")
        try:
            with engine_running():
                self._own.unload(body.lora_name)
        except LookupError:
            raise RequestRefused(404, f"lora_name = {body.lora_name!r} is not loaded") from None
        return {"success": True, "message": f"LoRA adapter {body.lora_name!r} is unloaded"}

    def _check_name(self, name: str) -> None:
        check_adapter_name(name)
        if name == self.name:
            raise ValueError(f"lora_name = {name!r} is the model's own name")

    @property
    def _own(self) -> FleetAdapters:
        assert self._adapters is not None  # the options for them need lora_config
        return self._adapters

    @property
    def _served(self) -> ServedAdapters:
        return {} if self._adapters is None else self._adapters.served()

    def _may_use(self, adapter: ServedAdapter, request: Request) -> bool:
        """The operator may use all of them."""
        client = request.scope["state"]["client"]
        owner = adapter.client or self._options.lora_clients.get(adapter.name)
        allowed = [f"key {name}" for name in (owner, self._options.lora_key) if name]
        return owner is None or client in allowed

    def _found(self, model: str, request: Request) -> ServedAdapter | None:
        """Also by SGLang's name `model:adapter`."""
        served = self._served
        found = served.get(model) or served.get(model.removeprefix(f"{self.name}:"))
        return found if found is not None and self._may_use(found, request) else None

    async def _loaded(self, name: str, request: Request) -> ServedAdapter:
        """An adapter that is not served yet, from the folder of its name below `--lora_root`."""
        root = self._options.lora_root
        if root is None or not self._options.lora_auto_load or name in self._served:
            raise self._unknown(name)
        try:
            self._check_name(name)
            folder = folder_below(Path(root), name, "model", "--lora_root")
        except ValueError:
            raise self._unknown(name) from None
        wanted = ServedAdapter.of_folder(name, str(folder), from_request=True)
        if not self._may_use(wanted, request):
            raise self._unknown(name)
        async with self._loading:
            if (found := self._found(name, request)) is not None:
                return found
            with bad_request(), engine_running():
                lora = self._llm.args.lora_config
                most = None if lora is None else lora.max_cpu_loras
                made = await run_in_threadpool(self._own.load, wanted, root, most=most)
        if not self._may_use(made, request):
            raise self._unknown(name)
        return made

    def _unknown(self, model: str) -> RequestRefused:
        more = "" if self._adapters is None else ", and GET /v1/models lists its adapters"
        message = f"model = {model!r} is not served here; the model is {self.name!r}{more}"
        return RequestRefused(404, message, code="model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        parent = {} if name == self.name else {"parent": self.name}
        described = {"id": name, "object": "model", "created": self._created}
        length = max_model_len(self._llm.args, self._llm.max_seq_len)
        return {**described, "owned_by": "tllm_spec", "max_model_len": length, **parent}
