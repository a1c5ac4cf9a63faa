"""Holds the books of a KVCache against what sequences hold."""

from collections.abc import Sequence

from inflight.engine.cache.blocks import Holding
from inflight.engine.cache.kinds import NO_BLOCK
from inflight.engine.cache.kv_cache import KVCache


def check_blocks(cache: KVCache, holdings: Sequence[Holding]) -> None:
    """Assert that the counts are those of the blocks that these hold, all that there are."""
    for index, pool in enumerate(cache._pools):
        counts = [0] * pool.num_blocks
        for holding in holdings:
            for block in holding.blocks[index]:
                counts[block] += block != NO_BLOCK
        assert counts == pool.holders, "holders are miscounted"
        idle = {block for block in range(1, pool.num_blocks) if not counts[block]}
        assert {*pool.free, *pool.remembered, *pool.protected} == idle, "idle blocks are lost"
        assert pool.num_available == len(idle), "an idle block is listed twice"
        protected = [block for block, entry in pool.entry_of.items() if entry.num_protections]
        assert pool.num_protected == len(protected) <= pool.max_protected
        assert pool.protected.keys() == idle.intersection(protected)
