"""The connector beside the batch of tpu-inference, where that is installed: it says where states are."""

import numpy as np
import pytest

from tests.serving.vllm_engine import Runner

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("tpu_inference", reason="tpu-inference is not installed: its batch cannot be run")
pytestmark = pytest.mark.filterwarnings("ignore")


class TpuRunner(Runner):
    """Slots of states are given and taken by tpu-inference; its model is that of the small vLLM."""

    def __init__(self, groups, num_blocks, widths, max_seqs):
        from tpu_inference.runner.input_batch import InputBatch
        from tpu_inference.runner.persistent_batch_manager import PersistentBatchManager

        super().__init__(groups, num_blocks, widths, max_seqs)
        self.input_batch = InputBatch(
            max_num_reqs=max_seqs,
            max_model_len=512,
            max_num_batched_tokens=32,
            pin_memory=False,
            vocab_size=1000,
            block_sizes=[group.tokens_per_block for group in groups],
        )
        self.input_batch.has_mamba_layers = True
        self.input_batch.init_mamba_pools(max_seqs + 1)
        self.manager = PersistentBatchManager({}, self.input_batch, {}, False, None, True)

    def update(self, output):
        self.manager.update_states(output, None)
        batch = self.input_batch
        self.slots = {name: int(batch.mamba_state_indices_cpu[i]) for name, i in batch.req_id_to_index.items()}


@pytest.mark.parametrize("fails", [0, 0.4], ids=["well", "with failures"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_states_are_where_tpu_inference_has_them(tmp_path, monkeypatch, ahead, fails):
    from tests.serving import test_vllm_scheduler as under

    monkeypatch.setattr(under, "Runner", TpuRunner)
    engine = under.VllmEngine(tmp_path, under.STATES, num_blocks=50, prefix_caching=False, ahead=ahead)
    rng = np.random.default_rng(1)
    if fails:
        engine.worker._worker.mover = under.Unreliable(engine.worker._worker.mover, rng, fails=fails)
    under.converse(engine, rng, turns=5)
    assert engine.stats["preempted"] > 0
    assert engine.books.counts.loaded_by_group.all(), "chunks of each group came back"
