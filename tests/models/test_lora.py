"""LoRA adapters against peft and plain transformers: forward, gradients, files, merging, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.compose import load_config
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout.rollout_engine import GenerationRequest, SamplingParams, create_rollout_engine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.shard_reader import ShardReader
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.loading import (
    load_causal_lm,
    load_reward_model,
    open_causal_lm,
    open_value_model,
)
from lockstep.models.lora import adapter_layers, install_adapters
from lockstep.models.model_check import reference_log_probs
from lockstep.models.shared_weights import rollout_module
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.policy import Policy
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import random_batch, save_tiny_model, save_tiny_moe, tiny_tokenizer
from tests.value_model import load_value_model

CPU = torch.device("cpu")
ALL_ROWS = MicroBatching()
OPTIM = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def policy_engine(folder: Path, *, dtype: torch.dtype = torch.float32, **model: Any) -> FsdpEngine:
    config = HFModelConfig(path=str(folder), **{"lora_rank": 4, **model})
    opened, weights = open_causal_lm(config, "model", dtype, CPU)
    return engine_of(PolicyModel(opened), weights, config, dtype)


def engine_of(model: TokenModel, weights: Any, config: HFModelConfig, dtype: torch.dtype) -> FsdpEngine:
    install_adapters(model, config, "model", dtype=torch.float32, device=CPU, seed=1)
    options: dict[str, Any] = {"device": CPU, "compute_dtype": dtype, "packed": True, "gradient_checkpointing": True}
    return FsdpEngine(model, FSDPEngineConfig(), OPTIM, weights=weights, **options)


def train(engine: FsdpEngine, num_steps: int = 2, micro: MicroBatching = ALL_ROWS) -> None:
    """Raise the likelihood of a batch, or move values to 1."""

    def loss_fn(outputs: dict[str, Tensor], rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        mask = rows["response_mask"]
        if "values" in outputs:
            return ((outputs["values"] - 1) ** 2 * mask).sum() / 30, {}
        return -(outputs["log_probs"] * mask).sum() / 30, {}

    for _ in range(num_steps):
        engine.forward_backward(random_batch(), loss_fn, micro)
        engine.optimizer_step()


def log_probs(engine: FsdpEngine) -> Tensor:
    return engine.forward(random_batch(), ALL_ROWS)["log_probs"]


def plain_log_probs(model: Any) -> Tensor:
    """Of the same rows by a plain model, one at a time."""
    batch = random_batch()
    width = batch["responses"].shape[1]
    found = torch.zeros(len(batch), width)
    for i in range(len(batch)):
        mask = batch["attention_mask"][i].bool()
        ids, start = batch["input_ids"][i][mask], int(mask[:-width].sum())
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        columns = batch["response_mask"][i].nonzero().flatten()
        found[i, columns] = logp[start + columns - 1, ids[start + columns]]
    return found


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FsdpEngine, Path]:
    """An engine after two steps, and its adapter's folder."""
    engine, target = policy_engine(folder), tmp_path_factory.mktemp("run") / "global_step_2" / "actor"
    train(engine)
    engine.export(target, tiny_tokenizer())
    return engine, target / "lora_adapter"


def test_the_adapter_loads_with_peft_and_computes_the_same(trained: tuple[FsdpEngine, Path], folder: Path) -> None:
    engine, adapter = trained
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {f.name for f in adapter.iterdir()}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = plain_log_probs(base)
    loaded = PeftModel.from_pretrained(base, adapter).eval()
    torch.testing.assert_close(log_probs(engine), plain_log_probs(loaded), atol=2e-5, rtol=1e-5)
    assert (plain_log_probs(loaded) - before).abs().max() > 0.1
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    by_name = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)  # which opens the base too
    assert torch.equal(plain_log_probs(by_name), plain_log_probs(loaded))


def test_adapters_off_is_the_reference_bit_for_bit(trained: tuple[FsdpEngine, Path], folder: Path) -> None:
    engine, _ = trained
    policy, weights = open_causal_lm(HFModelConfig(path=str(folder)), "model", torch.float32, CPU)
    options: dict[str, Any] = {"device": CPU, "compute_dtype": torch.float32, "packed": True}
    reference = FsdpEngine(PolicyModel(policy), FSDPEngineConfig(), None, weights=weights, **options)
    for micro in (ALL_ROWS, MicroBatching(num_rows=2), MicroBatching(max_tokens=24)):
        with engine.adapters_off():
            off = engine.forward(random_batch(), micro, temperature=0.7)
        assert torch.equal(off["log_probs"], reference.forward(random_batch(), micro, temperature=0.7)["log_probs"])
    assert not torch.equal(off["log_probs"], log_probs(engine))


