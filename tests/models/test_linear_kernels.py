"""Packages with CUDA kernels of recurrent layers are installed: on a CPU models compute by torch, as without them."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lockstep.models import gated_delta, linear_kernels
from tests.models.architectures import tiny_model

MODEL_TYPES = ("qwen3_next", "bamba", "mamba", "lfm2", "kimi_linear")
KERNELS = {
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "fla": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"),
    "mamba_ssm": (
        *("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"),
        *("selective_scan_fn", "mamba_inner_fn"),
    ),
}
PROGRAM = """
import sys, torch
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.model_check import transformers_forward
from tests.models.architectures import tiny_model
from tests.models.test_linear_kernels import MODEL_TYPES, logits

for model_type in MODEL_TYPES:
    model = tiny_model(model_type)
    module = sys.modules[type(model).__module__]
    install_decoder_layers(model)
    install_decoder_layers(model)
    with transformers_forward(model):
        torch.save(logits(model), f"{sys.argv[1]}/{model_type}.pt")
    replaced = [name for name, value in vars(module).items() if type(value).__name__ == "_Dispatched"]
    assert replaced, model_type
"""


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("trains", [True, False])
def test_a_delta_rule_without_a_backward_trains_in_torch(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo hybrid calls the functions of transformers' module, unlike the types with our layers."""
    functions = ModuleType("modeling_olmo_hybrid")
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):

        def torch_form(x: torch.Tensor) -> str:
            return "torch"

        def kernel(x: torch.Tensor) -> str:
            return "kernel"

        torch_form.__module__ = functions.__name__
        kernel.__wrapped__ = torch_form  # type: ignore[attr-defined]
        setattr(functions, name, kernel)
    linear_kernels._dispatch(functions)
    monkeypatch.setattr(gated_delta, "has_linear_attention_kernels", lambda: True)
    monkeypatch.setattr(gated_delta, "trains_with_kernels", lambda: trains)
    x = torch.zeros(1).half().as_subclass(OnCuda)
    assert functions.torch_chunk_gated_delta_rule(x) == ("kernel" if trains else "torch")
    assert functions.causal_conv1d_fn(x) == "kernel"
    with torch.no_grad():
        assert functions.torch_chunk_gated_delta_rule(x) == "kernel"
    assert functions.torch_chunk_gated_delta_rule(torch.zeros(1).half()) == "torch"


@pytest.mark.slow
def test_kernels_are_left_to_cuda(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for package, names in KERNELS.items():
        (packages / package).mkdir(parents=True)
        lines = [f"def {name}(*args, **kwargs):\n    raise RuntimeError('{name}: needs CUDA')\n" for name in names]
        (packages / package / "__init__.py").write_text("".join(lines))
    program = f"import sys; sys.path.insert(0, {str(packages)!r})\n{PROGRAM}"
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for model_type in MODEL_TYPES:
        found = torch.load(tmp_path / f"{model_type}.pt")
        torch.testing.assert_close(found, logits(tiny_model(model_type)), atol=1e-5, rtol=1e-4)
