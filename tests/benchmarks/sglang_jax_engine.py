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


def serve(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sends each prompt twice and returns, for each answer, its tokens and how many of the prompt were cached."""
    from sgl_jax.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(folder),
        device="cpu",
        attention_backend="native",
        skip_tokenizer_init=True,
        dtype="bfloat16",
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
        hicache_write_policy=options.write_policy,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    answers = []
    for prompt in prompts * 2:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        answers.append({"tokens": answer["output_ids"], "cached_tokens": answer["meta_info"]["cached_tokens"]})
    return answers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", choices=["none", "own", "kvjax"], default="kvjax")
    parser.add_argument("--transfer", choices=["auto", "direct", "staged"], default="auto")
    parser.add_argument("--write-policy", choices=["write_through", "write_back"], default="write_back")
    parser.add_argument("--overlap", action="store_true", help="let sglang-jax overlap scheduling with the step")
    parser.add_argument("--log-level", default="error")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        answers = serve(Path(folder), options)
        cached = [answer["cached_tokens"] for answer in answers]
        repeated = [answer["tokens"] for answer in answers[:NUM_PROMPTS]] == [
            answer["tokens"] for answer in answers[NUM_PROMPTS:]
        ]
        found = {
            "pool": options.pool,
            "outputs": [answer["tokens"] for answer in answers[:NUM_PROMPTS]],
            "cached_tokens_first": cached[:NUM_PROMPTS],
            "cached_tokens_second": cached[NUM_PROMPTS:],
            "second_outputs_are_the_first": repeated,
        }
        lines = [json.dumps(found)] if options.json else [f"{name}: {value}" for name, value in found.items()]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


# sglang-jax's scheduler is a new process that runs this module, too, and the pool must be installed there.
if "--pool" not in sys.argv or sys.argv[sys.argv.index("--pool") + 1 :][:1] == ["kvjax"]:
    import kvjax.serving.sglang_jax

    chosen = sys.argv[sys.argv.index("--transfer") + 1] if "--transfer" in sys.argv else "auto"
    kvjax.serving.sglang_jax.install(transfer=chosen)

if __name__ == "__main__":
    main(arguments())