def test_the_base_is_held_once_in_the_compute_dtype(folder: Path) -> None:
    engine = policy_engine(folder, dtype=torch.bfloat16)
    train(engine, 1)
    masters, copies = dict(engine.model.named_parameters()), dict(engine.compute.named_parameters())
    frozen = {name for name, parameter in masters.items() if not parameter.requires_grad}
    assert all(("lora_" in name) != (name in frozen) for name in masters)
    for name, parameter in masters.items():
        assert parameter.dtype == (torch.bfloat16 if name in frozen else torch.float32)
        assert copies[name].dtype == torch.bfloat16
        assert (copies[name].data_ptr() == parameter.data_ptr()) == (name in frozen)
        assert parameter.grad is None and copies[name].grad is None
    assert engine.optimizer is not None
    assert {id(p) for p in engine.optimizer.state} == {id(p) for name, p in masters.items() if name not in frozen}
    assert all(torch.equal(copies[name], masters[name].bfloat16()) for name in masters)


@pytest.mark.parametrize("micro", [MicroBatching(num_rows=1), MicroBatching(max_tokens=24)])
def test_an_update_does_not_depend_on_the_micro_batch_split(
    micro: MicroBatching, trained: tuple[FsdpEngine, Path], folder: Path
) -> None:
    expected = dict(trained[0].weights(trained=True))
    engine = policy_engine(folder)
    train(engine, micro=micro)
    for name, weight in engine.weights(
        trained=True
    ):  # AdamW's step is lr * sign(gradient): where that is ~0 it may flip
        assert (weight - expected[name]).abs().mean() < 1e-4, name


def test_an_adapter_of_a_tied_head_cannot_be_merged(tmp_path: Path) -> None:
    engine = policy_engine(save_tiny_model(tmp_path, tie_word_embeddings=True), target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="adapter of lm_head cannot be merged: the layer's weight is tied"):
        next(engine.merged_weights())


@pytest.mark.parametrize("name", ["embedded", "hf"])
def test_rollouts_decode_with_the_trainers_own_tensors(
    name: str, trained: tuple[FsdpEngine, Path], folder: Path
) -> None:
    """Unmerged in the rollout and merged in a plain model: the same log-probs within rounding."""
    engine, adapter = trained
    config = RolloutConfig(name=name, prompt_length=8, response_length=8, max_num_seqs=4)
    rollout = create_rollout_engine(config, [2], 0)
    module = rollout_module(engine.model.transformer)
    rollout.bind(module)
    requests = [GenerationRequest([5, 6 + i, 7], SamplingParams(max_tokens=6, ignore_eos=True), i) for i in range(3)]
    with engine.lend_weights(module):
        completions = rollout.generate(requests)
        own = {parameter.data_ptr() for parameter in engine.compute.parameters()}
        assert {parameter.data_ptr() for parameter in module.parameters()} == own
    merged: Any = load_causal_lm(HFModelConfig(path=str(adapter)), "model", torch.float32, CPU)
    rows = [request.prompt_ids + completion.token_ids for request, completion in zip(requests, completions)]
    for completion, expected in zip(completions, reference_log_probs(merged, rows)):
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected[-6:], atol=2e-5, rtol=1e-4)


def test_merged_weights_are_those_of_peft(trained: tuple[FsdpEngine, Path], folder: Path) -> None:
    _, adapter = trained
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    loaded = load_causal_lm(HFModelConfig(path=str(adapter.parent.parent)), "model", torch.float32, CPU).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(loaded[name], weight, atol=1e-6, rtol=1e-6)


def test_an_adapter_with_a_relative_base_moves_with_it(trained: tuple[FsdpEngine, Path], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "base")
    target = tmp_path / "adapter"
    target.mkdir()
    for file in trained[1].iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "../base"}))
    model = load_causal_lm(HFModelConfig(path=str(target)), "model", torch.float32, CPU)
    torch.testing.assert_close(plain_log_probs_of(model), log_probs(trained[0]), atol=2e-5, rtol=1e-4)


def test_an_adapter_on_a_checkpoint_names_the_folder_that_peft_opens(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "run" / "global_step_1" / "huggingface")
    eos = {"eos_token_id": [3, 5]}
    (base / "generation_config.json").write_text(json.dumps(eos))
    engine = policy_engine(base.parent)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "the adapter's own"
    engine.export(tmp_path / "adapted" / "global_step_2" / "actor", tokenizer)
    adapter = tmp_path / "adapted" / "global_step_2" / "actor" / "lora_adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    AutoPeftModelForCausalLM.from_pretrained(adapter)
    # tokens that end a response are the base's, the tokenizer is the adapter's
    _, used, ends = Policy(adapter.parents[1])._load()
    assert used.chat_template == "the adapter's own" and {3, 5} < set(ends)
    (tmp_path / "rows.jsonl").touch()
    paths = [f"data.train_files={tmp_path}/rows.jsonl", f"actor_rollout_ref.model.path={adapter}"]
    settings = load_config(PPOConfig, paths)
    worker = ActorRolloutRefWorker(settings.actor_rollout_ref, "rollout", "cpu")
    worker.init_model()
    assert worker.tokenizer.chat_template == "the adapter's own"


