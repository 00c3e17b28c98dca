"""`POST /v1/draft_model`: swaps draft weights while requests run. For the operator's key only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from tllm_spec.server.admission import bad_request, engine_running
from tllm_spec.server.body_model import BodyModel
from tllm_spec.server.engine import Engine
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.refusals import RequestRefused


class DraftModelRequest(BodyModel):
    """Body of `/v1/draft_model`. folder: below `--draft_model_root`. keep_cache: cached prefixes
    of the old weights go on being reused. force: also if recorded traffic shows that it is worse.
    """

    folder: str
    keep_cache: bool = False
    force: bool = False


class DraftRoutes:
    """There are none without a `draft_model_root`."""

    def __init__(self, llm: Engine, options: ServerOptions) -> None:
        self._llm = llm
        self._is_on = options.draft_model_root is not None
        self._root = Path(options.draft_model_root or "").resolve()
        self._client = f"key {options.draft_model_key}"

    def add_to(self, app: FastAPI) -> None:
        if self._is_on:
            app.add_api_route("/v1/draft_model", self.swap, methods=["POST"])

    def swap(self, body: DraftModelRequest, request: Request) -> dict[str, Any]:
        """Waits until the weights are served. Not async: it runs in a thread."""
        if request.scope["state"]["client"] != self._client:
            raise RequestRefused(403, "this key may not swap draft weights")
        with bad_request(), engine_running():
            folder = self._folder(body.folder)
            told = self._llm.load_draft_weights(
                str(folder), keep_cache=body.keep_cache, force=body.force
            )
        return told | {"folder": body.folder}

    def _folder(self, name: str) -> Path:
        """Symbolic links are followed before it is compared with the root."""
        folder = self._root if "\0" in name else (self._root / name).resolve()
        if folder == self._root or self._root not in folder.parents or not folder.is_dir():
            raise ValueError(f"folder = {name!r} is not a folder below --draft_model_root")
        return folder
