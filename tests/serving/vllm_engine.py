"""A small vLLM: a scheduler with a block pool, and a runner whose cache holds what tells every prefix apart.

What a token leaves in a cache is a digest of all tokens up to it, so the oracle is the token sequence itself. Before
each step of a request, all bytes that the law says it reads are compared with it.
"""

import hashlib
import pickle
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from kvjax.groups import ChunkedLocal, Kind, Recurrent, SlidingWindow
from kvjax.law import needed

SPECS = {
    "FullAttention": "FullAttentionSpec",
    "SlidingWindow": "SlidingWindowSpec",
    "ChunkedLocal": "ChunkedLocalAttentionSpec",
    "Recurrent": "MambaSpec",
}


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=32).digest()


@dataclass
class Group:
    """A group of layers: `places` are those of its arrays in the runner's list; `in_blocks` says that states are in
    blocks of vLLM, not in slots."""

    kind: Kind
    tokens_per_block: int
    places: tuple[int, ...]
    in_blocks: bool = False

    def spec(self):
        spec = type(SPECS[type(self.kind).__name__], (), {})()
        spec.block_size = self.tokens_per_block
        spec.sliding_window = getattr(self.kind, "window_tokens", None)
        spec.attention_chunk_size = getattr(self.kind, "chunk_tokens", None)
        return spec


@dataclass(eq=False)
class Request:
    request_id: str
    truth: list[int]  # the prompt and all that will ever be sampled
    num_prompt_tokens: int
    max_tokens: int
    unit: int
    num_known: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: str = "WAITING"
    block_hashes: list[bytes] = field(default_factory=list)
    lora_request = cache_salt = prompt_embeds = None
    mm_features = ()
    resumable = False

    def __post_init__(self):
        self.learn(self.num_prompt_tokens)
        chain = [b""]
        for token in self.truth:
            chain.append(digest(chain[-1], str(token).encode()))
        self.chain = chain

    def learn(self, num_tokens):
        self.num_known = num_tokens
        while (len(self.block_hashes) + 1) * self.unit <= num_tokens:
            end = (len(self.block_hashes) + 1) * self.unit
            self.block_hashes.append(digest(repr(self.truth[:end]).encode()))

    @property
    def num_tokens(self):
        return self.num_known

    @property
    def all_token_ids(self):
        return self.truth[: self.num_known]


def config_of(groups, num_blocks, hash_block_size):
    listed = [
        SimpleNamespace(
            layer_names=[f"layer{g}.{place}" for place in group.places],
            kv_cache_spec=group.spec(),
            is_eagle_group=False,
            host_resident=False,
        )
        for g, group in enumerate(groups)
    ]
    return SimpleNamespace(kv_cache_groups=listed, num_blocks=num_blocks, hash_block_size=hash_block_size)


def vllm_config_of(extra, **parallel):
    parallel = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra
        ),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=None,
        model_config=SimpleNamespace(model="test", revision=None, quantization=None, dtype="bfloat16", hf_overrides={}),
    )


