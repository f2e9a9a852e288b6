"""The configuration of SFT: verl's files compose, wrong settings are named."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config import sft_compat
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.reference import field_docs
from lockstep.config.schema import keys, sections
from lockstep.config.sft import SFTConfig

SFT_TRAINER = """
data:
  {train_batch_size: 256, micro_batch_size: null, micro_batch_size_per_gpu: 4, train_files: train.parquet,
   val_files: test.parquet, train_max_samples: -1, val_max_samples: -1, prompt_key: question, response_key: answer,
   prompt_dict_keys: null, response_dict_keys: null, max_length: 1024, truncation: error, balance_dp_token: false,
   multiturn: {enable: false, messages_key: messages, tools_key: tools, enable_thinking_key: enable_thinking},
   chat_template: null, custom_cls: {path: null, name: null}, use_shm: false, apply_chat_template_kwargs: {}}
model:
  {partial_pretrain: ~/models/gemma-1.1-7b-it, use_shm: false, external_lib: null, enable_gradient_checkpointing: true,
   fsdp_config: {model_dtype: fp32, wrap_policy: {min_num_params: 0}, cpu_offload: false, offload_params: false},
   trust_remote_code: false, lora_rank: 0, lora_alpha: 16, target_modules: all-linear, use_liger: false, strategy: fsdp2}
optim: {lr: 1e-5, betas: [0.9, 0.95], weight_decay: 0.01, lr_warmup_steps_ratio: 0.1, clip_grad: 1.0, lr_scheduler: cosine,
  optimizer: AdamW, optimizer_impl: torch.optim, override_optimizer_config: null, warmup_style: null}
ulysses_sequence_parallel_size: 1
use_remove_padding: false
trainer:
  {default_local_dir: "checkpoints/${trainer.project_name}/${trainer.experiment_name}", default_hdfs_dir: null,
   project_name: gsm8k-sft, experiment_name: test, total_epochs: 4, total_training_steps: null, logger: [console, wandb],
   seed: 1, save_freq: -1, test_freq: -1, nnodes: 1, n_gpus_per_node: 8, max_ckpt_to_keep: null, resume_mode: auto,
   resume_from_path: null, device: cuda,
   checkpoint: {save_contents: [model, optimizer, extra], load_contents: "${trainer.checkpoint.save_contents}"}}
"""
"""verl's sft_trainer.yaml."""

SFT_TRAINER_ENGINE = """
data:
  {train_batch_size: 256, micro_batch_size_per_gpu: 4, max_token_len_per_gpu: 8192, use_dynamic_bsz: true,
   train_files: train.parquet, val_files: null, messages_key: messages, tools_key: tools, pad_mode: no_padding,
   enable_thinking_key: enable_thinking, max_length: 1024, truncation: error, ignore_input_ids_mismatch: false}
model: {path: ~/models/x, use_remove_padding: true, lora_rank: 0, tiled_mlp: {enabled: false}, mtp: {enable: false}}
engine: {_target_: x, strategy: fsdp, param_offload: false, fsdp_size: -1, ulysses_sequence_parallel_size: 1, dtype: bfloat16,
  use_orig_params: false, forward_only: false, full_determinism: false}
optim: {_target_: x, optimizer: AdamW, lr: 1e-3, lr_scheduler_type: constant, lr_warmup_steps: -1, min_lr_ratio: 0.0}
profiler: {enable: false, tool: null}
checkpoint: {_target_: x, save_contents: [model], load_contents: "${checkpoint.save_contents}"}
trainer: {project_name: p, profile_interval: [-1, -1], n_gpus_per_node: 1}
"""


def load(*overrides: str, **options: object) -> SFTConfig:
    return load_config(SFTConfig, overrides, run_checks=False, **options)  # type: ignore[arg-type]


def test_every_key_is_documented_and_tables_match_the_schema() -> None:
    assert [key.name for key in keys(SFTConfig).values() if not field_docs(key.owner).get(key.field)] == []
    known, tables = {*keys(SFTConfig), *sections(SFTConfig)}, sft_compat.TABLES
    assert {target for target in tables.aliases.values() if target not in tables.keys} <= known
    assert set(tables.unsupported_values) <= known
    assert not known & tables.keys


def test_files_of_verl_compose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sft.yaml").write_text(SFT_TRAINER)
    with caplog.at_level(logging.WARNING):
        config = load(config_name="sft", config_dir=tmp_path)
    assert config.model.path.endswith("models/gemma-1.1-7b-it") and config.data.val_files == ["test.parquet"]
    assert not config.model.use_remove_padding and not config.data.use_dynamic_bsz
    assert config.optim.lr_scheduler_type == "cosine" and config.optim.betas == (0.9, 0.95)
    assert config.trainer.checkpoint.load_contents == ["model", "optimizer", "extra"]
    assert config.trainer.default_local_dir == "checkpoints/gsm8k-sft/test"
    assert "model.partial_pretrain is read as model.path" in caplog.messages
    assert any(m.startswith("trainer.n_gpus_per_node has no effect: torchrun") for m in caplog.messages)

    (tmp_path / "engine.yaml").write_text(SFT_TRAINER_ENGINE.replace("${checkpoint.", "${trainer.checkpoint."))
    config = load(config_name="engine", config_dir=tmp_path)
    assert config.data.use_dynamic_bsz and config.model.fsdp_config.dtype == "bfloat16"
    assert config.trainer.checkpoint.save_contents == ["model"]


