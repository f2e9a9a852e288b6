"""A base in 4 bits against QLoRA of transformers and peft: losses, gradients, memory, rollouts and files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lockstep.cli import main
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout.rollout_engine import create_rollout_engine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.shard_reader import ShardReader
from lockstep.models.four_bit import dequantized, is_4bit
from lockstep.models.loading import load_causal_lm
from lockstep.models.lora import adapter_layers
from lockstep.models.shared_weights import rollout_module
from lockstep.protocol.generation import GenerationRequest, SamplingParams
from tests.engines.train import cases
from tests.models.test_lora import log_probs, plain_log_probs, policy_engine, train
from tests.tiny import random_batch, save_tiny_model, tiny_tokenizer

Linear4bit = pytest.importorskip("bitsandbytes").nn.Linear4bit
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def peft_qlora(folder: Path, engine: FsdpEngine) -> Any:
    """What a user of transformers and peft writes, with the engine's adapters."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=nf4, device_map={"": "cpu"}, attn_implementation="eager"
    )
    for layer in base.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False  # would compute in bfloat16, and needs rows of 64
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    own = adapter_layers(engine.model.transformer)
    for path, layer in adapter_layers(model.base_model.model).items():
        for part in ("lora_A", "lora_B"):
            getattr(layer, part).load_state_dict(getattr(own[path], part).state_dict())
    return model


def peft_log_probs(model: Any) -> Tensor:
    """Like `plain_log_probs`, with gradients."""
    batch = random_batch()
    width, rows = batch["responses"].shape[1], []
    for i in range(len(batch)):
        mask = batch["attention_mask"][i].bool()
        ids, start = batch["input_ids"][i][mask], int(mask[:-width].sum())
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        columns = batch["response_mask"][i].nonzero().flatten()
        chosen = logp[start + columns - 1, ids[start + columns]]
        rows.append(torch.zeros(width).index_put((columns,), chosen))
    return torch.stack(rows)


def test_losses_and_gradients_are_those_of_peft(folder: Path) -> None:
    engine = policy_engine(folder, load_in_4bit=True)
    train(engine)  # adapters that are not zero
    plain = peft_qlora(folder, engine)
    expected = peft_log_probs(plain)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (expected - plain_log_probs(full)).abs().max() > 0.05
    torch.testing.assert_close(log_probs(engine), expected.detach(), atol=1e-5, rtol=1e-5)

    def loss_fn(outputs: dict[str, Tensor], rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -(outputs["log_probs"] * rows["response_mask"]).sum(), {}

    engine.forward_backward(random_batch(), loss_fn, cases.ONE_ROW)
    (-expected).sum().backward()
    own, theirs = adapter_layers(engine.model.transformer), adapter_layers(plain.base_model.model)
    assert own.keys() == theirs.keys() and len(own) == 14
    for path, layer in own.items():
        for part in ("lora_A", "lora_B"):
            found, wanted = (getattr(one, part)["default"].weight.grad for one in (layer, theirs[path]))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
            assert wanted.abs().max() > 0


def test_the_base_is_held_once_in_4_bits(folder: Path) -> None:
    engine = policy_engine(folder, load_in_4bit=True, dtype=torch.bfloat16)
    train(engine, 1)
    full = policy_engine(folder, dtype=torch.bfloat16)
    masters, copies = dict(engine.model.named_parameters()), dict(engine.compute.named_parameters())
    quantized = {name for name, parameter in masters.items() if is_4bit(parameter)}
    assert len(quantized) == 14 and all(name.endswith("_proj.base_layer.weight") for name in quantized)
    for name, parameter in full.model.named_parameters():
        assert (copies[name] is masters[name]) != ("lora_" in name)
        assert masters[name].nbytes == (parameter.nbytes / 4 if name in quantized else parameter.nbytes)
    assert engine.optimizer is not None and all("lora_" in name for name, p in masters.items() if p.requires_grad)


@pytest.mark.parametrize("name", ["embedded", "hf"])
def test_rollouts_decode_with_the_same_weights(name: str, folder: Path) -> None:
    engine = policy_engine(folder, load_in_4bit=True)
    train(engine)
    config = RolloutConfig(name=name, seed=0, prompt_length=8, response_length=8, max_num_seqs=4)
    shared, own = (create_rollout_engine(config, [2], 0) for _ in range(2))
    module = rollout_module(engine.model.transformer)
    shared.bind(module)
    requests = [GenerationRequest([5, 6 + i, 7], SamplingParams(max_tokens=6, ignore_eos=True), i) for i in range(3)]
    with engine.lend_weights(module):
        completions = shared.generate(requests)
        assert {p.data_ptr() for p in module.parameters()} == {p.data_ptr() for p in engine.compute.parameters()}
    # a rollout in another process quantises its own base, and is sent the adapters
    own.load(HFModelConfig(path=str(folder), lora_rank=4, load_in_4bit=True), "model", torch.float32, CPU)
    own.update_weights(engine.weights(trained=True))
    assert own.generate(requests) == completions
    plain = peft_qlora(folder, engine).eval()
    for request, completion in zip(requests, completions):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            expected = plain(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=1e-4)


def test_a_checkpoint_has_adapters_alone_and_merges_into_the_dequantised_base(folder: Path, tmp_path: Path) -> None:
    engine, part = policy_engine(folder, load_in_4bit=True), tmp_path / "global_step_2" / "actor"
    train(engine)
    engine.save(part)
    engine.export(part, tiny_tokenizer())
    held = ShardReader(part / "shards").read_metadata().state_dict_metadata
    assert held and all("lora_" in name for name in held)
    again = policy_engine(folder, load_in_4bit=True)
    again.load(part)
    assert torch.equal(log_probs(again), log_probs(engine))
    with pytest.raises(ValueError, match=r"was trained with model\.load_in_4bit=true; set the same"):
        policy_engine(folder).load(part)
    # the checkpoint as a model: what vLLM is sent, and what `lockstep export` writes
    loaded = load_causal_lm(HFModelConfig(path=str(part.parent)), "model", torch.float32, CPU)
    sent = dict(engine.merged_weights())
    state = loaded.state_dict()
    assert sent.keys() == dict(loaded.named_parameters()).keys()
    for name, weight in sent.items():
        torch.testing.assert_close(state[name], weight, atol=1e-6, rtol=1e-6)
    assert main(["export", str(part.parent), "-o", str(tmp_path / "out")]) == 0
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(weight, sent[name], atol=1e-6, rtol=1e-6)
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(plain_log_probs(loaded), log_probs(engine), atol=2e-5, rtol=1e-4)


def test_a_loaded_weight_is_quantised_in_place_of_a_file(tmp_path: Path) -> None:
    """A folder that transformers loads whole gives the same model as one whose tensors are read one by one."""
    weights = save_tiny_model(tmp_path / "model") / "model.safetensors"
    config = HFModelConfig(path=str(weights.parent), load_in_4bit=True, lora_rank=4)
    expected = {name: dequantized(p) for name, p in load_causal_lm(config, "m", torch.float32, CPU).named_parameters()}
    tensors = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32).state_dict()
    weights.unlink()
    torch.save(tensors, weights.parent / "pytorch_model.bin")
    found = load_causal_lm(config, "m", torch.float32, CPU)
    assert sum(map(is_4bit, found.parameters())) == 14
    assert all(torch.equal(dequantized(p), expected[name]) for name, p in found.named_parameters())
