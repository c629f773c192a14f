"""A fake engine that records what it asks of its ledger."""

from collections.abc import Hashable, Sequence
from typing import Any

from kvjax import Lookup
from kvjax.handles import Load, Store
from kvjax.observe.trace import TraceWriter
from tests.support.fake_engine import FakeEngine


class RecordingEngine(FakeEngine):
    """Serves as `FakeEngine`, and notes the answers of lookups in `found`."""

    def __init__(self, writer: TraceWriter, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.writer = writer
        self.found: list[int] = []

    def hashes(self, name: Hashable) -> list[bytes]:
        return self.ledger._requests[name].hashes

    def start(self, name: Hashable, tokens: Sequence[int], *, salt: bytes = b"", on_device: int = 0) -> Lookup:
        found = super().start(name, tokens, salt=salt, on_device=on_device)
        self.writer.lookup(
            name,
            namespace=self.ledger.namespace(salt),
            num_tokens=len(tokens),
            hashes=self.hashes(name),
            device_tokens=on_device,
        )
        self.found.append(found.hit_tokens)
        return found

    def load(self, name: Hashable) -> Load:
        self.writer.load(name)
        return super().load(name)

    def store(self, name: Hashable, *, checkpoint: bool = False) -> Store:
        self.writer.store(name, num_tokens=self.running[name].position, checkpoint=checkpoint)
        return super().store(name, checkpoint=checkpoint)

    def accept(self, name: Hashable, tokens: Sequence[int]) -> None:
        known = len(self.hashes(name))
        super().accept(name, tokens)
        self.writer.extend(name, num_tokens=len(self.running[name].tokens), hashes=self.hashes(name)[known:])

    def finish(self, name: Hashable) -> None:
        self.writer.finish(name)
        super().finish(name)
