"""Holds the books of a KVCache against what sequences hold."""

from collections.abc import Sequence

from inflight.engine.kv_cache import NO_BLOCK, Holding, KVCache


def check_blocks(cache: KVCache, holdings: Sequence[Holding]) -> None:
    """Assert that the counts are those of the blocks that these hold, all that there are."""
    for index, group in enumerate(cache._groups):
        counts = [0] * group.num_blocks
        for holding in holdings:
            for block in holding.blocks[index]:
                counts[block] += block != NO_BLOCK
        assert counts == group.holders, "holders are miscounted"
        idle = {block for block in range(1, group.num_blocks) if not counts[block]}
        assert set(group.free) | set(group.remembered) == idle, "idle blocks are lost"
        assert len(group.free) + len(group.remembered) == len(idle), "an idle block is listed twice"
