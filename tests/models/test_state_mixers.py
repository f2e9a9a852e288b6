"""Recurrent and hybrid models on packed tokens: the log-probs and gradients of transformers, one row at a time."""

from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.attention import PackedAttention, no_mask
from lockstep.models.attention_variants import PackedIndexer
from lockstep.models.decoder import decoder_of
from lockstep.models.known_models import KNOWN_MIXERS, STATE_MODELS
from lockstep.models.loading import load_causal_lm
from lockstep.models.lora import adapter_layers, install_adapters
from lockstep.models.model_check import check_batch, check_outputs, transformers_forward
from lockstep.models.packing import Layout, forward_rows
from lockstep.models.state_layer import StateLayer
from lockstep.models.state_mixer import MIXERS, StateMixer
from lockstep.models.state_rows import PackedRows, RowStates, _Group
from lockstep.models.stream_layer import StreamLayer
from lockstep.models.token_models import PolicyModel
from tests.engines.train import cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.models.architectures import VOCAB, save_tiny_model, train_engine

pytestmark = pytest.mark.first

CPU = torch.device("cpu")
FAMILIES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "nemotron_h", "falcon_h1"),
    *("granitemoehybrid", "bamba", "jamba", "lfm2", "lfm2_moe", "minimax", "olmo_hybrid"),
    *("mamba", "mamba2", "falcon_mamba", "zamba", "zamba2", "recurrent_gemma", "zaya"),
)
QUICK = ("qwen3_next", "nemotron_h", "jamba", "lfm2", "zaya")
"""One of each kind, in `make test`; the others are slow."""
LENGTHS = ((5, 1), (5, 7), (5, 40), (1, 4), (1, 1), (9, 12), (3, 1))
"""Prompt and response of each row; the first three have one prompt, and the fourth and fifth."""
PROMPT, RESPONSE = (max(sizes) for sizes in zip(*LENGTHS))


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=[] if t in QUICK else pytest.mark.slow) for t in FAMILIES]
)
def test_packed_rows_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Packed and padded, all rows at once and in two parts, with and without gradient checkpointing."""
    reference = save_tiny_model(model_type, tmp_path)
    batch = make_batch()
    expected = transformers_log_probs(reference, batch)
    weighted(expected, batch).backward()
    theirs = gradients_of(reference)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    assert any(isinstance(module, StateMixer | StateLayer) for module in model.modules())
    policy = PolicyModel(model)
    layouts: list[Layout] = ["packed", "padded"]
    for layout, num_rows, checkpointing in [*((name, len(batch), False) for name in layouts), ("packed", 4, True)]:
        model.zero_grad()
        if checkpointing:
            LayerCheckpointing(policy, CPU, torch.float32, every_layer=True)
        parts = [policy(forward_rows(part, CPU, layout))["log_probs"] for part in batch.split(num_rows)]
        log_probs = torch.cat(parts)  # all forwards before the first backward: each recomputes with its own context
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
        weighted(log_probs, batch).backward()
        ours = gradients_of(model)
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            error = float((ours[name] - gradient).abs().max() / (gradient.abs().max() + 1e-6))
            assert error < 5e-5, f"{layout}: gradient of {name} is off by {error:.2g} of its largest element"


def test_every_mixer_is_of_a_family() -> None:
    assert set(STATE_MODELS) == {name for name in FAMILIES if name != "qwen3_5"}
    assert len(MIXERS) + len(KNOWN_MIXERS) == len(STATE_MODELS)


def test_a_mixer_that_restarts_takes_one_token_at_a_time_after_a_state(tmp_path: Path) -> None:
    """As `StateCore` of an engine that decodes: Mamba 1 has no scan from a state on."""
    save_tiny_model("jamba", tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    mixer = next(module for module in model.modules() if isinstance(module, StateMixer))
    rows, states = torch.randn(2, 9, 32), RowStates()
    with torch.no_grad():
        parts = [mixer._rows(part, states) for part in rows.split([4, 3, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), mixer._rows(rows, RowStates()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba"])
def test_a_leak_between_rows_is_refused(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an engine that loads a model finds rows that are not cut."""
    save_tiny_model(model_type, tmp_path)

    def whole_pack(self: Any) -> list[_Group]:
        index = np.arange(sum(self._lengths))[None]
        return [_Group(index, np.ones_like(index, dtype=bool))]

    leaking = cached_property(whole_pack)
    leaking.__set_name__(PackedRows, "groups")
    monkeypatch.setattr(PackedRows, "groups", leaking)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    with pytest.raises(ValueError, match="differently from transformers"):
        train_engine(model, packed=True)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "mamba"])
