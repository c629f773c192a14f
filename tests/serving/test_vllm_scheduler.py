"""The connector under vLLM's own scheduler, where vLLM is installed; the runner is that of the small vLLM.

vLLM without a device suffices, and PyTorch for CPUs; `docs/serving/vllm.md` says how to install them.
"""

import importlib
import json
import pickle

import numpy as np
import pytest

from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from tests.serving.test_vllm_engine import Unreliable
from tests.serving.vllm_engine import Group, Request, Runner

pytest.importorskip("vllm", reason="vLLM is not installed: its scheduler cannot be run")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MAX_SEQS, MAX_TOKENS = 4, 512


def vllm_config_of(path, *, extra, prefix_caching, ahead, mamba):
    from vllm import config

    path.joinpath("config.json").write_text(json.dumps(CONFIG))
    return config.VllmConfig(
        model_config=config.ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=32,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=ahead,
        ),
        cache_config=config.CacheConfig(block_size=16, enable_prefix_caching=prefix_caching, **mamba),
        kv_transfer_config=config.KVTransferConfig(
            kv_connector="KvjaxConnector",
            kv_connector_module_path="kvjax.serving.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        device_config=config.DeviceConfig("cpu"),
    )


def spec_of(group):
    import torch
    from vllm.v1 import kv_cache_interface as specs

    heads = {"block_size": group.tokens_per_block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    match group.kind:
        case FullAttention():
            return specs.FullAttentionSpec(**heads)
        case SlidingWindow(window_tokens):
            return specs.SlidingWindowSpec(sliding_window=window_tokens, **heads)
        case ChunkedLocal(chunk_tokens):
            return specs.ChunkedLocalAttentionSpec(attention_chunk_size=chunk_tokens, **heads)
        case Recurrent():
            return specs.MambaSpec(
                block_size=group.tokens_per_block,
                shapes=((3, 4), (2, 4)),
                dtypes=(torch.bfloat16, torch.float32),
                mamba_cache_mode="align" if group.in_blocks else "none",
            )


class VllmEngine:
    """vLLM's scheduler and connectors; the runner and what passes to it are as in the small vLLM."""

    def __init__(self, path, groups, *, num_blocks, prefix_caching=True, ahead=False, host_bytes=2**20, tiers=()):
        from vllm.distributed.kv_transfer import kv_transfer_state as state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils as utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        extra = {"host_bytes": host_bytes, "tiers": list(tiers)}
        in_blocks = any(group.in_blocks for group in groups)
        mamba = {"mamba_cache_mode": "align", "mamba_block_size": 16} if in_blocks else {}
        self.config = vllm_config_of(path, extra=extra, prefix_caching=prefix_caching, ahead=ahead, mamba=mamba)
        self.config.cache_config.num_gpu_blocks = num_blocks
        listed = [
            KVCacheGroupSpec([f"layer{g}.{place}" for place in group.places], spec_of(group))
            for g, group in enumerate(groups)
        ]
        caches = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=listed)
        block, unit = utils.resolve_kv_cache_block_sizes(caches, self.config)
        caches.hash_block_size = unit
        widths = {place: 4 + 2 * place for group in groups for place in group.places}
        self.runner = Runner(groups, num_blocks, widths, MAX_SEQS)
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, caches)
        state._KV_CONNECTOR_AGENT = self.worker  # as `ensure_kv_transfer_initialized` does where there are devices
        self.worker.register_runner(self.runner)
        self.scheduler = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block,
            hash_block_size=unit,
            log_stats=True,
        )
        algorithm = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        utils.init_none_hash(algorithm)
        self.hasher = utils.get_request_block_hasher(unit, algorithm)
        self.ahead, self.pending, self.scheduler_stats = ahead, [], []
        self.said, self.known, self.tables, self.stats = {}, {}, {}, {"restored": 0, "preempted": 0}

    def add(self, said):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        self.said[said.request_id] = said
        self.known[said.request_id] = said.num_prompt_tokens
        self.scheduler.add_request(
            VllmRequest(
                request_id=said.request_id,
                prompt_token_ids=said.truth[: said.num_prompt_tokens],
                sampling_params=SamplingParams(max_tokens=said.max_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def abort(self, request_id):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self):
        """Has vLLM take back the blocks of what it admitted last, as where too few are left."""
        if self.scheduler.running:
            self.stats["preempted"] += 1
            self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)

    def step(self):
        """vLLM's scheduler, then what its workers, tpu-inference's too, do around a model."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

        output = self.scheduler.schedule()
        orders = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        again = output.scheduled_cached_reqs
        gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ()) | set(again.resumed_req_ids)
        starts = dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        for request_id, ids in zip(again.req_ids, again.new_block_ids, strict=True):
            if request_id in again.resumed_req_ids:
                self.tables[request_id] = [list(one) for one in ids]
            else:
                for table, one in zip(self.tables[request_id], ids or (), strict=False):
                    table += one
        if hasattr(self.runner, "update"):
            self.runner.update(output)
        else:
            self.runner.update_states(output.num_scheduled_tokens, gone)
        output.kv_connector_metadata = orders
        with set_forward_context(None, self.config), Mixin.maybe_get_kv_connector_output(output) as told:
            self.runner.forward(
                [
                    (self.said[name], self.tables[name], starts[name], starts[name] + num)
                    for name, num in output.num_scheduled_tokens.items()
                ]
            )
        told.kv_connector_worker_meta = pickle.loads(pickle.dumps(told.kv_connector_worker_meta))
        self.pending.append((output, self._sampled(output, starts, told)))
        while len(self.pending) > self.ahead:
            self._update()

    def _update(self):
        told = self.scheduler.update_from_output(*self.pending.pop(0))
        self.scheduler_stats += [one.scheduler_stats for one in told.values() if one.scheduler_stats is not None]

    def _sampled(self, output, starts, told):
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            end = starts[name] + output.num_scheduled_tokens[name]
            known = self.known[name]
            sampled.append([self.said[name].truth[end]] if end >= known else [])
            self.known[name] = max(known, end + 1) if end >= known else known
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told,
        )

    def run(self, most=3000):
        for _ in range(most):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self.pending:
            self._update()
        assert not self.scheduler.requests, sorted(self.scheduler.requests)
        self.books.check_integrity()
        assert self.books.num_requests == 0

    @property
    def books(self):
        return self.scheduler.connector._books.books.ledger


def converse(engine, rng, *, turns, many=4):
    start = rng.integers(0, 1000, 40).tolist()
    said = [[*start, *rng.integers(0, 1000, rng.integers(1, 70)).tolist()] for _ in range(many)]
    for turn in range(turns):
        for i in rng.permutation(many):
            more = rng.integers(0, 1000, 40).tolist()
            request = Request(f"{turn}.{i}", [*said[i], *more], len(said[i]), int(rng.integers(1, 20)), 16)
            said[i] = [*request.truth[: len(said[i]) + request.max_tokens], int(rng.integers(0, 1000))]
            engine.add(request)
            for _ in range(rng.integers(0, 5)):
                engine.step()
                if rng.random() < 0.15:
                    engine.preempt()
            if rng.random() < 0.2 and engine.scheduler.requests:
                engine.abort(str(rng.choice(sorted(engine.scheduler.requests))))
        engine.run()
        if turn % 2:
            assert engine.scheduler.reset_prefix_cache(), "the device forgets what it held"


MIXED = [Group(FullAttention(), 16, (0,)), Group(SlidingWindow(40), 16, (0, 1)), Group(ChunkedLocal(64), 16, (2,))]
STATES = [Group(FullAttention(), 16, (0,)), Group(Recurrent(), MAX_TOKENS, (1, 2))]
ALIGNED = [Group(FullAttention(), 16, (0,)), Group(Recurrent(), 16, (1, 2), in_blocks=True)]
UNIFORM = [Group(FullAttention(), 16, (0, 1))]
SLIDING = [Group(SlidingWindow(40), 16, (0, 1))]
CASES = [
    pytest.param(MIXED, True, False, id="mixed"),
    pytest.param(MIXED, True, True, id="mixed ahead"),
    pytest.param(MIXED, False, False, id="mixed without prefix caching"),
    pytest.param(STATES, False, False, id="states"),
    pytest.param(STATES, False, True, id="states ahead"),
    pytest.param(ALIGNED, True, False, id="states in blocks"),
    pytest.param(ALIGNED, True, True, id="states in blocks ahead"),
    pytest.param(UNIFORM, True, False, id="uniform"),
    pytest.param(SLIDING, True, False, id="sliding alone"),
]


@pytest.mark.parametrize(("groups", "prefix_caching", "ahead"), CASES)
def test_vllm_reads_what_it_wrote(tmp_path, groups, prefix_caching, ahead):
    engine = VllmEngine(tmp_path, groups, num_blocks=50, prefix_caching=prefix_caching, ahead=ahead)
    converse(engine, np.random.default_rng(1), turns=4)
    assert engine.stats["preempted"] > 0
    assert engine.books.counts.loaded_by_group.all(), "chunks of each group came back"


@pytest.mark.parametrize(("groups", "prefix_caching", "ahead"), CASES)
def test_vllm_computes_what_could_not_be_loaded(tmp_path, groups, prefix_caching, ahead):
    engine = VllmEngine(tmp_path, groups, num_blocks=50, prefix_caching=prefix_caching, ahead=ahead)
    rng = np.random.default_rng(2)
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, rng, fails=0.4)
    converse(engine, rng, turns=6)
    assert engine.books.counts.loads_failed > 0
    assert engine.books.counts.loaded_by_group.all(), "chunks of each group came back"


@pytest.mark.parametrize("num_tokens", [150, 160])
def test_a_prompt_that_comes_again_is_restored_to_its_last_block_where_states_are_in_blocks(tmp_path, num_tokens):
    """vLLM ends a step there; `docs/serving/vllm.md` tells the figures."""
    engine = VllmEngine(tmp_path, ALIGNED, num_blocks=100)
    for name in ("first", "again"):
        engine.add(Request(name, list(range(num_tokens + 30)), num_tokens, 20, 16))
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    assert engine.books.counts.hit_tokens == 144


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_nothing_of_old_weights_is_restored_after_vllm_reset_its_caches(tmp_path, ahead):
    engine = VllmEngine(tmp_path, MIXED, num_blocks=100, ahead=ahead)
    tokens = list(range(150))
    for name in ("a", "b"):
        engine.add(Request(name, [ord(name), *tokens, *range(30)], 151, 20, 16))
    while not all(request.num_tokens > 155 for request in engine.scheduler.requests.values()):
        engine.step()
    while engine.pending:
        engine.scheduler.update_from_output(*engine.pending.pop(0))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.runner.weights = b"new"
    before = engine.books.counts.loaded_by_group.sum()
    engine.run()
    assert engine.books.counts.loaded_by_group.sum() == before
    for name in ("again", "thrice"):
        assert engine.scheduler.reset_prefix_cache()
        engine.add(Request(name, [ord("a"), *tokens, *range(30)], 151, 20, 16))
        engine.run()
    assert engine.books.counts.loaded_by_group.sum() > before


def test_a_tier_outlives_vllm(tmp_path):
    loaded = []
    for _ in range(2):
        engine = VllmEngine(tmp_path, MIXED, num_blocks=100, tiers=[f"file://{tmp_path}/tier"])
        engine.add(Request("a", list(range(180)), 150, 20, 16))
        engine.run()
        loaded.append(int(engine.books.counts.loaded_by_group.sum()))
        engine.worker.shutdown()
    assert loaded[0] == 0
    assert loaded[1] > 0


def test_figures_are_in_the_log_and_metrics_of_vllm(tmp_path):
    """What passes from the scheduler to vLLM's front end, through its encoding, and what is written there."""
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    engine = VllmEngine(tmp_path, MIXED, num_blocks=60, host_bytes=12 * 1024)
    converse(engine, np.random.default_rng(0), turns=4)
    log, lines = metrics.KVConnectorLogging(engine.config.kv_transfer_config), []
    shown = metrics.KVConnectorProm(engine.config, ["model_name", "engine"], {0: ["a model", "0"]})
    try:
        for stats in engine.scheduler_stats:
            passed = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
            if passed.kv_connector_stats:
                log.observe(passed.kv_connector_stats)
            if passed.kv_connector_stats is not None:
                shown.observe(passed.kv_connector_stats, 0)
        log.log(lambda text, told: lines.append(text % told))
        totals = engine.scheduler.connector._books.books.stats()
        assert totals.hit_tokens > 0
        assert totals.evicted_chunks > 0
        assert f"prompts looked up={totals.lookups}, tokens looked up={totals.lookup_tokens}" in lines[0]
        values = prometheus_client.REGISTRY.get_sample_value
        labels = {"model_name": "a model", "engine": "0"}
        assert values("kvjax_hit_tokens_total", labels) == totals.hit_tokens
        assert values("kvjax_open_jobs", labels) == totals.open_jobs == 0
        for group in totals.groups:
            of = labels | {"group": group.name}
            assert (values("kvjax_loaded_bytes_total", of) or 0) == group.bytes_loaded
            assert (values("kvjax_evicted_chunks_total", of) or 0) == group.chunks_evicted
            assert values("kvjax_held_bytes", of) == group.bytes_held
    finally:
        for metric in shown.prom_metrics._metrics.values():
            prometheus_client.REGISTRY.unregister(metric)


def test_the_name_that_the_tpu_platform_takes_is_the_same_class():
    package = importlib.import_module("kvjax.serving.vllm")
    assert package.TPUConnectorHMA is package.KvjaxConnector
