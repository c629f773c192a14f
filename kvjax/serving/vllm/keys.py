"""What a request's chunks are named by: vLLM's own prefix hashes where they are fine enough, else its tokens."""

from typing import Any

from kvjax.keys import engine_hashes
from kvjax.requests import Request


class RequestKeys:
    """Turns requests of vLLM into arguments of `Ledger.lookup` and `Ledger.extend`.

    vLLM's hashes cover all that its cache depends on: tokens, adapter, images, salt. Tokens alone do not, so without
    its hashes the adapter and the salt are told by kvjax's salt; requests with other inputs than tokens take no part,
    nor do sessions whose tokens may change.

    Args:
        tokens_per_hash: tokens that each of vLLM's prefix hashes covers; `None` to go by tokens.
    """

    def __init__(self, tokens_per_hash: int | None):
        self._unit = tokens_per_hash

    def num_tokens(self, request: Any) -> int:
        """Returns how many accepted tokens of a request can be named."""
        if self._unit is None:
            return request.num_tokens
        return min(request.num_tokens, (len(request.block_hashes) + 1) * self._unit - 1)

    def whole(self, request: Any) -> dict[str, Any]:
        """Returns the arguments that name all of a request."""
        if self._unit is not None:
            num_tokens = self.num_tokens(request)
            return {"hashes": list(request.block_hashes[: num_tokens // self._unit]), "num_tokens": num_tokens}
        only_tokens = not (request.mm_features or request.prompt_embeds is not None or request.resumable)
        adapter = request.lora_request.lora_name if request.lora_request else ""
        return {
            "token_ids": list(request.all_token_ids),
            "salt": repr((adapter, request.cache_salt)) if adapter or request.cache_salt else "",
            "skip": not only_tokens,
        }

    def fingerprint(self, request: Any) -> tuple[int, Any]:
        """Returns what differs if `whole` does, as long as a request is not admitted: it costs nothing to tell."""
        hashes = request.block_hashes if self._unit is not None else ()
        return self.num_tokens(request), hashes[-1] if hashes else None

    def beyond(self, request: Any, known: Request) -> dict[str, Any]:
        """Returns the arguments that name what a request has beyond what is known of it."""
        if self._unit is None:
            return {"token_ids": list(request.all_token_ids[known.num_tokens :])}
        num_tokens = self.num_tokens(request)
        return {
            "hashes": list(request.block_hashes[len(known.hashes) : num_tokens // self._unit]),
            "num_tokens": num_tokens,
        }

    def continues(self, request: Any, known: Request) -> bool:
        """Whether a request has at least the tokens that are known of it; a streaming session may take some back."""
        if self.num_tokens(request) < known.num_tokens:
            return False
        end = len(known.hashes)
        if self._unit is None or not end:
            return True
        return engine_hashes(known.namespace, request.block_hashes[end - 1 : end]) == known.hashes[-1:]
