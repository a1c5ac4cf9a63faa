"""Adapters that clients load by name, and the places of the engine that they are at."""

import asyncio
from dataclasses import dataclass

from inflight.server.engine import ServedEngine
from inflight.server.errors import ApiError
from inflight.server.options import PLACE
from inflight.server.updates import Updates


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter under a name."""

    name: str
    path: str
    place: str
    """The engine's name for it, one of those that it was launched with."""
    version: int = 0
    """The version that brought it."""
    num_using: int = 0
    """Requests that are being drawn with it, or are about to be."""
    unloaded: bool = False


class Adapters:
    """Which adapters are loaded. A place is free again when its adapter was unloaded and nobody draws with it."""

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
        """All that a request may name: those that clients loaded, and those that a trainer publishes."""
        untouched = {name: adapter for name, adapter in self._trained.items() if name not in self._taken}
        return untouched | self.loaded

    async def load(self, name: str, path: str, *, in_place: bool, label: str | None = None) -> Adapter:
        """Load the adapter of a directory; requests that name it are drawn with it once this returns. in_place: one of
        that name is replaced, and what is being drawn with it goes on with the new one. label: what clients call the
        version that brings it. Raises ApiError, and WeightFileError or LayoutMismatchError for files that do not
        fit."""
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

    def unload(self, name: str) -> None:
        """Nobody can ask for this adapter any more; what is being drawn with it goes on. Raises ApiError."""
        adapter = self.loaded.pop(name, None)
        if adapter is None:
            raise _not_loaded(name)
        adapter.unloaded = True
        self._free(adapter)

    def hold(self, adapter: Adapter) -> None:
        """A request is going to be drawn with it; nobody else gets its place until it is let go. Raises ApiError."""
        if adapter.unloaded:
            raise _not_loaded(adapter.name)
        adapter.num_using += 1

    def let_go(self, adapter: Adapter) -> None:
        """A request that was drawn with it has ended."""
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
