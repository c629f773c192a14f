"""A KV connector for vLLM on TPU (tpu-inference): offloads caches of mixed groups to host memory.

`KvjaxConnector` is loaded when it is asked for, as it needs vLLM; all other modules of this package do without.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.serving.vllm.connector import KvjaxConnector as KvjaxConnector

# The platform of tpu-inference takes a connector by its name alone, whatever its module: this is the one of its names
# that goes with mixed groups.
_NAMES = ("KvjaxConnector", "TPUConnectorHMA")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "kvjax.serving.vllm.KvjaxConnector needs vLLM, which is not installed: install tpu-inference with the "
            "vLLM that it names (https://docs.vllm.ai/projects/tpu), or `pip install vllm`"
        ) from error
    from kvjax.serving.vllm.connector import KvjaxConnector

    return KvjaxConnector
