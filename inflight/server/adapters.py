"""Adapters that clients load by name, and the engine's adapter slots that hold them."""

import asyncio
from dataclasses import dataclass

from inflight.server.engine import ServedEngine
from inflight.server.options import PLACE
from inflight.server.responses import ApiError
from inflight.server.updates import Updates


@dataclass(slots=True, eq=False)
class Adapter:
    """Adapter with the name that clients use."""

    name: str
    path: str
    place: str
    """Name of its slot in the engine, one of the adapter names that the engine was launched with. Empty: the weights
    alone."""
    version: int = 0
    """Weight version that loaded it."""
    num_using: int = 0
    """Number of requests that are using it or are about to use it."""
    unloaded: bool = False


class Adapters:
    """Loaded adapters. A slot is free again when its adapter was unloaded and no request uses it."""

    def __init__(self, engine: ServedEngine, updates: Updates):
        self._updates = updates
        self.places = list(engine.options.adapters) if engine.info.adapter_layout is not None else []
        self.rank = engine.options.lora_rank
        self.loaded: dict[str, Adapter] = {}
        self._trained = {place: Adapter(place, "", place) for place in self.places if not place.startswith(PLACE)}
        self._taken: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()

    @property
    def by_name(self) -> dict[str, Adapter]:
        """Map the names that requests can use to adapters: adapters that clients loaded, and adapters that a trainer
        publishes."""
        untouched = {name: adapter for name, adapter in self._trained.items() if name not in self._taken}
        return untouched | self.loaded

    async def load(self, name: str, path: str, *, in_place: bool, label: str | None = None) -> Adapter:
        """Load the adapter of a directory. Requests that name it use it once this returns.

        in_place: an adapter with this name is replaced, and its requests in progress continue with the new one. label:
        the name that clients give the version that loads it. Raises ApiError, and WeightFileError or
        LayoutMismatchError for files that do not fit."""
        if not self.places:
            raise ApiError(404, "this engine holds no adapters; start the server with --lora-rank")
        async with self._changing:
            old = self.loaded.get(name)
            if old is not None and not in_place:
                raise ApiError(
                    400, f"the adapter {name!r} is loaded already; send load_inplace to replace it", param="lora_name"
                )
            adapter = old or Adapter(name, path, self._free_place())
            self._taken[adapter.place] = adapter
            try:
                adapter.version = await self._updates.publish_adapters(
                    lambda files: files.load(adapter.place, path), label
                )
            except BaseException:
                if old is None:
                    del self._taken[adapter.place]
                raise
            adapter.path = path
            self.loaded[name] = adapter
            return adapter

    async def unload(self, name: str) -> None:
        """Refuse new requests for this adapter. Its requests in progress continue. Raises ApiError."""
        async with self._changing:
            adapter = self.loaded.pop(name, None)
            if adapter is None:
                raise _not_loaded(name)
            adapter.unloaded = True
            self._free(adapter)

    def hold(self, adapter: Adapter) -> None:
        """Count a request that will use an adapter, so that its slot is kept until `let_go`. Raises ApiError."""
        if adapter.unloaded:
            raise _not_loaded(adapter.name)
        adapter.num_using += 1

    def let_go(self, adapter: Adapter) -> None:
        """Count the end of a request that used an adapter."""
        adapter.num_using -= 1
        self._free(adapter)

    def _free(self, adapter: Adapter) -> None:
        if adapter.unloaded and not adapter.num_using and self._taken.get(adapter.place) is adapter:
            del self._taken[adapter.place]

    def _free_place(self) -> str:
        for place in self.places:
            if place not in self._taken:
                return place
        names = ", ".join(adapter.name for adapter in self._taken.values())
        raise ApiError(
            400,
            f"all {len(self.places)} places for adapters are taken, by {names}; unload one that no request uses, or "
            "start the server with a larger --max-loras",
        )


def _not_loaded(name: str) -> ApiError:
    return ApiError(404, f"the adapter {name[:200]!r} is not loaded", param="lora_name")