def test_a_layer_without_context_is_an_error(model_type: str, tmp_path: Path) -> None:
    save_tiny_model(model_type, tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    ids = torch.randint(VOCAB, (1, 6))
    with pytest.raises(RuntimeError, match="got no attention context: its state would run"):
        model(input_ids=ids, position_ids=torch.arange(6)[None], attention_mask=no_mask(CPU), use_cache=False)


def test_a_mixer_past_the_hooks_of_its_layer_is_an_error(tmp_path: Path) -> None:
    """It computes once for each context that its layer is given, or by transformers' own forward."""
    save_tiny_model("mamba", tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    layer = decoder_of(model).layers[0]
    x = torch.randn(1, 6, model.config.hidden_size)
    layer(x, lockstep_context=PackedAttention([4, 2], CPU))
    for module in (layer.mixer, layer.forward):
        with pytest.raises(RuntimeError, match="MambaMixer got no attention context: its state would run"):
            module(x)
    with transformers_forward(model):
        assert torch.equal(layer.mixer(x), layer.mixer.reference(x))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "deepseek_v32"])
def test_replaced_modules_know_whether_the_model_trains(model_type: str, tmp_path: Path) -> None:
    save_tiny_model(model_type, tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    replaced: list[Any] = [m for m in model.modules() if isinstance(m, StateMixer | StreamLayer | PackedIndexer)]
    assert replaced
    for mode in (True, False):
        model.train(mode)
        assert all(module.reference.training is mode for module in replaced)


@pytest.mark.slow
def test_two_ranks_train_as_transformers(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP2 with checkpointing; then adapters, also on the projections of the mixers."""
    folder = tmp_path / "model"
    save_tiny_model("qwen3_5_text", folder, vocab_size=259)
    for lora in (0, 4):
        case = Case(world=2, micro=MicroBatching(num_rows=2), checkpointing=True, lora=lora)
        expected = Reference(folder, "policy", case.num_real, "", lora).run(1)
        assert not lora or any("linear_attn" in name for name in expected["weights"])
        for result in ranks.run(2, cases.train, folder, case, 1):
            for name, values in expected["outputs"].items():
                np.testing.assert_allclose(result["outputs"][name][: case.num_real], values, atol=2e-5, rtol=1e-5)
            np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-4, rtol=1e-4)
            assert result["weights"].keys() == expected["weights"].keys()
            gaps = [np.abs(result["weights"][name] - weight).ravel() for name, weight in expected["weights"].items()]
            # AdamW steps by lr * gradient / |gradient|: a gradient of rounding errors alone goes anywhere
            assert np.mean(np.concatenate(gaps) > 1e-5) < 1e-3


def test_ranks_cannot_share_a_sequence(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5_text", tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    message = "ulysses_sequence_parallel_size=2: qwen3_5_text has layers with a state.* set it to 1"
    two_ranks = patch("lockstep.engines.train.token_engine.current_world_size", return_value=2)
    with two_ranks, pytest.raises(ValueError, match=message):
        train_engine(model, packed=True, sequence_parallel_size=2)


@pytest.mark.parametrize("model_type", ["minimax", "mamba", "kimi_linear"])
def test_half_precision_copy_of_float32_masters(model_type: str, tmp_path: Path) -> None:
    """Buffers and residual streams in float32 meet weights in bfloat16; the engine compares with transformers."""
    save_tiny_model(model_type, tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.float32, CPU)
    config = FSDPEngineConfig(), FSDPOptimizerConfig()
    FsdpEngine(PolicyModel(model), *config, device=CPU, compute_dtype=torch.bfloat16, packed=True)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_in_bfloat16(model_type: str, tmp_path: Path) -> None:
    """Weights and computation in bfloat16: packed and padded rows are transformers' rows."""
    save_tiny_model(model_type, tmp_path)
    model = load_causal_lm(HFModelConfig(path=str(tmp_path)), "model", torch.bfloat16, CPU)
    policy, batch = PolicyModel(model), check_batch(VOCAB)
    layouts: list[Layout] = ["packed", "padded"]
    with torch.no_grad():
        with transformers_forward(model):
            expected = policy(forward_rows(batch, CPU, "rows"))
        for layout in layouts:
            got = policy(forward_rows(batch, CPU, layout))
            check_outputs(got, expected, batch, model=model, path=layout, dtype=torch.bfloat16)


def test_a_base_in_4_bits_keeps_weights_that_are_used_directly(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    save_tiny_model("jamba", tmp_path)
    policy = with_adapters(tmp_path, load_in_4bit=True)
    train_engine(policy.transformer, packed=True)


LORA_LAYERS = {
    "qwen3_next": "in_proj_ba in_proj_qkvz k_proj o_proj out_proj q_proj shared_expert_gate v_proj",
    "minimax": "k_proj o_proj out_proj output_gate q_proj qkv_proj v_proj",
    "mixtral": "k_proj o_proj q_proj v_proj",
    "deepseek_v32": "kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj",
    "hy_v4": "down_proj gate_proj kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj up_proj",
    "falcon_mamba": "in_proj x_proj",
    "nemotron_h": "down_proj in_proj k_proj o_proj q_proj up_proj v_proj",
}
"""What `target_modules=all-linear` means for models with fused experts, and with layers that cannot have an adapter."""


@pytest.mark.parametrize("model_type", LORA_LAYERS)
def test_adapters_are_on_the_linear_layers_that_there_are(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(model_type, tmp_path)
    with caplog.at_level("INFO", logger="lockstep.models.lora"):
        policy = with_adapters(tmp_path)
    if model_type == "deepseek_v32":
        assert "left out wherever they are: down_proj, gate_proj, up_proj, weights_proj, wk, wq_b" in caplog.text
    layers = adapter_layers(policy.transformer)
    assert sorted({path.rpartition(".")[2] for path in layers}) == LORA_LAYERS[model_type].split()
    train_engine(policy.transformer, packed=True)  # compares with peft's own forward


@pytest.mark.parametrize(
    ("model_type", "target", "message"),
    [
        ("mamba", "dt_proj", "uses the weight of dt_proj directly, where an adapter has no effect; leave it out"),
        ("hy_v4", "wk", "wk of HYV4ForCausalLM is in the indexer, which only picks keys.*no gradient; leave it out"),
        ("mixtral", "w2", "experts of MixtralForCausalLM is not a linear layer; its linear layers are k_proj"),
    ],
)
def test_adapters_that_would_do_nothing_are_refused(model_type: str, target: str, message: str, tmp_path: Path) -> None:
    save_tiny_model(model_type, tmp_path)
    with pytest.raises(ValueError, match=message):
        with_adapters(tmp_path, target_modules=[target])


def with_adapters(folder: Path, **settings: Any) -> PolicyModel:
    config = HFModelConfig(path=str(folder), lora_rank=2, **settings)
    policy = PolicyModel(load_causal_lm(config, "model", torch.float32, CPU))
    install_adapters(policy, config, "model", dtype=torch.float32, device=CPU, seed=1)
    return policy


def make_batch() -> TensorDict:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (len(LENGTHS), PROMPT + RESPONSE), generator=generator)
    prompt, response = torch.tensor(LENGTHS).T[..., None]
    ids[1:3, :PROMPT] = ids[0, :PROMPT]
    ids[4, :PROMPT] = ids[3, :PROMPT]
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt
    response_mask = (torch.arange(RESPONSE) < response).long()
    mask = torch.cat((prompt_mask.long(), response_mask), 1)
    return TensorDict(
        {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT:],
            "response_mask": response_mask,
            "advantages": torch.randn(len(LENGTHS), RESPONSE, generator=generator),
        },
        batch_size=[len(LENGTHS)],
    )


def transformers_log_probs(model: Any, batch: TensorDict) -> Tensor:
    rows = []
    for row, (_, length) in zip(batch, LENGTHS):
        ids = row["input_ids"][row["attention_mask"].bool()]
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0, -length - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(1, ids[-length:, None])[:, 0]
        rows.append(torch.cat((chosen, chosen.new_zeros(RESPONSE - length))))
    return torch.stack(rows)


def weighted(log_probs: Tensor, batch: TensorDict) -> Tensor:
    return (log_probs * batch["advantages"] * batch["response_mask"]).sum()


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