def test_aliases_and_what_follows_from_them() -> None:
    config = load("+data.prompt_dict_keys=['question']", "data.micro_batch_size=2", "ulysses_sequence_parallel_size=2")
    assert config.data.prompt_dict_keys == ["question"] and config.data.micro_batch_size_per_gpu == 2
    assert config.data.use_dynamic_bsz is None and load().data.use_dynamic_bsz is None  # by sequences; by tokens
    assert load("data.max_token_len_per_gpu=4096").data.use_dynamic_bsz
    assert load("data.micro_batch_size=2", "data.use_dynamic_bsz=true").data.use_dynamic_bsz
    assert config.model.fsdp_config.ulysses_sequence_parallel_size == 2
    assert load("model.fsdp_config.cpu_offload=true").model.fsdp_config.offload_policy
    assert load("data.multiturn.messages_key=talk").data.messages_key == "talk"


def test_runs_are_named_after_model_and_data() -> None:
    files = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "data.train_files=data/gsm8k/train.parquet"]
    assert load(*files).trainer.default_local_dir == "checkpoints/gsm8k/qwen2.5-0.5b-instruct-gsm8k-sft"
    assert load(*files, "trainer.experiment_name=mine").trainer.default_local_dir == "checkpoints/gsm8k/mine"


def test_problems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}")
    good = [f"data.train_files={tmp_path}/rows.jsonl", f"model.path={tmp_path}/model"]
    load_config(SFTConfig, good)
    for override, message in {
        "data.train_files=[]": "data.train_files: must name the training data; give a .parquet, .jsonl or .json file",
        "data.val_files=nowhere.parquet": "data.val_files=nowhere.parquet: no such file",
        "model.path=": "model.path: must be the model to train; give a local folder, org/name",
        "model.tokenizer_path=nowhere": "model.tokenizer_path=nowhere: no such folder",
        "model.external_lib=no_such_module": "model.external_lib=no_such_module: ",
        "data.train_batch_size=0": "data.train_batch_size=0: must be greater than 0",
        "data.max_token_len_per_gpu=1000": "max_token_len_per_gpu=1000: a sequence can have 1024 tokens (data.max_length)",
        "model.fsdp_config.ulysses_sequence_parallel_size=3": "=3: does not divide the number of processes (2",
        "model.fsdp_config.fsdp_size=3": "fsdp_size=3: does not divide the number of processes (2)",
        "trainer.checkpoint.async_save=true": "not supported: set false, and trainer.async_save=true",
        "trainer.logger=[consol]": "trainer.logger=consol: no such tracker; did you mean console?",
        "trainer.resume_mode=resume_path": "trainer.resume_from_path: must be the global_step_N folder",
        "model.strategy=megatrn": "model.strategy=megatrn: no such name. Did you mean 'megatron'?",
        "trainer.default_hdfs_dir=hdfs": "trainer.default_hdfs_dir=hdfs: must be a URL such as s3://bucket/run",
        "trainer.default_hdfs_dir=ftp://me:secret@host/x": "trainer.default_hdfs_dir=ftp://me:***@host/x: has a password or",
        "trainer.hdfs_wait_s=-1": "trainer.hdfs_wait_s=-1.0: must be 0 or more",
        "data.custom_cls.path=x.py": "data.custom_cls.name: must name the class",
        "algorithm.adv_estimator=grpo": "no such key",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(SFTConfig, [*good, override])
        assert message in str(caught.value), override
    split = ["model.fsdp_config.ulysses_sequence_parallel_size=2", "model.use_remove_padding=false"]
    with pytest.raises(ConfigError, match="needs packed sequences; set true"):
        load_config(SFTConfig, [*good, *split])


def test_settings_without_effect_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = ["model.fsdp_config.param_offload=true", "data.use_dynamic_bsz=true", "data.micro_batch_size_per_gpu=3"]
    changes += ["data.val_files=x.jsonl"]
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError):
        load_config(SFTConfig, changes)
    for name in (changes[0], "data.micro_batch_size_per_gpu=3", "data.val_files=[x.jsonl]"):
        assert any(m.startswith(name) and "has no effect" in m for m in caplog.messages), name


def test_errors_need_no_torch() -> None:
    script = (
        "import sys\nfrom lockstep.trainer.fsdp_sft_trainer import main\n"
        "try:\n    main(['data.nope=1'])\nexcept SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "False"] and "data.nope=1: no such key" in done.stderr
