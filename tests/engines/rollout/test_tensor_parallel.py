"""Several ranks decode with one copy of the weights between them: the same tokens and log-probs as one rank, on all of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import Completion
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.models.decoder_layer import DecoderLayer
from lockstep.models.split_weights import Part, SplitEmbedding, check_sizes, split_of
from lockstep.models.tensor_group import TensorGroup
from lockstep.utils.fingerprint import fingerprint
from tests.engines.rollout.rollout_cases import (
    EOS,
    PAD,
    assert_same,
    embedded,
    mixed_requests,
    rollout_config,
    tiny_model,
)
from tests.engines.train import cases
from tests.engines.train.cases import Case
from tests.engines.train.ranks import Ranks
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.first

QUICK = [("qwen2", 2), ("qwen3", 2), ("llama", 4), ("smollm", 2), ("qwen3_moe", 2)]
"""Biases, norms of queries and keys, fewer key heads than ranks, a tied head, experts. In `make test`; the others are slow."""
OTHERS = ["qwen2", "qwen3", "llama", "smollm", "gemma", "gemma2", "granite", "phi3", "gpt_oss", "mixtral", "qwen3_moe"]
SLOW = [pytest.param(k, n, marks=pytest.mark.slow) for k in OTHERS for n in (2, 4) if (k, n) not in QUICK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def generate(
    kind: str, size: int, num_blocks: int | None = None, device: str = "cpu", **sampling: Any
) -> list[Completion]:
    engine = embedded(tiny_model(kind, device), num_blocks, tensor_model_parallel_size=size)
    return engine.generate(mixed_requests(**sampling))


@pytest.mark.parametrize(("kind", "size"), [*QUICK, *SLOW])
def test_ranks_decode_as_one(kind: str, size: int, ranks: Ranks) -> None:
    """The vocabulary of 61 tokens is padded; at the first request each engine compares itself with transformers."""
    expected = generate(kind, 1)
    for completions in ranks.run(size, generate, kind, size):
        assert_same(completions, expected)


def generate_filtered(size: int) -> list[Completion]:
    """Few blocks: sequences are preempted."""
    filtered = generate("qwen2", size, num_blocks=24, temperature=0.8, top_k=7, top_p=0.9)
    return [*filtered, *generate("qwen2", size, num_blocks=24, temperature=0.0)]


def test_filters_greedy_rows_and_preemption(ranks: Ranks) -> None:
    expected = generate_filtered(1)
    assert any(completion.num_preempted for completion in expected)
    for completions in ranks.run(2, generate_filtered, 2):
        assert_same(completions, expected)


def recorded_routes(size: int) -> list[Any]:
    engine = embedded(tiny_model("qwen3_moe"), tensor_model_parallel_size=size, enable_rollout_routing_replay=True)
    return [completion.routes for completion in engine.generate(mixed_requests())]


@pytest.mark.slow
def test_every_rank_records_the_experts_of_its_tokens(ranks: Ranks) -> None:
    expected = recorded_routes(1)
    for found in ranks.run(2, recorded_routes, 2):
        assert all((mine == theirs).all() for mine, theirs in zip(found, expected, strict=True))


def own_weights(kind: str, size: int) -> tuple[int, int, int]:
    """Numbers of weights of this rank, and of those that are not split; bytes that it caches per token."""
    model = tiny_model(kind)
    engine = embedded(model, tensor_model_parallel_size=size)
    split = split_of(model)
    assert split is not None and engine.runner is not None
    whole = sum(p.numel() for name, p in model.named_parameters() if name not in split.parts)
    cached = sum(shape.bytes_per_token for shape in engine.runner.layers().values())
    return sum(p.numel() for p in model.parameters()), whole, cached


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_ranks_have_one_copy_of_the_weights_and_of_the_cache(kind: str, ranks: Ranks) -> None:
    """But for norms, routers, and padding: a row of the embedding and of the head, and output biases, on the other rank."""
    model = tiny_model(kind)
    found = ranks.run(2, own_weights, kind, 2)
    num_whole = found[0][1]
    small = [p.numel() for name, p in model.named_parameters() if "norm" in name or "gate." in name or "router" in name]
    assert num_whole == sum(small)
    padding = 2 * 32
    if kind == "gpt_oss":  # biases of o_proj, and of each of four experts, in two layers
        padding += 2 * (32 + 4 * 32)
    assert sum(own for own, _, _ in found) == sum(p.numel() for p in model.parameters()) + num_whole + padding
    engine = embedded(model)
    assert engine.runner is not None
    cached = sum(shape.bytes_per_token for shape in engine.runner.layers().values())
    assert [own for _, _, own in found] == [cached / 2, cached / 2]


def groups_of_two() -> list[Completion]:
    """Ranks 0 and 1 generate other requests than ranks 2 and 3, and fewer."""
    engine = embedded(tiny_model(), tensor_model_parallel_size=2)
    first = dist.get_rank() < 2
    return engine.generate(mixed_requests()[: 3 if first else 8])


@pytest.mark.slow
def test_groups_of_ranks_generate_independently(ranks: Ranks) -> None:
    expected = generate("qwen2", 1)
    for rank, completions in enumerate(ranks.run(4, groups_of_two)):
        assert_same(completions, expected[: 3 if rank < 2 else 8])


def requests_that_join(size: int) -> list[Completion]:
    """Every third step another request comes; the fourth is aborted at once, the third after some steps."""
    engine = embedded(tiny_model(), tensor_model_parallel_size=size, max_num_seqs=4)
    requests = mixed_requests()
    found: dict[int, Completion] = {}
    with engine.serving():
        for place, request in enumerate(requests):
            engine.add(place, request)
            if place == 3:
                found |= engine.abort([3])
            for _ in range(3):
                if engine.unfinished():
                    found |= engine.step()
            if place == 4:
                found |= engine.abort([2])
        while engine.unfinished():
            found |= engine.step()
    return [found[place] for place in range(len(requests))]


def test_requests_that_join_and_leave_at_any_step(ranks: Ranks) -> None:
    expected = requests_that_join(1)
    for completions in ranks.run(2, requests_that_join, 2):
        assert_same(completions, expected)


def update(size: int) -> tuple[list[Completion], dict[str, int], list[Completion]]:
    """New weights by name, as a separate rollout gets them; the cache is freed in between."""
    model = tiny_model("qwen3")
    weights = {name: 1.1 * value for name, value in model.state_dict().items()}
    engine = embedded(model, tensor_model_parallel_size=size)
    before = engine.generate(mixed_requests())
    engine.sleep()
    engine.begin_update()
    engine.update_weights(iter(weights.items()))
    engine.finish_update(7)
    return before, engine.fingerprints([*weights]), engine.generate(mixed_requests())


def test_weights_are_replaced_and_proven_by_name(ranks: Ranks) -> None:
    """Fingerprints are those of whole tensors, as the trainer's."""
    expected = update(1)
    model = tiny_model("qwen3")
    sent = {name: fingerprint(1.1 * value) for name, value in model.state_dict().items()}
    for before, fingerprints, after in ranks.run(2, update, 2):
        assert fingerprints == expected[1] == sent
        assert_same(before, expected[0])
        assert_same(after, expected[2])
        assert {version for completion in after for version in completion.policy_versions} == {7}


