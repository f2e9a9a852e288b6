"""What DeepSpeed is started with, and what a user's JSON may say. DeepSpeed itself is not needed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.deepspeed_settings import DeepSpeedSettings, build_settings

OPTIM = FSDPOptimizerConfig(lr=1e-5, weight_decay=0.1)


def settings(*, dtype: torch.dtype = torch.float32, trained: bool = True, **keys: Any) -> DeepSpeedSettings:
    return build_settings(DeepSpeedEngineConfig(**keys), OPTIM if trained else None, 0.5, dtype)


def with_file(folder: Path, text: str, **keys: Any) -> DeepSpeedSettings:
    file = folder / "ds.json"
    file.write_text(text)
    return settings(config_path=str(file), **keys)


def test_the_run_decides_without_a_file() -> None:
    found = settings(zero_stage=3, param_offload=True, optimizer_offload=True, dtype=torch.bfloat16)
    assert found.stage == 3 and found.offloads_parameters and found.offloads_optimizer
    assert found.values["gradient_clipping"] == 0.5 and found.values["bf16"] == {"enabled": True}
    assert found.values["data_types"] == {"grad_accum_dtype": "fp32"}
    assert not settings().offloads_parameters and not settings().offloads_optimizer
    assert "data_types" not in settings().values


def test_values_of_the_file_are_passed_on_and_win(tmp_path: Path) -> None:
    text = """{
        "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto",
                              "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
        "wall_clock_breakdown": true,
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": false, "loss_scale_window": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": 0.1}},
        "gradient_clipping": 0.5, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 100
    }"""
    found = with_file(tmp_path, text, zero_stage=1, param_offload=True)
    zero = found.values["zero_optimization"]
    assert found.stage == 3 and zero["overlap_comm"] is True and "reduce_bucket_size" not in zero
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/nvme"}
    assert zero["offload_param"] == {"device": "cpu"}  # of the section
    assert found.values["wall_clock_breakdown"] is True and found.values["steps_per_print"] == 100
    assert found.values["train_micro_batch_size_per_gpu"] == 1 and "optimizer" not in found.values
    assert "train_batch_size" not in found.values and found.values["fp16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"train_batch_size": 64}', r"ds.json:2: train_batch_size=64 .*batch sizes are those of the run"),
        (
            '{\n\n"gradient_accumulation_steps": 4}',
            r"ds.json:3: gradient_accumulation_steps=4 .*conflicts with the run",
        ),
        ('{"gradient_clipping": 1.0}', r"ds.json:1: gradient_clipping=1.0 .*the run's clip_grad gives 0.5"),
        ('{"bf16":\n{"enabled": true}}', r"ds.json:2: bf16.enabled=true .*the run's deepspeed.dtype gives false"),
        ('{"fp16": {"enabled": true}}', r"fp16.enabled=true .*deepspeed.dtype gives false"),
        ('{"optimizer": {"type": "Lamb"}}', r'optimizer.type="Lamb" .*the optimizer is the run\'s: AdamW'),
        (
            '{"optimizer": {"type": "AdamW",\n"params": {\n"lr": 3e-4}}}',
            r"ds.json:3: optimizer.params.lr=0.0003 .*the run's optim.lr gives 1e-05",
        ),
        ('{"optimizer": {"params": {"amsgrad": true}}}', r"optimizer.params.amsgrad=true .*has no such setting"),
        ('{"scheduler": {"type": "WarmupLR"}}', r"scheduler=.*the learning rate follows the run's optim section"),
        ('{"tensor_parallel": {"autotp_size": 2}}', r"tensor_parallel=.*set strategy=megatron"),
        ('{"zero_optimization": {"stage": 3,}}', r"ds.json:1: deepspeed.config_path is not JSON"),
        ("[]", r"ds.json:1: deepspeed.config_path holds no JSON object"),
        (
            '{\n"zero_optimization": true}',
            r"ds.json:2: zero_optimization in deepspeed.config_path must be a JSON object",
        ),
    ],
)
def test_what_conflicts_with_the_run_is_refused_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        with_file(tmp_path, text)
    if "conflicts" in message or "gives" in message:
        assert 'Remove it from the file or set it to "auto"' in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dtype": torch.float16}, "set deepspeed.dtype to bfloat16 or float32, or strategy=fsdp for float16"),
        ({"model_dtype": "bf16"}, "deepspeed.model_dtype=bf16 .*set deepspeed.model_dtype=fp32"),
        ({"zero_stage": 0, "dtype": torch.bfloat16}, "set deepspeed.zero_stage=1"),
        ({"zero_stage": 2, "param_offload": True}, "set deepspeed.zero_stage=3"),
        ({"zero_stage": 0, "optimizer_offload": True}, "needs deepspeed.zero_stage=1, 2 or 3"),
        ({"config_path": "/nowhere.json"}, "deepspeed.config_path='/nowhere.json' cannot be read: No such file"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**keys)


def test_sections_may_be_null_or_auto(tmp_path: Path) -> None:
    text = '{"optimizer": {"type": "AdamW", "params": "auto"}, "zero_optimization": {"stage": 3, "offload_optimizer": null}}'
    found = with_file(tmp_path, text)
    assert found.stage == 3 and not found.offloads_optimizer


def test_a_model_that_only_computes_may_offload_at_any_stage() -> None:
    assert settings(trained=False, zero_stage=2, param_offload=True).stage == 2
    assert "offload_optimizer" not in settings(trained=False, optimizer_offload=True).values["zero_optimization"]
