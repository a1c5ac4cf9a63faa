"""A custom attention backend for tests. Engines name it "own_attention:CountingAttention"."""

from inflight.core.errors import UnsupportedModelError
from inflight.engine.model.attention.paged import PagedAttention


class CountingAttention(PagedAttention):
    """PyTorch's attention, with a count of its calls and larger blocks."""

    block_size = 32

    def __init__(self, layers, device):
        super().__init__(layers, device)
        if any(layer.window for layer in layers):
            raise UnsupportedModelError("CountingAttention has no sliding windows")
        self.name, self.num_calls = "counting", 0

    def attend(self, layer, query, sinks):
        self.num_calls += 1
        return super().attend(layer, query, sinks)


class Incomplete:
    name = "incomplete"

    def __init__(self, layers, device):
        pass