def plain_log_probs_of(model: Any) -> Tensor:
    model.set_attn_implementation("eager")
    return plain_log_probs(model)


def test_training_goes_on_from_a_saved_adapter(trained: tuple[FsdpEngine, Path], folder: Path) -> None:
    engine, adapter = trained
    again = policy_engine(folder, lora_adapter_path=str(adapter), lora_alpha=99)  # alpha is the adapter's
    assert torch.equal(log_probs(again), log_probs(engine))


def test_fused_experts_stay_frozen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    moe = save_tiny_moe(tmp_path / "moe", mlp_only_layers=[0])
    with caplog.at_level("INFO"):
        engine = policy_engine(moe)
    assert (
        "are on k_proj, o_proj, q_proj, v_proj; left out wherever they are: down_proj, gate_proj, up_proj"
        in caplog.text
    )
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.rpartition(".")[2] for name in adapter_layers(engine.model)} == attention
    before = log_probs(engine)
    train(engine)
    after = log_probs(engine)
    assert float((after - before).sum()) > 0.1
    engine.export(tmp_path, tiny_tokenizer())
    base = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "lora_adapter").eval()
    mask = random_batch()["response_mask"].bool()
    torch.testing.assert_close(plain_log_probs(loaded)[mask], after[mask], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="of Qwen3MoeForCausalLM is not a linear layer; its linear layers are"):
        policy_engine(moe, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])


def test_a_critic_trains_adapters_and_its_head(folder: Path, tmp_path: Path) -> None:
    config = HFModelConfig(path=str(folder), lora_rank=4)
    body, score, weights = open_value_model(config, "critic.model", torch.float32, CPU, seed=3)
    engine = engine_of(ScalarModel(body, score), weights, config, torch.float32)
    before = score.weight.detach().clone()
    train(engine)
    assert not torch.equal(score.weight, before)
    engine.export(tmp_path, tiny_tokenizer())
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "lora_adapter").eval()
    batch = random_batch()
    mask = batch["attention_mask"][0].bool()
    ids, length = batch["input_ids"][0][mask], int(mask[-8:].sum())
    with torch.no_grad():
        hidden = loaded.base_model.model.model(input_ids=ids[None]).last_hidden_state[0]
        values = loaded.base_model.model.score(hidden)[-length - 1 : -1, 0]
    found = engine.forward(batch, ALL_ROWS)["values"][0, :length]
    columns = batch["response_mask"][0, :length].bool()
    torch.testing.assert_close(found[columns], values[columns], atol=1e-5, rtol=1e-4)


def test_a_critics_adapter_is_a_model_with_its_head(folder: Path, tmp_path: Path) -> None:
    config = HFModelConfig(path=str(folder), lora_rank=4)
    body, score, weights = open_value_model(config, "critic.model", torch.float32, CPU, seed=3)
    engine = engine_of(ScalarModel(body, score), weights, config, torch.float32)
    train(engine)
    engine.export(tmp_path / "critic", tiny_tokenizer())
    path = HFModelConfig(path=str(tmp_path / "critic" / "lora_adapter"))
    for model in (
        load_value_model(path, "m", torch.float32, CPU, seed=0),
        load_reward_model(path, "m", torch.float32, CPU),
    ):
        merged = FsdpEngine(
            ScalarModel(*model), FSDPEngineConfig(), None, device=CPU, compute_dtype=torch.float32, packed=True
        )
        values = [e.forward(random_batch(), ALL_ROWS)["values"] for e in (merged, engine)]
        torch.testing.assert_close(*values, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"is a critic or reward model .* not a language model"):
        load_causal_lm(path, "m", torch.float32, CPU)


def test_targets_select_layers(folder: Path) -> None:
    some = policy_engine(folder, target_modules=["q_proj", "v_proj"])
    assert {name.rpartition(".")[2] for name in adapter_layers(some.model)} == {"q_proj", "v_proj"}
    train(some)
    others = policy_engine(folder, target_modules=r".*\.mlp\..*_proj", exclude_modules=["up_proj"])
    assert {name.rpartition(".")[2] for name in adapter_layers(others.model)} == {"gate_proj", "down_proj"}


