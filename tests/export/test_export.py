"""`lockstep export`: the exported folder is the checkpoint's model, or it is not written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lockstep import cli
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.export import main_export, sources
from lockstep.export.main_export import parse_size
from lockstep.models.export import save_policy
from lockstep.models.loading import load_reward_model, open_value_model
from lockstep.models.lora import install_adapters
from lockstep.models.token_models import ScalarModel
from lockstep.utils.model_path import local_model_folder
from tests.export.save_cases import save_parts, write_run
from tests.models.architectures import save_tiny_model as save_architecture
from tests.tiny import random_batch, save_tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, from which runs start, and `trained`, which they end with."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "base")
    save_tiny_model(folder / "trained", seed=1)
    return folder


@pytest.fixture(scope="module")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at step 3, without hf_model."""
    return write_run(tmp_path_factory.mktemp("runs") / "first", str(models / "base"), models / "trained").parent


def export(*words: object) -> int:
    return cli.main(["export", *map(str, words)])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == dtype and torch.equal(got[name], tensor.to(dtype)), name


@pytest.mark.parametrize("dtype", ("keep", "bfloat16"))
def test_shards_of_a_policy(
    dtype: str, models: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(run, "-o", out, "--dtype", dtype, "--max-shard-size", "40KB") == 0
    printed = capsys.readouterr().out
    (difference,) = re.findall(r"largest difference of 25\d log-probs .*, in float32: (\S+)", printed)
    assert float(difference) < (1e-5 if dtype == "keep" else 0.5)
    expected = torch.float32 if dtype == "keep" else torch.bfloat16
    assert_same(weights_of(out), weights_of(models / "trained"), expected)
    files = list(out.glob("model-*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size < 45_000 for file in files)
    assert all(file.stat().st_mode & 0o777 == (out / "config.json").stat().st_mode & 0o777 for file in files)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == expected
    assert (out / "generation_config.json").is_file() and AutoTokenizer.from_pretrained(out).chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_of_a_critic(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run / "global_step_3" / "critic", "-o", tmp_path / "out") == 0
    assert re.search(r"largest difference of 4 scores .*: \d\.?\d*e-\d\d", capsys.readouterr().out)
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert critic.score.weight.shape == (1, 32)


def test_folder_of_a_checkpoint_and_default_name(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "second" / "global_step_7"
    shutil.copytree(models / "trained", step / "huggingface")
    monkeypatch.chdir(tmp_path)
    assert export("second/global_step_7", "--dtype", "float16") == 0
    out = tmp_path / "second-step7-float16"
    assert f"wrote {out}" in capsys.readouterr().out
    assert_same(weights_of(out), weights_of(models / "trained"), torch.float16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert export(out, "-o", out, "--overwrite") == 2
    assert export(out, "-o", "copy", "--check", "tensors") == 0
    assert_same(weights_of(tmp_path / "copy"), weights_of(out), torch.float16)


def test_experts_and_tied_weights(tmp_path: Path) -> None:
    save_architecture("qwen3_moe", tmp_path / "base", tie_word_embeddings=True, vocab_size=259)
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    write_run(tmp_path / "run", str(tmp_path / "base"), tmp_path / "base", save_policy_only)
    assert export(tmp_path / "run", "-o", tmp_path / "out") == 0
    assert_same(weights_of(tmp_path / "out"), weights_of(tmp_path / "base"), torch.float32)


def save_policy_only(folder: Path, model: Path) -> None:
    save_parts(folder, model)
    shutil.rmtree(folder / "critic")


def test_config_of_the_checkpoint_is_data(models: Path, run: Path, tmp_path: Path) -> None:
    """`trust_remote_code` in it is not read, and the base model may be elsewhere now."""
    moved = tmp_path / "base"
    shutil.copytree(models / "base", moved)
    config = json.loads((moved / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "own.Own"},
        "model_type": "own",
    }
    (moved / "config.json").write_text(json.dumps(config))
    (moved / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    write_run(tmp_path / "run", str(moved), models / "trained")
    assert export(tmp_path / "run", "-o", tmp_path / "out") == 2
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    assert export(tmp_path / "run", "-o", tmp_path / "out", "--model", models / "base") == 0


def test_variables_in_the_config_of_a_checkpoint_are_not_read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They could carry a secret of this machine to an address that the file's author chose."""
    monkeypatch.setenv("SECRET", "s3cret")
    write_run(tmp_path / "run", "https://elsewhere/${oc.env:SECRET}", models / "trained")
    assert export(tmp_path / "run", "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "trained from https://elsewhere/${oc.env:SECRET}" in error and "--model" in error and "s3cret" not in error
    assert export(tmp_path / "run", "-o", tmp_path / "out", "--model", models / "base") == 0


def test_wrong_export_is_kept_aside(
    models: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*args: Any) -> None:
        save_policy(*args)
        weights = load_file(args[3] / "model.safetensors")
        weights["model.norm.weight"] += 0.01
        save_file(weights, args[3] / "model.safetensors", metadata={"format": "pt"})

    with monkeypatch.context() as patch:
        patch.setattr(sources, "save_policy", write)
        assert export(run, "-o", tmp_path / "out") == 1
    kept = tmp_path / "out.rejected"
    assert re.search(
        rf"error: {tmp_path}/out was not written: model.norm.weight differs .* by up to 0.01. .* is in {kept}\n",
        capsys.readouterr().err,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.rejected"] and (kept / "config.json").is_file()

    own = sources.own_outputs
    monkeypatch.setattr(sources, "own_outputs", lambda *args: [found - 0.1 for found in own(*args)])
    assert export(run, "-o", tmp_path / "out") == 1
    assert "transformers computes other log-probs from it than the checkpoint: 0.1 per token" in capsys.readouterr().err


def test_bad_input_is_one_message(models: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    step = run / "global_step_3"
    broken = tmp_path / "broken" / "global_step_1"
    (broken / "actor").mkdir(parents=True)
    large = {"w": torch.tensor([1e30])}
    shutil.copytree(models / "base", tmp_path / "large")
    save_file(large, tmp_path / "large" / "model.safetensors")
    for words, message in {
        (tmp_path / "nowhere",): "no such folder",
        (tmp_path / "empty",): "neither a run nor a checkpoint",
        (run / "global_step_4",): f"no such checkpoint; {run} has global_step_3",
        (step / "actor", "--role", "critic"): "--role critic: the checkpoint has no critic, only .*/actor$",
        (run, "--adapter"): "--adapter: .* is not a LoRA adapter",
        (run, "-o", models / "base"): "base exists; add --overwrite",
        (run, "-o", tmp_path, "--overwrite"): "exists and is not a model's folder",
        (run, "-o", tmp_path / "file"): "exists and is not a model's folder",
        (broken.parent,): "without a complete checkpoint",
        (broken,): "is damaged: .* has neither huggingface nor",
        (run, "--model", tmp_path / "nowhere"): "nowhere: no such folder",
        (tmp_path / "large", "--dtype", "float16", "--check", "tensors"): "w has values that float16 cannot hold",
    }.items():
        output = () if "-o" in words else ("-o", tmp_path / "out")
        assert export(*words, *output) == 2, words
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and re.search(message, printed), printed
        assert not (tmp_path / "out").exists()
    for words in ((run, "--dtype", "int8"), (run, "--max-shard-size", "5XB"), ()):
        with pytest.raises(SystemExit) as stopped:
            export(*words)
        assert stopped.value.code == 2


def test_models_beyond_the_host_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_export, "_host_memory", lambda: 100_000)
    assert export(run, "-o", tmp_path / "out") == 2
    assert "but the host has 0 GB of memory; use --check tensors" in capsys.readouterr().err
    assert export(run, "-o", tmp_path / "out", "--check", "tensors") == 0


def test_damaged_shards(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Path(shutil.copytree(run, tmp_path / "run")) / "global_step_3"
    (step / "actor" / "shards" / "__0_0.distcp").write_bytes(b"short")
    assert export(step, "-o", tmp_path / "out") == 2
    assert re.search(r"damaged: .*__0_0.distcp has 5 bytes, but its manifest says", capsys.readouterr().err)
    (step / "manifest.json").unlink()
    assert export(step, "-o", tmp_path / "out") == 2
    assert "__0_0.distcp is not a shard of the checkpoint" in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "500 mb", "2GiB", "1.5KB", "10")] == [
        5 * 10**9,
        5 * 10**8,
        2**31,
        1500,
        10,
    ]


def test_shards_of_another_model_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "other", intermediate_size=48)
    write_run(tmp_path / "run", str(tmp_path / "other"), models / "trained")
    assert export(tmp_path / "run", "-o", tmp_path / "out") == 2
    assert re.search(
        r"does not fit the model .*: different shapes of model\..*; give the run's base", capsys.readouterr().err
    )


def test_shards_of_adapters_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "global_step_3" / "actor"
    shutil.copytree(run / "global_step_3" / "actor", part)
    (part / "lora.json").write_text("{}")
    assert export(part, "-o", tmp_path / "out") == 2
    assert "LoRA adapters without lora_adapter" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"model\.path=.*LoRA adapters without lora_adapter"):
        local_model_folder(part, "model.path")


def test_overwrite(models: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "base", tmp_path / "out")
    (tmp_path / "out" / "stale.json").touch()
    (tmp_path / ".out.partial").mkdir()  # of an export that was killed
    assert export(run, "-o", tmp_path / "out", "--overwrite", "--check", "tensors") == 0
    assert_same(weights_of(tmp_path / "out"), weights_of(models / "trained"), torch.float32)
    assert not (tmp_path / "out" / "stale.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def adapter(models: Path, tmp_path: Path) -> Path:
    """A checkpoint of LoRA, and the log-probs of its policy."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    folder = tmp_path / "run" / "global_step_3" / "actor" / "lora_adapter"
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


def test_adapter_is_merged_or_copied(
    adapter: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = adapter.parents[1]
    assert export(step, "-o", tmp_path / "merged") == 0
    (difference,) = re.findall(r"largest difference .*: (\S+)", capsys.readouterr().out)
    assert float(difference) < 1e-5
    weights = load_file(adapter / "adapter_model.safetensors")
    merged, base = weights_of(tmp_path / "merged"), weights_of(models / "base")
    name = "model.layers.1.mlp.down_proj"
    delta = weights[f"base_model.model.{name}.lora_B.weight"] @ weights[f"base_model.model.{name}.lora_A.weight"]
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + 16 / 4 * delta)
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    assert merged.keys() == base.keys() and AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert export(step, "-o", tmp_path / "copy", "--adapter") == 0
    assert_same(weights_of(tmp_path / "copy"), weights, torch.float32)
    assert (tmp_path / "copy" / "adapter_config.json").is_file()
    assert export(step, "-o", tmp_path / "third", "--adapter", "--dtype", "bfloat16") == 2
    save_file(
        weights | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}, adapter / "adapter_model.safetensors"
    )
    assert export(step, "-o", tmp_path / "third") == 2
    assert "does not fit its base model" in capsys.readouterr().err


def test_a_merged_adapter_has_the_dtype_of_its_base(adapter: Path, models: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.bfloat16)
    save_policy(base, base.named_parameters(), tiny_tokenizer(), tmp_path / "half")
    for dtype, expected in (("keep", torch.bfloat16), ("float32", torch.float32)):
        out = tmp_path / dtype
        assert export(adapter.parents[1], "-o", out, "--model", tmp_path / "half", "--dtype", dtype) == 0
        assert {tensor.dtype for tensor in weights_of(out).values()} == {expected}
        assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == expected


def test_adapter_of_a_critic(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(2)
    config = HFModelConfig(path=str(models / "base"), lora_rank=4)
    body, score, weights = open_value_model(config, "critic.model", torch.float32, CPU, seed=3)
    model = ScalarModel(body, score)
    install_adapters(model, config, "critic.model", dtype=torch.float32, device=CPU, seed=1)
    options: dict[str, Any] = {"device": CPU, "compute_dtype": torch.float32, "packed": True}
    optim = FSDPOptimizerConfig(lr=1e-2, total_training_steps=1)
    engine = FsdpEngine(model, FSDPEngineConfig(), optim, weights=weights, **options)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.normal_(0, 0.1)
    critic = tmp_path / "run" / "global_step_3" / "critic"
    engine.export(critic, tiny_tokenizer())
    assert export(critic, "-o", tmp_path / "merged") == 0
    (difference,) = re.findall(r"largest difference of 4 scores .*: (\S+)", capsys.readouterr().out)
    assert float(difference) < 1e-5
    merged = ScalarModel(*load_reward_model(HFModelConfig(path=str(tmp_path / "merged")), "m", torch.float32, CPU))
    of_merged = FsdpEngine(merged, FSDPEngineConfig(), None, **options)
    values = [e.forward(random_batch(), MicroBatching())["values"] for e in (engine, of_merged)]
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-4)


def test_adapter_of_a_reward_model(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    base = AutoModelForSequenceClassification.from_pretrained(models / "base", num_labels=1, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["score"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    step = tmp_path / "rm" / "global_step_3"
    model.save_pretrained(step / "lora_adapter")
    capsys.readouterr()
    assert export(step, "-o", tmp_path / "merged", "--dtype", "bfloat16") == 0
    out, err = capsys.readouterr()
    assert "4 scores" in out and "MISSING" not in err
    assert export(step, "-o", tmp_path / "whole") == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    ids = torch.tensor([[5, 7, 9, 11]])
    torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-4)


def test_checks_before_torch_is_imported(tmp_path: Path) -> None:
    script = "import sys; from lockstep import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", script, "export", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.stdout == "2 False\n" and "neither a run nor" in done.stderr
