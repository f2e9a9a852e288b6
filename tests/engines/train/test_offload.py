"""Tensors go to the host and back as they lay; a device is stood in for where there is none."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.train.offload import Arrival, HostHome, _copied, move_optimizer, move_parameters
from lockstep.kernels.joined import joined


def some_tensors(device: str = "cpu") -> list[Tensor]:
    """Two side by side, one transposed, one that is another one again, and one without entries."""
    pair = torch.randn(5, 3, device=device).bfloat16()
    crossed = torch.randn(4, 7, device=device).t()
    return [pair[:2], pair[2:], crossed, crossed, torch.zeros(0, 3, device=device)]


def check_same(copies: list[Tensor], tensors: list[Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy.cpu(), tensor.cpu()) and copy.dtype == tensor.dtype
        assert copy.stride() == tensor.stride()
    assert joined(copies[:2]) is not None
    assert copies[2].data_ptr() == copies[3].data_ptr() != tensors[2].data_ptr()


def test_copies_lie_as_the_tensors_did() -> None:
    tensors = some_tensors()
    copies = _copied(tensors, lambda storages: [storage.clone() for storage in storages])
    check_same(copies, tensors)

    def in_one(storages: list[Tensor]) -> list[Tensor]:
        memory = torch.zeros(4096, dtype=torch.uint8)
        return [memory[512 * i : 512 * i + len(s)].copy_(s) for i, s in enumerate(storages)]

    shared = _copied(tensors, in_one)
    check_same(shared, tensors)
    check_same(_copied(shared, lambda storages: [storage.clone() for storage in storages]), tensors)


def test_what_is_in_place_stays() -> None:
    tensors = some_tensors()
    home = HostHome()
    assert all(a is b for a, b in zip(home.moved(tensors, torch.device("cpu")), tensors))
    assert home.moved([], torch.device("cpu")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back_twice() -> None:
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    tensors = some_tensors("cuda")
    home, places = HostHome(), tensors
    for _ in range(2):
        places = home.moved(places, host)
        assert all(t.is_pinned() for t in places if t.numel())
        check_same(places, tensors)
        places = home.moved(places, cuda)
        check_same(places, tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_between_two_stays_on_the_host() -> None:
    """The same three steps, one of two models and its optimizer's state offloaded after each."""
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    results = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model, homes = nn.Linear(6, 6).to(cuda), (HostHome(), HostHome())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(2, 6, device=cuda)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for device in (host, cuda) if offloaded else ():
                move_parameters(model, homes[0], device)
                move_optimizer(optimizer, homes[1], device)
                assert {p.device for p in model.parameters()} == {device}
                assert {s["exp_avg"].device for s in optimizer.state.values()} == {device}
        results.append([p.detach().cpu() for p in model.parameters()])
    for plain, moved in zip(*results):
        assert torch.equal(plain, moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_arrives_beside_other_work_is_whole_when_it_was_waited_for() -> None:
    cuda, host = torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    home, arrival = HostHome(), Arrival(cuda)
    values = torch.arange(2**26, device=cuda)  # of 512 MB, which are some milliseconds on their way
    [at_home] = home.moved([values], host)
    for _ in range(3):
        with arrival.begin():
            [arrived] = home.moved([at_home], cuda)
        torch.ones(64, 64, device=cuda).square()
        arrival.wait()
        assert torch.equal(arrived, values)