def train_and_generate(folder: Path, case: Case, size: int) -> list[Completion]:
    """Samples of a training engine's policy before and after a step, by weights that are gathered from its shards."""
    engine = cases.build_engine(folder, case)
    device = torch.device(case.device)
    rollout = EmbeddedEngine(rollout_config(tensor_model_parallel_size=size), [EOS], PAD)
    module = engine.rollout_module()
    rollout.bind(module)
    completions = []
    addresses: list[list[int]] = []
    for step in range(2):
        with engine.lend_weights(module):
            completions += rollout.generate([replace(r, seed=step) for r in mixed_requests()])
            addresses.append([p.data_ptr() for p in module.parameters()])
            assert all(p.device.type == device.type for p in module.parameters())
            rollout.sleep()
        cases.engine_step(engine, case, step)
    assert addresses[0] == addresses[1]  # captured graphs remain valid
    return completions


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (Case(world=2), 2),
        (Case(world=2, lora=4), 2),
        pytest.param(Case(world=4, sp=2), 4, marks=pytest.mark.slow),
        pytest.param(Case(world=4, fsdp={"fsdp_size": 2}, lora=4), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_are_gathered_from_the_trainers_shards(case: Case, size: int, folder: Path, ranks: Ranks) -> None:
    expected = train_and_generate(folder, Case(lora=case.lora), 1)
    assert [c.token_ids for c in expected[:10]] != [c.token_ids for c in expected[10:]]
    for completions in ranks.run(case.world, train_and_generate, folder, case, size):
        assert_same(completions, expected)


def load(folder: Path, size: int, lora: int = 0) -> list[Completion]:
    """As a rollout in its own processes, with adapters that are not zero."""
    engine = EmbeddedEngine(rollout_config(tensor_model_parallel_size=size), [EOS], PAD)
    config = HFModelConfig(path=str(folder), lora_rank=lora)
    engine.load(config, "actor_rollout_ref.model", torch.float32, torch.device("cpu"))
    if lora:
        split = split_of(engine.module)
        own = {name: p for name, p in engine.module.named_parameters() if ".lora_B." in name}
        shapes = {name: p.shape if split is None else split.whole_shape(name, p) for name, p in own.items()}
        generator = torch.Generator().manual_seed(1)
        engine.update_weights((name, 0.3 * torch.randn(shape, generator=generator)) for name, shape in shapes.items())
    return engine.generate(mixed_requests())


@pytest.mark.parametrize("lora", [0, 4])
def test_a_rollout_loads_its_share_of_a_folder(lora: int, folder: Path, ranks: Ranks) -> None:
    expected = load(folder, 1, lora)
    for completions in ranks.run(2, load, folder, 2, lora):
        assert_same(completions, expected)


@pytest.mark.slow
def test_a_folder_with_separate_experts_is_sent_by_the_first_rank(tmp_path: Path, ranks: Ranks) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    expected = load(tmp_path, 1)
    for completions in ranks.run(2, load, tmp_path, 2):
        assert_same(completions, expected)


def with_fault(fault: str) -> str | None:
    """What the check at the first request says about a planted fault; None if it finds nothing."""
    patch = pytest.MonkeyPatch()
    if fault == "stream counted twice":
        patch.setattr(TensorGroup, "once", lambda self, stream: stream)
    elif fault == "no sum":
        patch.setattr(DecoderLayer, "_sum", lambda self, share: share)
    elif fault == "padding in the softmax":
        logits = ModelRunner.logits

        def padded(self: ModelRunner, hidden: Tensor) -> Tensor:
            self._vocab_size = None
            return logits(self, hidden)

        patch.setattr(ModelRunner, "logits", padded)
    elif fault == "embedding of another rank":
        patch.setattr(SplitEmbedding, "forward", _first_rows)
    try:
        generate("llama", 2)
    except ValueError as error:
        return str(error)
    finally:
        patch.undo()
    return None


def _first_rows(self: SplitEmbedding, token_ids: Tensor) -> Tensor:
    if self.use_reference:
        rows: Tensor = self.reference(token_ids)
        return rows
    return self.group.sum(self.reference(token_ids.clamp(max=len(self.weight) - 1)))


@pytest.mark.parametrize(
    "fault", ["stream counted twice", "no sum", "padding in the softmax", "embedding of another rank"]
)
def test_the_check_at_the_first_request_finds_faults(fault: str, ranks: Ranks) -> None:
    for message in ranks.run(2, with_fault, fault):
        assert message is not None and "the embedded rollout computes LlamaForCausalLM differently" in message


@pytest.mark.parametrize(
    ("kind", "changes", "size", "message"),
    [
        ("llama", {}, 3, " has 4 query and 2 key heads and 48 columns .* among 3 ranks; set one of 1, 2, 4$"),
        ("llama", {}, 8, "set one of 1, 2, 4$"),
        ("llama", {"intermediate_size": 50}, 4, "50 columns .*; set one of 1, 2$"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 2, "set one of 1, 3, 6$"),
        ("mixtral", {"intermediate_size": 6}, 4, "6 columns .*; set one of 1, 2$"),
        ("phi", {}, 2, "layers of transformers, which the embedded engine cannot split; set 1, or .*name=vllm$"),
        ("olmo2", {}, 2, "the query norm of Olmo2ForCausalLM spans all heads, which cannot be split; set 1$"),
    ],
)
def test_models_that_cannot_be_split(kind: str, changes: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^actor_rollout_ref.rollout.tensor_model_parallel_size=.*{message}"):
        check_sizes(tiny_model(kind, **changes), size)


def test_parts_of_a_weight_are_the_whole() -> None:
    """Two segments, of which ranks share the second; rows of zeros pad the first rank."""
    part = Part((8, 2), 0, 5, (((0, 2), (4, 6)), ((2, 4), (4, 6)), ((6, 8), (4, 6))))
    whole = torch.arange(16.0).view(8, 2)
    parts = [part.take(whole, rank) for rank in range(3)]
    assert parts[1].tolist() == [[4, 5], [6, 7], [8, 9], [10, 11], [0, 0]]
    assert torch.equal(part.join(torch.stack(parts)), whole)


@pytest.fixture(scope="module")
def ranks_on_a_gpu() -> Iterator[Ranks]:
    """They share the GPU, so that their collectives go through gloo, and CUDA graphs are off."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks = Ranks("cuda:0")
    yield ranks
    ranks.close()


def generate_on_a_gpu(kind: str, size: int) -> list[Completion]:
    if size > 1:
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
    return generate(kind, size, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm", "gemma2", "qwen3_moe"])
def test_two_ranks_on_one_gpu_decode_as_one(kind: str, ranks_on_a_gpu: Ranks) -> None:
    expected = generate_on_a_gpu(kind, 1)
    for completions in ranks_on_a_gpu.run(2, generate_on_a_gpu, kind, 2):
        assert_same(completions, expected)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_train_and_generate(folder: Path, ranks_on_a_gpu: Ranks) -> None:
    """FSDP2 and the split rollout, over gloo. Not with LoRA: torch 2.11 crashes when gloo gathers a DTensor on a GPU."""
    expected = train_and_generate(folder, Case(device="cuda:0"), 1)
    for completions in ranks_on_a_gpu.run(2, train_and_generate, folder, Case(world=2, device="cuda:0"), 2):
        assert_same(completions, expected)
