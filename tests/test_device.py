"""Batches to the device: as they are on a CPU; on a GPU beside what it computes, and complete where they are read."""

from __future__ import annotations

import pytest
import torch

from drawbar.config import Input, Recipe, Train
from drawbar.input.device import DeviceCopy
from drawbar.launch.feed import ConstantFeed
from drawbar.train.objective import Classification

pytestmark = pytest.mark.timeout(120)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: needs a CUDA device")
CPU = torch.device("cpu")
_SLEEP_CYCLES = 2_000_000_000
"""Of a kernel that keeps the device busy: about a second."""


def test_on_a_cpu_nothing_is_copied() -> None:
    pixels, labels = torch.zeros((2, 8, 8, 3), dtype=torch.uint8), torch.tensor([1, 2])
    there = DeviceCopy(CPU).to_device(pixels, labels)
    assert there.copied is None
    assert there.pixels.data_ptr() == pixels.data_ptr()
    assert there.labels.data_ptr() == labels.data_ptr()


def test_a_step_normalises_what_arrived() -> None:
    batch = ConstantFeed(Recipe(input=Input(image_size=8), train=Train(batch_size=2)), CPU).next_batch()
    images, labels = Classification(device=CPU, dtype=torch.float32, channels_last=True).to_device(batch)
    assert images.shape == (2, 3, 8, 8)
    assert torch.equal(labels, batch.labels)
    mean, std = torch.tensor((123.68, 116.78, 103.94)), torch.tensor((58.4, 57.1, 57.4))
    wanted = ((batch.pixels.float() - mean) / std).permute(0, 3, 1, 2)
    assert torch.allclose(images, wanted, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
def test_a_copy_passes_while_the_device_computes() -> None:
    device = torch.device("cuda", 0)
    copy = DeviceCopy(device)
    pixels = torch.randint(0, 256, (64, 224, 224, 3), dtype=torch.uint8).pin_memory()
    labels = torch.arange(64).pin_memory()
    copy.to_device(pixels, labels)
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    computed = torch.cuda.current_stream().record_event()
    there = copy.to_device(pixels, labels)
    assert there.copied is not None
    there.copied.synchronize()
    assert not computed.query()  # the copy is there, and the device is still at what came before
    assert torch.equal(there.pixels.cpu(), pixels)
    assert torch.equal(there.labels.cpu(), labels)


@pytest.mark.gpu
@needs_gpu
def test_a_buffer_may_be_overwritten_once_its_copy_has_passed() -> None:
    device = torch.device("cuda", 0)
    copy = DeviceCopy(device)
    pixels = torch.empty((64, 224, 224, 3), dtype=torch.uint8).pin_memory()
    labels = torch.zeros(64, dtype=torch.int64).pin_memory()
    sums = []
    for number in range(50):
        pixels.fill_(number)
        there = copy.to_device(pixels, labels)
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        sums.append(there.pixels.double().mean())
        assert there.copied is not None
        there.copied.synchronize()
        del there  # its memory goes back to the copy stream while the mean is still to be computed
    assert [float(value) for value in sums] == list(range(50))


@pytest.mark.gpu
@needs_gpu
def test_pixels_on_the_device_are_passed_on() -> None:
    device = torch.device("cuda", 0)
    pixels = torch.zeros((2, 8, 8, 3), dtype=torch.uint8, device=device)
    there = DeviceCopy(device).to_device(pixels, torch.tensor([1, 2]))
    assert there.pixels.data_ptr() == pixels.data_ptr()


@pytest.mark.gpu
@needs_gpu
def test_a_constant_batch_is_pinned_for_a_gpu() -> None:
    recipe = Recipe(input=Input(image_size=8), train=Train(batch_size=2))
    assert ConstantFeed(recipe, torch.device("cuda", 0)).next_batch().pixels.is_pinned()