class Runner:
    """tpu-inference's runner, as far as the connector knows it. Slots of states are its own business."""

    def __init__(self, groups, num_blocks, widths, max_seqs):
        self.groups = groups
        places = sorted({place for group in groups for place in group.places})
        self.kv_caches = []
        self.layer_name_to_kvcache_index = {f"layer{g}.{p}": p for g, group in enumerate(groups) for p in group.places}
        rng = np.random.default_rng(0)
        for place in places:
            group = next(group for group in groups if place in group.places)
            if isinstance(group.kind, Recurrent):
                states = num_blocks if group.in_blocks else max_seqs + 1
                shapes = [(states, 3, widths[place]), (states, 2, 4, widths[place])]
                parts = [jnp.asarray(rng.random(shape, np.float32)) for shape in shapes]
                self.kv_caches.append((parts[0].astype(jnp.bfloat16), parts[1]))
            else:
                shape = (num_blocks, group.tokens_per_block, 2, widths[place])
                self.kv_caches.append(jnp.asarray(rng.random(shape, np.float32)).astype(jnp.bfloat16))
        self.input_batch = SimpleNamespace(req_id_to_index={}, mamba_state_indices_cpu=np.zeros(max_seqs, np.int32))
        self.free_slots = list(range(1, max_seqs + 1))
        self.slots = {}
        self.known = {}
        self.weights = b""

    def update_states(self, scheduled, gone):
        """As the persistent batch does, before anything of the step runs: slots of those that left are free at once."""
        for request_id in gone:
            if request_id in self.slots:
                self.free_slots.insert(0, self.slots.pop(request_id))
        for request_id in scheduled:
            if request_id not in self.slots:
                self.slots[request_id] = self.free_slots.pop(0)
        self.input_batch.req_id_to_index = {request_id: i for i, request_id in enumerate(self.slots)}
        for request_id, i in self.input_batch.req_id_to_index.items():
            self.input_batch.mamba_state_indices_cpu[i] = self.slots[request_id]

    def expected(self, request, place, part, like):
        """What prefixes of 0, 1, … tokens leave at their last token in one array, as bytes."""
        key = (request.request_id, place, part, self.weights)
        if key not in self.known:
            seeds = [digest(link, str((place, part)).encode(), self.weights) for link in request.chain]
            rows = [(seed * (like.nbytes // len(seed) + 1))[: like.nbytes] for seed in seeds]
            self.known[key] = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), like.nbytes)
        return self.known[key]

    def forward(self, steps):
        """Checks what each step reads, then writes what it computes. `steps`: request, tables, start, stop."""
        arrays = [
            [np.array(array) for array in (cache if isinstance(cache, tuple) else (cache,))] for cache in self.kv_caches
        ]
        for request, tables, start, stop in steps:
            for g, group in enumerate(self.groups):
                for place in group.places:
                    self._step(arrays[place], request, tables[g], start, stop, group, place)
        self.kv_caches = [
            tuple(map(jnp.asarray, new)) if isinstance(old, tuple) else jnp.asarray(new[0])
            for old, new in zip(self.kv_caches, arrays, strict=True)
        ]

    def _step(self, arrays, request, table, start, stop, group, place):
        if isinstance(group.kind, Recurrent):
            source = target = self.slots[request.request_id]
            if group.in_blocks:
                source, target = (table[(end - 1) // group.tokens_per_block] for end in (max(start, 1), stop))
                assert source or not start, f"{request.request_id}: the state at {start} was freed"
                assert target, f"{request.request_id}: no block for the state at {stop}"
            for part, array in enumerate(arrays):
                expected = self.expected(request, place, part, array[target])
                if start:
                    assert np.array_equal(as_bytes(array[source]), expected[start]), f"{request.request_id} at {start}"
                array[target] = expected[stop].view(array.dtype).reshape(array[target].shape)
            return
        (array,) = arrays
        expected = self.expected(request, place, 0, array[0, 0])
        ids, tokens = np.array(table), np.arange(*needed(group.kind, start))
        blocks = ids[tokens // group.tokens_per_block]
        assert blocks.all(), f"{request.request_id}: blocks that {start} needs were freed"
        wrong = (as_bytes(array[blocks, tokens % group.tokens_per_block], 1) != expected[tokens + 1]).any(axis=1)
        assert not wrong.any(), f"{request.request_id} at {start}: tokens {tokens[wrong]} of {group}"
        tokens = np.arange(start, stop)
        new = expected[tokens + 1].view(array.dtype).reshape(len(tokens), *array.shape[2:])
        array[ids[tokens // group.tokens_per_block], tokens % group.tokens_per_block] = new


def as_bytes(rows, lead=0):
    """The bytes of some rows each of them in one if `lead` is 1."""
    width = int(np.prod(rows.shape[lead:]))
    return np.ascontiguousarray(rows).reshape(*rows.shape[:lead], width).view(np.uint8)


class Engine:
    """vLLM's loop over a scheduler-side and a worker-side connector, which share nothing but pickles."""

    def __init__(
        self, connector_class, roles, groups, *, num_blocks, extra, widths, max_seqs=4, budget=32, unit=None, late=False
    ):
        self.groups, self.budget, self.max_seqs, self.late = groups, budget, max_seqs, late
        self.unit = unit or min(group.tokens_per_block for group in groups)
        config = config_of(groups, num_blocks, self.unit)
        self.runner = Runner(groups, num_blocks, widths, max_seqs)
        self.worker = connector_class(vllm_config_of(extra), roles.WORKER, config)
        self.worker.register_runner(self.runner)
        sys.modules["vllm.distributed.kv_transfer"].worker = self.worker  # as vLLM's executor `uni` has it
        self.scheduler = connector_class(vllm_config_of(extra), roles.SCHEDULER, config)
        self.free = list(range(1, num_blocks))
        self.requests, self.tables, self.waiting, self.running = {}, {}, [], []
        self.loading, self.ended = {}, {}
        self.finished_ids, self.gone = set(), set()
        self.pending = []
        self.restored_tokens = self.computed_tokens = self.failed_loads = self.preemptions = 0
        self.short_of_blocks = False  # as if there were too few of them for what runs

    # --- requests -------------------------------------------------------------------------------------

    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id):
        request = self.requests[request_id]
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request)

    def _finish(self, request):
        waits = request.status == "LOADING" and request.request_id in self.loading
        request.status = "FINISHED"
        tables = self.tables.get(request.request_id, [[] for _ in self.groups])
        keep, _ = self.scheduler.request_finished_all_groups(request, tuple(list(table) for table in tables))
        assert not keep
        self.finished_ids.add(request.request_id)
        self.gone.add(request.request_id)
        if not waits:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request):
        for table in self.tables.pop(request.request_id, []):
            self.free += [block for block in table if block]

    # --- a step ---------------------------------------------------------------------------------------

    def schedule(self):
        scheduled, new, again, resumed, added = {}, [], [], set(), {}
        if self.short_of_blocks and self.running:
            self._preempt(self.running.pop())
        self.short_of_blocks = False
        left = self.budget
        for request in list(self.running):
            if request not in self.running:
                continue
            num = min(left, request.num_known - request.num_computed_tokens + self._ahead(request))
            if num <= 0:
                continue
            while (blocks := self._allocate(request, num)) is None:
                victim = self.running.pop()
                self._preempt(victim)
                if victim in scheduled:
                    left += scheduled.pop(victim)
                    again.remove(victim)
                if victim is request:
                    break
            if blocks is None:
                break
            scheduled[request], added[request] = num, blocks
            again.append(request)
            left -= num
        preempted = any(request.status == "PREEMPTED" for request in self.waiting)
        while self.waiting and left > 0 and len(self.running) < self.max_seqs:
            ready = [one for one in self.waiting if one.status != "LOADING"]
            request = next((one for one in ready if one.num_computed_tokens), None) or next(iter(ready), None)
            if request is None or (preempted and scheduled and request.status == "PREEMPTED"):
                break
            external, waits = 0, False
            if request.num_computed_tokens == 0:
                external, waits = self.scheduler.get_num_new_matched_tokens(request, 0)
                if external is None or (waits and not self._fits(request)):
                    break
            num = 0 if waits else min(left, request.num_known - request.num_computed_tokens)
            request.num_computed_tokens += external
            blocks = self._allocate(request, num)
            if blocks is None:
                request.num_computed_tokens -= external
                break
            ids = tuple(list(table) for table in self.tables[request.request_id])
            self.scheduler.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda ids=ids: ids), external
            )
            if waits:
                self.loading[request.request_id] = request
                request.before_loading = request.status
                request.status = "LOADING"
                self.restored_tokens += external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            if request.status == "PREEMPTED":
                again.append(request)
                resumed.add(request.request_id)
                added[request] = ids
            else:
                new.append(request)
            request.status = "RUNNING"
            scheduled[request] = num
            left -= num
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.request_id,
                    block_ids=tuple(list(t) for t in self.tables[r.request_id]),
                    num_computed_tokens=r.num_computed_tokens,
                )
                for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in again],
                resumed_req_ids=resumed,
                new_block_ids=[added[r] for r in again],
                num_computed_tokens=[r.num_computed_tokens for r in again],
            ),
            num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            finished_req_ids=self.finished_ids,
        )
        output.kv_connector_metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        steps = []
        for request, num in scheduled.items():
            tables = [list(table) for table in self.tables[request.request_id]]
            steps.append((request, tables, request.num_computed_tokens, request.num_computed_tokens + num))
            request.num_computed_tokens += num
        self.finished_ids = set()
        gone, self.gone = self.gone, set()
        return output, steps, gone

    def _fits(self, request):
        """Requests that hold blocks and do not run must be able to, or all of them wait for each other."""
        held = [r for r in self.waiting if any(self.tables.get(r.request_id, ()))]
        most = 0
        for group in self.groups:
            spans = {
                SlidingWindow: getattr(group.kind, "window_tokens", 0),
                ChunkedLocal: getattr(group.kind, "chunk_tokens", 0),
            }
            tokens = min(len(request.truth), spans.get(type(group.kind), len(request.truth)) + self.budget)
            most += tokens // group.tokens_per_block + 2
        return not held and most <= len(self.free)

    def _ahead(self, request):
        """With scheduling that runs ahead, the token being sampled counts, unless it is the last one."""
        return int(
            self.late
            and request.num_computed_tokens == request.num_known < request.num_prompt_tokens + request.max_tokens
        )

    def _allocate(self, request, num):
        """Frees what the law does not need, then takes blocks; `None` if there are too few."""
        computed = request.num_computed_tokens
        tables = self.tables.setdefault(request.request_id, [[] for _ in self.groups])
        wanted = []
        for table, group in zip(tables, self.groups, strict=True):
            skipped = needed(group.kind, computed)[0] // group.tokens_per_block
            if isinstance(group.kind, Recurrent):
                wanted.append([0] if not table else [])
                continue
            for i in range(min(skipped, len(table))):
                if table[i]:
                    self.free.append(table[i])
                    table[i] = 0
            total = -(-(computed + num) // group.tokens_per_block)
            wanted.append([-1 if i >= skipped else 0 for i in range(len(table), total)])
        if sum(one.count(-1) for one in wanted) > len(self.free):
            return None
        added = tuple([self.free.pop(0) if one else 0 for one in ones] for ones in wanted)
        for table, ids in zip(tables, added, strict=True):
            table += ids
        return added

    def _preempt(self, request):
        self._free(request)
        self.preemptions += 1
        request.status = "PREEMPTED"
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self.gone.add(request.request_id)
        self.waiting.insert(0, request)

    def execute(self, output, steps, gone):
        """The worker's step, in the order of vLLM's mixin and tpu-inference's runner."""
        worker = self.worker
        self.runner.update_states(output.num_scheduled_tokens, gone)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        self.runner.forward(steps)
        self.computed_tokens += sum(stop - start for _, _, start, stop in steps)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
        )
        worker.clear_connector_metadata()
        return told, [(request, stop) for request, _, _, stop in steps]

    def process(self, told, stops):
        """The scheduler hears of a step."""
        failed = set(told.failed_recving)
        self.failed_loads += len(failed)
        for request_id in failed:
            self.loading[request_id].num_computed_tokens = 0
        for request, stop in stops:
            if request.status != "RUNNING" or stop < request.num_known:
                continue
            request.learn(stop + 1)
            if request.num_known - request.num_prompt_tokens >= request.max_tokens:
                self.running.remove(request)
                self._finish(request)
        self.scheduler.update_connector_output(told)
        for request_id in told.finished_recving:
            request = self.loading.pop(request_id)
            if request.status == "FINISHED":
                self._free(request)
                del self.requests[request_id]
                continue
            request.status = request.before_loading
            if request.num_computed_tokens == 0:
                self._free(request)

    def step(self):
        self.pending.append(self.execute(*self.schedule()))
        while len(self.pending) > self.late:
            self.process(*self.pending.pop(0))

    def books(self):
        return self.scheduler._books.books.ledger

    def run(self, most=2000):
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not (self.requests or self.finished_ids):
                break
            self.step()
        while self.pending:
            self.process(*self.pending.pop(0))
        if not (self.requests or self.finished_ids):
            return
        raise AssertionError(
            f"still there: {[(r.request_id, r.status, r.num_computed_tokens) for r in self.requests.values()]}"
        )
