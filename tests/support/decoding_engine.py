"""An engine that decodes with drafts, and what its device truly holds: found by looking at every byte."""

from collections.abc import Hashable, Sequence

from tests.oracles import law
from tests.support.fake_engine import FakeEngine
from tests.support.ledgers import resident

PROBE = "probe"
OTHER = -1  # a token of no request


class DecodingEngine(FakeEngine):
    """Serves requests whose last token was sampled and not computed yet, as engines do between two steps."""

    def decode(self, name: Hashable, drafts: Sequence[int], accepted: Sequence[int], sampled: int) -> None:
        """One step: computes the token sampled last and the drafts, of which `accepted` are right, and samples.

        Rejected drafts stay in the blocks until later tokens overwrite them. States are taken where the accepted
        tokens end. The ledger is told of accepted and sampled tokens only.
        """
        request = self.running[name]
        assert len(request.tokens) == request.position + 1, "one token is sampled and not computed"
        assert list(drafts[: len(accepted)]) == list(accepted)
        before, known = request.position, request.tokens
        request.tokens = [*known, *drafts]
        for g, group in enumerate(self.chunking.layout.groups):
            if group.is_cached and not self.is_recurrent(g):
                for place in range(before // group.tokens_per_block, -(-len(request.tokens) // group.tokens_per_block)):
                    self.allocate(request, g, place)
                    self.write(request, g, place, before, len(request.tokens))
        request.tokens = [*known, *accepted]
        self.compute(name, len(request.tokens))
        self.ledger.extend(name, [*accepted, sampled])
        request.tokens = [*request.tokens, sampled]

    def whole_chunks(self, name: Hashable, end: int) -> dict[str, list[int]]:
        """The chunks that end by `end` and whose every byte is in the request's blocks."""
        request = self.running[name]
        tables = self.tables(request)
        found: dict[str, list[int]] = {}
        for g in self.chunking.layout.cached:
            spec, tokens = self.chunking.layout.groups[g], self.chunking.tokens_per_chunk[g] or 0
            per_chunk = self.chunking.blocks_per_chunk[g] or 0
            found[spec.name] = []
            for chunk_idx in range(min(end, request.position) // tokens):
                ids = tables[spec.name][chunk_idx * per_chunk : (chunk_idx + 1) * per_chunk]
                ids = ids[-1:] if self.is_recurrent(g) else ids
                if [self.device.get((g, block_id)) for block_id in ids] == self.chunk(request, g, chunk_idx):
                    found[spec.name].append(chunk_idx)
        return found

    def held_chunks(self, name: Hashable, end: int) -> dict[str, list[int]]:
        """The chunks that end by `end` and are in the pool."""
        return resident(self, self.running[name].tokens[:end])

    def check_checkpoint(self, name: Hashable, checkpoint: int, could: law.Chunks) -> tuple[int, int]:
        """Checks that later requests hit at `checkpoint` all that they could if the chunks `could` were stored.

        Returns:
            Where a request of `checkpoint + 1` tokens resumes, and where one of `checkpoint` tokens does.
        """
        tokens = self.running[name].tokens[:checkpoint]
        hits = []
        for tokens_then in ([*tokens, OTHER], tokens):
            expected = law.longest_hit(self.chunking, len(tokens_then), could, 0, self.multiple).hit_tokens
            found = self.start(PROBE, tokens_then).hit_tokens
            assert found == expected, f"{len(tokens_then)} tokens hit {found}, and could hit {expected}"
            self.end_load(self.load(PROBE))
            self.compute(PROBE, len(tokens_then))
            self.finish(PROBE)
            hits.append(found)
        return hits[0], hits[1]
