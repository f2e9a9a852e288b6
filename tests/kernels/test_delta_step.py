"""One token of Gated DeltaNet in place on the states of slots, against `GatedDelta.step`."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.state_slots import DecodeStates, StateShape, StateSlots  # noqa: E402
from lockstep.models.gated_delta import InPlaceGatedDelta, gated_delta  # noqa: E402
from tests.kernels.delta_cases import Mixer, TorchForm  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32, torch.bfloat16]
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 24, 40, 2), (2, 2, 128, 128, 4)]
"""HK, HV, DK, DV, K."""


def slots_of(mixer: Mixer, num_slots: int, dtype: torch.dtype) -> StateSlots:
    shapes = {
        ("conv", 0): StateShape((mixer.conv_dim, mixer.conv_kernel_size), dtype),
        ("recurrent", 0): StateShape((mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim), torch.float32),
    }
    store = StateSlots({0: shapes}, num_slots, DEVICE)
    for tensor in store.tensors[0].values():
        tensor.normal_()
    return store


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_steps_equal_the_torch_form(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixer = Mixer(*shape, dtype)
    stores = [slots_of(mixer, 6, dtype) for _ in range(2)]
    for name, tensor in stores[0].tensors[0].items():
        stores[1].tensors[0][name].copy_(tensor)
    before = {name: tensor.clone() for name, tensor in stores[0].tensors[0].items()}
    slots = torch.tensor([4, 0, 3, 1, 2], device=DEVICE)
    is_active = torch.tensor([True, True, False, True, False], device=DEVICE)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for _ in range(4):
        wide = 2 * torch.randn(1, 5, mixer.conv_dim + 2 * mixer.num_v_heads + 3, device=DEVICE)
        x = wide.to(dtype)[..., :-3]  # rows with a stride
        ours, theirs = (
            DecodeStates(store, slots, is_active).mix(0, kind(mixer), x)[0, is_active]
            for store, kind in zip(stores, (InPlaceGatedDelta, TorchForm))
        )
        assert ours.dtype == dtype and ours.isfinite().all()
        torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)
    for name, tensor in stores[0].tensors[0].items():
        torch.testing.assert_close(tensor[:6], stores[1].tensors[0][name][:6], atol=tolerance, rtol=tolerance)
        assert torch.equal(tensor[[2, 3, 5]], before[name][[2, 3, 5]])  # no active row has them
        assert not torch.equal(tensor[4], before[name][4])


@torch.no_grad()
def test_large_gates_stay_finite() -> None:
    torch.manual_seed(0)
    mixer = Mixer(1, 2, 16, 16, 4, torch.float32)
    stores = [slots_of(mixer, 1, torch.float32) for _ in range(2)]
    for name, tensor in stores[0].tensors[0].items():
        stores[1].tensors[0][name].copy_(tensor)
    slots, is_active = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.ones(1, dtype=torch.bool, device=DEVICE)
    for gate in (-200.0, -30.0, 30.0, 200.0):
        x = torch.randn(1, 1, mixer.conv_dim + 2 * mixer.num_v_heads, device=DEVICE)
        x[..., mixer.conv_dim :] = gate
        x[..., : mixer.conv_dim] *= gate
        ours, theirs = (
            DecodeStates(store, slots, is_active).mix(0, kind(mixer), x)
            for store, kind in zip(stores, (InPlaceGatedDelta, TorchForm))
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs")
@torch.no_grad()
def test_a_captured_step_replays() -> None:
    torch.manual_seed(0)
    mixer = Mixer(2, 4, 64, 64, 4, torch.bfloat16)
    store, reference = (slots_of(mixer, 4, torch.bfloat16) for _ in range(2))
    slots = torch.tensor([3, 0, 1], device=DEVICE)
    is_active = torch.ones(3, dtype=torch.bool, device=DEVICE)
    x = torch.randn(1, 3, mixer.conv_dim + 2 * mixer.num_v_heads, device=DEVICE, dtype=torch.bfloat16)
    core = gated_delta(mixer, x)
    assert isinstance(core, InPlaceGatedDelta)
    DecodeStates(store, slots, is_active).mix(0, core, x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = DecodeStates(store, slots, is_active).mix(0, core, x)
    for name, tensor in store.tensors[0].items():
        reference.tensors[0][name].copy_(tensor)
    for _ in range(3):
        x.normal_()
        slots.copy_(slots.roll(1))
        graph.replay()
        expected = DecodeStates(reference, slots, is_active).mix(0, core, x)
        assert torch.equal(out, expected)
    for name, tensor in store.tensors[0].items():
        assert torch.equal(tensor[:4], reference.tensors[0][name][:4])