LINEARS = "its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["foo"]}, rf"model\.target_modules=\['foo'\] matches no linear layer of .*; {LINEARS}"),
        ({"target_modules": ["q_proj", "foo"]}, r"model\.target_modules=.*: foo matches no linear layer"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens of Qwen2ForCausalLM is not a linear layer"),
        ({"exclude_modules": ".*"}, r"model\.exclude_modules=\.\* excludes every layer that .*all-linear selects"),
        ({"lora_adapter_path": "BASE"}, r"model\.lora_adapter_path=.*: it has no adapter_config\.json"),
        ({"lora_adapter_path": "ADAPTER", "lora_rank": 8}, r"has rank 4, not 8; set model\.lora_rank=4"),
        ({"lora_adapter_path": "ADAPTER", "path": "WIDE"}, r"is an adapter of another base model: .* has shape"),
        ({"path": "ADAPTER"}, r"model\.path=.* is an adapter: to go on training it, set model\.path to its base model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, trained: tuple[FsdpEngine, Path], folder: Path, tmp_path: Path
) -> None:
    places = {"BASE": folder, "ADAPTER": trained[1], "WIDE": tmp_path / "wide"}
    if "WIDE" in settings.values():
        save_tiny_model(tmp_path / "wide", intermediate_size=96)
    settings = {
        key: str(places.get(value, value)) if isinstance(value, str) else value for key, value in settings.items()
    }
    with pytest.raises(ValueError, match=message):
        policy_engine(Path(settings.pop("path", str(folder))), **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True of its adapter_config.json is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa of its adapter_config.json is not supported"),
        ({"use_dora": True}, "use_dora=True of its adapter_config.json is not supported"),
        ({"peft_type": "LOHA"}, "only LoRA is supported"),
        ({"base_model_name_or_path": None}, "does not name its base model"),
        ({"base_model_name_or_path": "nowhere/here/at-all"}, "base model of .*=nowhere/here/at-all"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    changes: dict[str, Any], message: str, trained: tuple[FsdpEngine, Path], tmp_path: Path
) -> None:
    for file in trained[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=message):
        load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)


def test_what_was_trained_beside_adapters_is_not_dropped(trained: tuple[FsdpEngine, Path], tmp_path: Path) -> None:
    for file in trained[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "adapter_model.safetensors"
    save_file(load_file(weights) | {"base_model.model.lm_head.weight": torch.zeros(4, 4)}, weights)
    path = HFModelConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.path=.*it also trained lm_head\.weight"):
        load_causal_lm(path, "model", torch.float32, CPU)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.path=.*has no adapter_model\.safetensors"):
        load_causal_lm(path, "model", torch.float32, CPU)


def test_a_checkpoint_belongs_to_its_base_and_settings(
    trained: tuple[FsdpEngine, Path], folder: Path, tmp_path: Path
) -> None:
    engine, _ = trained
    engine.save(tmp_path / "step")
    again = policy_engine(folder)
    again.load(tmp_path / "step")
    assert torch.equal(log_probs(again), log_probs(engine))
    held = ShardReader(tmp_path / "step" / "shards").read_metadata().state_dict_metadata
    assert held and all("lora_" in name for name in held)  # of the model and of the optimizer
    with pytest.raises(ValueError, match=r"was trained with other adapters: rank 4, not 8; see model\.lora_rank"):
        policy_engine(folder, lora_rank=8).load(tmp_path / "step")
    with pytest.raises(ValueError, match=r"was trained with other adapters: alpha 16, not 8; see model\.lora_alpha"):
        policy_engine(folder, lora_alpha=8).load(tmp_path / "step")
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=rf"was trained on other base weights, those of {folder}, than {other} has"):
        policy_engine(other).load(tmp_path / "step")
    with pytest.raises(ValueError, match=r"has LoRA adapters, without their base; set model\.lora_rank=4"):
        policy_engine(folder, lora_rank=0).load(tmp_path / "step")
    policy_engine(folder, lora_rank=0).save(tmp_path / "full")
    with pytest.raises(ValueError, match=r"has no LoRA adapters: .*set model\.lora_rank=0"):
        policy_engine(folder).load(tmp_path / "full")


def test_the_check_at_load_time_covers_adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters start as zero: the check gives them values, so that a wrong computation of them is found."""
    from lockstep.kernels import linear

    monkeypatch.setattr(linear, "_add_adapters", lambda out, x, adapters, sizes: None)
    with pytest.raises(ValueError, match="computes Qwen2ForCausalLM differently from transformers"):
        policy_engine(folder, lora_alpha=512)
