from __future__ import annotations

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import functional

from pflight.callbacks import FedAvg
from pflight.datamodules import FederatedDataModule
from pflight.datamodules.crop_and_flip import CropAndFlip
from pflight.errors import ConfigurationError
from tests.runs import run

BLACK = torch.tensor([-2.0, -1.5, 7.0]).view(3, 1, 1)
LARGEST_DRAW = 1 - 2**-24  # of torch.rand


def one_by_one(change, x, noise, fill):
    """Pad, crop and flip each image by itself with torchvision."""
    changed = []
    for image, (row, column, flip) in zip(x, noise.double().tolist(), strict=True):
        p, (_, height, width) = change.padding, image.shape
        channels = [
            functional.pad(c[None], [p], fill=float(f)) for c, f in zip(image, fill, strict=True)
        ]
        top, left = int(row * (2 * p + 1)), int(column * (2 * p + 1))
        image = functional.crop(torch.cat(channels), top, left, height, width)
        changed.append(functional.hflip(image) if change.flip and flip < 0.5 else image)
    return torch.stack(changed)


@given(
    change=st.builds(CropAndFlip, padding=st.integers(0, 5), flip=st.booleans()),
    size=st.tuples(st.integers(1, 6), st.just(3), st.integers(1, 7), st.integers(1, 7)),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_a_batch_is_cropped_and_flipped_as_image_by_image(change, size, seed, dtype):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=random).to(dtype)
    noise = torch.rand(size[0], change.num_draws, generator=random)
    noise[torch.rand(noise.shape, generator=random) < 0.2] = LARGEST_DRAW
    before = x.clone()
    changed = change(x, noise, BLACK)
    assert changed.dtype == dtype
    assert torch.equal(changed, one_by_one(change, x, noise, BLACK.to(dtype)))
    assert torch.equal(x, before)


def test_all_windows_and_both_directions_are_equally_likely():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    steps = (torch.arange(6) + 0.5) / 6
    noise = torch.cartesian_prod(steps, steps, steps[[0, 5]])
    changed = CropAndFlip(padding=1)(image.expand(72, -1, -1, -1), noise, torch.tensor(-1.0))
    images, counts = changed.flatten(1).unique(dim=0, return_counts=True)
    assert len(images) == 2 * 3**2
    assert counts.tolist() == [4] * 18


def test_without_padding_and_flip_nothing_changes():
    x, noise = torch.randn(4, 3, 5, 6), torch.rand(4, 3)
    assert torch.equal(CropAndFlip(padding=0, flip=False)(x, noise, BLACK), x)


def test_no_images_give_no_images():
    assert CropAndFlip()(torch.randn(0, 3, 8, 8), torch.rand(0, 3), BLACK).shape == (0, 3, 8, 8)


def test_one_number_fills_all_channels():
    x, noise = torch.randn(2, 3, 4, 4), torch.zeros(2, 3)
    changed = CropAndFlip(padding=4, flip=False)(x, noise, torch.tensor(0.5))
    assert torch.equal(changed, torch.full_like(x, 0.5))


def test_a_negative_padding_is_refused():
    with pytest.raises(ConfigurationError, match="padding must be at least 0, got -1"):
        CropAndFlip(padding=-1)


class NamedSamples(FederatedDataModule):
    num_clients = 2

    def samples(self, client, split):
        return {"image": torch.rand(4, 1, 6, 6), "class": torch.arange(4) % 2}


class OfNamedSamples(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(36, 2)

    def loss(self, batch):
        logits = self.net(batch["image"].flatten(1))
        return torch.nn.functional.cross_entropy(logits, batch["class"])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_samples_that_are_no_pairs_are_not_augmented_but_refused(engine):
    run(OfNamedSamples(), NamedSamples(num_classes=None), FedAvg(), engine=engine)
    data = NamedSamples(num_classes=None, augmentation=CropAndFlip(1))
    message = r"^NamedSamples: .* pairs .*returns samples\['image'\], samples\['class'\]$"
    with pytest.raises(ConfigurationError, match=message):
        run(OfNamedSamples(), data, FedAvg(), engine=engine)
