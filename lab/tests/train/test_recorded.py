"""Gradients of a recorded step: those of the plain one, for every batch, also between others."""

import pytest
import torch

from ssmax_lab.model import LM, LMConfig
from ssmax_lab.train.config import OptimConfig, RunConfig
from ssmax_lab.train.loop import gradients_of
from ssmax_lab.train.optimizer import make_optimizer
from ssmax_lab.train.parallel import build, clip_gradients
from ssmax_lab.train.recorded import STEPS_BEFORE, RecordedGradients
from ssmax_lab.train.samples import Batch
from ssmax_lab.train.world import alone

CONFIG = LMConfig(num_layers=2, num_heads=4, hidden_size=64, intermediate_size=96, vocab_size=97,
                  train_length=32, rule="ssmax_bias")  # fmt: skip


def batch_of(step, rows=4):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 97, (rows, 33), generator=generator)
    return Batch(inputs_BT=tokens[:, :-1].contiguous(), targets_BT=tokens[:, 1:].contiguous())


def trained(world, run, steps):
    """Losses, norms and last weights of some steps."""
    torch.manual_seed(0)
    model = LM(CONFIG)
    loss = build(model, run, world)
    gradients = gradients_of(loss, run, world)
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2), world.device)
    values = []
    for batches in steps:
        mean = gradients(batches)
        values.append((mean, clip_gradients(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    lines = [[x.item() for x in pair] for pair in values]
    return gradients, lines, [p.detach().cpu() for p in model.parameters()]


def test_elsewhere_a_step_is_computed_as_ever():
    world = alone(torch.device("cpu"))
    found = gradients_of(torch.nn.Linear(1, 1), RunConfig(record=True), world)
    assert not isinstance(found, RecordedGradients)


# While it compiles, torch warns of itself: Dynamo asks every tensor for its gradient (in torch 2.11
# only what is printed of that is hidden), Dynamo and Inductor of their own code.
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    r"ignore:::torch\._dynamo\.",
    r"ignore:::torch\._inductor\.",
)
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_replay_is_the_step(compiled):
    world = alone(torch.device("cuda", 0))
    steps = [[batch_of(step)] for step in range(STEPS_BEFORE + 4)]
    # A short last batch and two in one step are not what was recorded; then it goes on.
    steps += [[batch_of(50, rows=2)], [batch_of(51), batch_of(52)], [batch_of(53)]]
    options = {"precision": "float32", "compile": compiled}
    recorded, *found = trained(world, RunConfig(record=True, **options), steps)
    _, *wanted = trained(world, RunConfig(**options), steps)
    assert recorded._graph is not None
    # A step moves a weight by up to 1e-2, whatever its gradient; one that is nearly 0 has its
    # roundings magnified by that.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
