"""sglang-jax with a tiny model of random weights on the CPU: are outputs the same after a restore from the host?

Each prompt is sent twice to one engine whose device pool holds three of them, so that the second time most of a prompt
comes back from the host pool. Run it for each of `--pool none`, `own` and `kvjax`; the same outputs are printed for all
if what was restored is right.

    python tests/benchmarks/sglang_jax_engine.py --pool kvjax --json
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("JAX_PLATFORMS", "cpu")

NUM_PROMPTS = 6
PROMPT_TOKENS = 160
NEW_TOKENS = 8
DEVICE_TOKENS = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path) -> None:
    """Writes a config and weights of a small Llama, the same at every call."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(7)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return np.ones(hidden, np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden) * 16, "model.norm.weight": norm()}
    weights["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {f"self_attn.{name}_proj.weight": matrix(heads, hidden) for name in ("q", "k", "v")}
        of_layer |= {"self_attn.o_proj.weight": matrix(hidden, heads), "mlp.down_proj.weight": matrix(hidden, inner)}
        of_layer |= {f"mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        of_layer |= {"input_layernorm.weight": norm(), "post_attention_layernorm.weight": norm()}
        weights |= {f"model.layers.{layer}.{name}": array for name, array in of_layer.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def watch_pages() -> dict[str, int]:
    """Counts the pages that HiCache backs up and loads in this process from now on, whichever pool it has, and those
    that did not come back as they were."""
    from sgl_jax.srt.mem_cache.hicache_controller import HiCacheController

    pages = {"backed_up": 0, "loaded": 0, "wrong": 0}
    kept: dict[int, list[np.ndarray]] = {}
    write, flush_load = HiCacheController.write, HiCacheController.flush_load

    def held(controller: Any, page: int) -> list[np.ndarray]:
        pool = controller._host_pool
        arrays = pool._device_pool.kv_buffer if hasattr(pool, "_device_pool") else pool.device_arrays().values()
        return [np.asarray(array)[page].view(np.uint8) for array in arrays]

    def counted_write(self: Any, device: list[int], host: list[int]) -> Any:
        pages["backed_up"] += len(host)
        kept.update({int(h): held(self, int(d)) for d, h in zip(device, host, strict=True)})
        return write(self, device, host)

    def counted_load(self: Any, host: list[int], device: list[int]) -> Any:
        done = flush_load(self, host, device)
        pages["loaded"] += len(host)
        for h, d in zip(host, device, strict=True):
            same = map(np.array_equal, kept[int(h)], held(self, int(d)))
            pages["wrong"] += not all(same)
        return done

    HiCacheController.write, HiCacheController.flush_load = counted_write, counted_load
    return pages


def serve(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, int] | None]:
    """Sends each prompt twice.

    Returns:
        For each answer, its tokens and how many of the prompt were cached; and what `watch_pages` saw, if HiCache ran
        in this process.
    """
    from sgl_jax.srt.entrypoints.engine import Engine

    pages = watch_pages() if options.single_process else None
    engine = Engine(
        enable_single_process=options.single_process,
        model_path=str(folder),
        device="cpu",
        attention_backend="native",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        page_size=16,
        max_total_tokens=DEVICE_TOKENS,
        max_prefill_tokens=256,
        chunked_prefill_size=256,
        context_length=512,
        max_running_requests=2,
        mem_fraction_static=0.5,
        disable_precompile=options.pool == "none",
        precompile_token_paddings=[256],
        precompile_bs_paddings=[2],
        disable_overlap_schedule=not options.overlap,
        skip_server_warmup=True,
        random_seed=3,
        log_level=options.log_level,
        hicache_storage="disable" if options.pool == "none" else "none",
        hicache_ratio=8.0,
        tp_size=options.devices,
        dp_size=options.dp,
        hicache_write_policy=options.write_policy,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    answers = []
    for prompt in prompts * 2:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        answers.append({"tokens": answer["output_ids"], "cached_tokens": answer["meta_info"]["cached_tokens"]})
    return answers, pages


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", choices=["none", "own", "kvjax"], default="kvjax")
    parser.add_argument("--transfer", choices=["auto", "direct", "staged"], default="auto")
    parser.add_argument("--write-policy", choices=["write_through", "write_back"], default="write_back")
    parser.add_argument("--devices", type=int, default=1, help="devices in all")
    parser.add_argument("--dp", type=int, default=1, help="ranks of data parallelism among them")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--overlap", action="store_true", help="let sglang-jax overlap scheduling with the step")
    parser.add_argument(
        "--single-process",
        action="store_true",
        help="one process, in which moved pages are counted and their bytes compared",
    )
    parser.add_argument("--log-level", default="error")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        answers, pages = serve(Path(folder), options)
        cached = [answer["cached_tokens"] for answer in answers]
        repeated = [answer["tokens"] for answer in answers[:NUM_PROMPTS]] == [
            answer["tokens"] for answer in answers[NUM_PROMPTS:]
        ]
        found = {
            "pool": options.pool,
            "outputs": [answer["tokens"] for answer in answers[:NUM_PROMPTS]],
            "cached_tokens_first": cached[:NUM_PROMPTS],
            "cached_tokens_second": cached[NUM_PROMPTS:],
            "pages": pages,
            "second_outputs_are_the_first": repeated,
        }
        lines = [json.dumps(found)] if options.json else [f"{name}: {value}" for name, value in found.items()]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def prepare(options: argparse.Namespace) -> None:
    """Makes this process use the devices and the pool that were asked for."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    if options.pool == "kvjax":
        import kvjax.serving.sglang_jax

        kvjax.serving.sglang_jax.install(transfer=options.transfer)
    elif options.pool == "own":
        import sgl_jax.test.mem_cache.conftest  # noqa: F401  # its own pool loads with a TPU kernel; this replaces it


# sglang-jax's scheduler is a new process that imports this module again, and the pool must be installed there, too.
prepare(arguments())

if __name__ == "__main__":
    main(arguments())
