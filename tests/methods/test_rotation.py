import torch

from odcluster.methods.interface import Batch
from odcluster.methods.rotation import Rotation, all_turns, one_turn_each, turn
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_small


def test_the_label_is_the_rotation_that_was_applied():
    images = torch.randn(9, 3, 8, 8)
    for turned, quarters in (one_turn_each(images, torch.arange(len(images))), all_turns(images)):
        sources = images.repeat(len(turned) // len(images), 1, 1, 1)
        for before, after, quarter in zip(sources, turned, quarters.tolist(), strict=True):
            assert torch.equal(torch.rot90(after, -quarter, dims=(1, 2)), before)


def test_all_four_rotations_of_every_image_are_in_the_batch():
    turned, quarters = all_turns(torch.randn(5, 3, 4, 4))
    assert len(turned) == 20
    assert torch.bincount(quarters).tolist() == [5, 5, 5, 5]
    assert torch.bincount(one_turn_each(torch.randn(12, 3, 4, 4), torch.arange(12))[1]).tolist() == [3, 3, 3, 3]


def test_the_input_is_left_alone():
    images = torch.randn(4, 3, 4, 4)
    copy = images.clone()
    turn(images, torch.tensor([0, 1, 2, 3]))
    assert torch.equal(images, copy)


def test_rotations_can_be_learned():
    """Images that are bright at the top: a few steps are enough to tell which way is up."""
    from odcluster.config import changed

    torch.manual_seed(0)
    method = Rotation(create_backbone("smallconv", image_size=8), 64, changed(odc_small(), epochs=1))
    images = torch.randn(1, 64, 3, 8, 8) * 0.3 + torch.linspace(2, -2, 8)[:, None]
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=0.9)
    for step in range(15):
        outcome = method(Batch(torch.arange(64), images, epoch=0, step=step))
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
    assert float(method.after_step(Batch(torch.arange(64), images, 0, 0), outcome)["accuracy"]) > 0.9
