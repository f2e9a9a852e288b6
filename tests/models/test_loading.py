"""Loading and exporting models of other shapes than the usual one."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from lockstep.config.model import HFModelConfig
from lockstep.models.export import save_scalar_model
from lockstep.models.loading import load_causal_lm, load_reward_model
from tests.tiny import save_tiny_model, tiny_tokenizer
from tests.value_model import load_value_model

CPU = torch.device("cpu")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=259, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_dropout_is_off_so_that_training_computes_the_sampled_policy(
    gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_causal_lm(HFModelConfig(path=str(gpt2)), "m", torch.float32, CPU).train()
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    assert "attn_pdrop=0.1" in caplog.text


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_critic_folder_opens_as_a_classifier_and_as_a_reward_model(gpt2: Path, tmp_path: Path, kind: str) -> None:
    folder = gpt2 if kind == "gpt2" else save_tiny_model(tmp_path / "qwen2")
    body, score = load_value_model(HFModelConfig(path=str(folder)), "m", torch.float32, CPU, seed=1)
    weights = [(f"{body.base_model_prefix}.{name}", tensor) for name, tensor in body.named_parameters()]
    save_scalar_model(body, [*weights, ("score.weight", score.weight)], tiny_tokenizer(), tmp_path / "critic")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.score.weight, score.weight)
    again, head = load_reward_model(HFModelConfig(path=str(tmp_path / "critic")), "m", torch.float32, CPU)
    assert torch.equal(head.weight, score.weight)
    with pytest.raises(ValueError, match=r"is a critic or reward model .* not a language model"):
        load_causal_lm(HFModelConfig(path=str(tmp_path / "critic")), "m", torch.float32, CPU)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), body.state_dict().values()))


def test_a_model_without_a_score_head_is_no_reward_model(gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.model\.path=.*no one-label `score` head"):
        load_reward_model(HFModelConfig(path=str(gpt2)), "reward_model.model", torch.float32, CPU)


def test_override_config_names_a_setting_that_exists(gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.override_config\.n_layers: GPT2Config has no such setting"):
        load_causal_lm(HFModelConfig(path=str(gpt2), override_config={"n_layers": 3}), "m", torch.float32, CPU)
