"""Language models: every token of a batch weighs the same, and padding nothing."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pflight import Federation
from pflight.callbacks import FedAvg
from pflight.datamodules import DatasetClients, TensorClients
from pflight.errors import ClientError
from pflight.models import LanguageModel
from tests.runs import ENGINES, quiet_trainer, run, sgd

TOKENS, LENGTH = 12, 10


class Bigrams(nn.Module):
    """Logits that depend on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.embed(x))


def module() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Bigrams(), sgd(0.5))


def clients() -> list[list[Tensor]]:
    """Return the sentences of three clients, of unequal length and number."""
    random = torch.Generator().manual_seed(1)
    lengths = [torch.randint(3, LENGTH + 2, (n,), generator=random).tolist() for n in (5, 8, 9)]
    return [[torch.randint(1, TOKENS, (n,), generator=random) for n in own] for own in lengths]


def padded(sentences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad to the longest of a batch."""
    inputs = pad_sequence([one[:-1] for one in sentences], batch_first=True)
    return inputs, pad_sequence([one[1:] for one in sentences], True, padding_value=-100)


def to_length(sentences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad to one length for all."""
    x, y = padded(sentences)
    free = 0, LENGTH - x.shape[1]
    return F.pad(x, free), F.pad(y, free, value=-100)


def in_memory() -> TensorClients:
    samples = [to_length(own) for own in clients()]
    return TensorClients(samples, val=samples, num_classes=None, batch_size=4)


def fitted(data: L.LightningDataModule, engine: str, rounds: int = 2) -> Federation:
    return run(module(), data, FedAvg(), rounds, local_epochs=2, engine=engine)


def assert_close(one: Federation, other: Federation) -> None:
    """Assert that the models of two servers are the same up to rounding."""
    for entry, value in one.server.state_dict().items():
        assert torch.allclose(value, other.server.state_dict()[entry], atol=1e-6)


def test_the_loss_is_a_mean_over_tokens():
    x, y = padded(clients()[0])
    logits = module()(x)
    of_tokens = F.cross_entropy(logits[y != -100], y[y != -100], reduction="none")
    assert torch.allclose(module().loss((x, y)), of_tokens.mean())
    losses = module().sample_losses((x, y))
    sizes = (y != -100).sum(1).tolist()
    expected = torch.stack([part.mean() for part in of_tokens.split(sizes)])
    assert torch.allclose(losses, expected)
    assert not torch.allclose(losses.mean(), of_tokens.mean())  # sentences differ in length


def test_a_sequence_of_padding_alone_has_no_loss():
    x, y = torch.zeros(2, 3).long(), torch.tensor([[1, 2, 3], [-100, -100, -100]])
    assert module().sample_losses((x, y))[1] == 0
    assert torch.equal(module().loss((x, y)), module().loss((x[:1], y[:1])))


def test_training_is_that_of_a_plain_loop():
    data, federation = in_memory(), fitted(in_memory(), "sequential", rounds=1)
    model = dict(federation.server[0].named_parameters())
    sums = {name: 0 for name, _ in module().named_parameters()}
    for client in range(3):
        own, (x, y) = module(), data.samples(client, "train")
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for epoch in range(2):
            for part in data.order(client, 0, epoch).split(4):
                optimizer.zero_grad()
                logits, targets = own(x[part]), y[part]
                F.cross_entropy(logits[targets != -100], targets[targets != -100]).backward()
                optimizer.step()
        for name, parameter in own.named_parameters():
            sums[name] = sums[name] + parameter.detach() * len(x) / 22
    for name, parameter in model.items():
        assert torch.allclose(parameter, sums[name], atol=1e-6)


def test_stacked_batches_of_unequal_size_and_length_give_the_same_numbers():
    one, stacked = fitted(in_memory(), "sequential"), fitted(in_memory(), "vectorized")
    assert stacked.clients.attached_engine.fills_batches
    assert_close(one, stacked)
    for name, values in one.client_metrics("val").items():
        assert torch.allclose(values, stacked.client_metrics("val")[name], atol=1e-5)


def test_padding_to_a_batch_or_to_one_length_is_the_same():
    sentences = clients()
    data = DatasetClients(sentences, val=sentences, batch_size=4, collate_fn=padded)
    lazily, whole = fitted(data, "sequential"), fitted(in_memory(), "sequential")
    assert_close(lazily, whole)
    for name in ("perplexity", "acc"):
        values = [one.client_metrics("val")[name] for one in (lazily, whole)]
        assert torch.allclose(*values, atol=1e-5)


@ENGINES
def test_clients_are_judged_by_their_tokens(engine):
    federation = fitted(in_memory(), engine)
    own = module()
    own.load_state_dict(federation.server[0].state_dict())
    values, worst = federation.client_metrics("val"), []
    for client, sentences in enumerate(clients()):
        x, y = to_length(sentences)
        logits, targets = own(x)[y != -100], y[y != -100]
        perplexity = F.cross_entropy(logits, targets).exp().item()
        assert values["perplexity"][client].item() == pytest.approx(perplexity, rel=1e-5)
        accuracy = (logits.argmax(1) == targets).float().mean().item()
        assert values["acc"][client].item() == pytest.approx(accuracy)
        worst.append(perplexity)
    logged = federation.trainer.callback_metrics
    assert logged["val/worst_decile_perplexity"].item() == pytest.approx(max(worst), rel=1e-5)
    everything = to_length([one for own in clients() for one in own])
    pooled = own.measure(own(everything[0]), everything[1])["perplexity"]
    assert logged["val/pooled_perplexity"].item() == pytest.approx(pooled.item(), rel=1e-5)


def test_it_also_trains_by_itself():
    x, y = to_length([one for own in clients() for one in own])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    own, alone = module(), quiet_trainer(2)
    alone.fit(own, loader, loader)
    expected = own.measure(own(x), y)
    for name in ("perplexity", "acc"):
        logged = alone.callback_metrics[f"val/{name}"].item()
        assert logged == pytest.approx(expected[name].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.zeros(4), "its targets must be tokens"),
        (torch.full((4, 3), 12), "the token 12, but its model has logits for 12 tokens"),
        (torch.full((4, 3), -1), "the token -1, but its model has logits for 12 tokens"),
        (torch.zeros(4, 2).long(), "outputs of shape"),
    ],
)
def test_odd_targets_are_named(y, message):
    x = torch.zeros(4, 3).long()
    with pytest.raises(ValueError, match=message):
        module().check_outputs(module()(x), y)


def test_a_client_with_a_token_that_is_no_class_is_named():
    samples = [to_length(own) for own in clients()]
    odd = samples[1][0], samples[1][1].clamp(min=TOKENS)
    data = TensorClients([samples[0], odd], val=None, num_classes=None, batch_size=4)
    with pytest.raises(ClientError, match="client 1"):
        run(module(), data, FedAvg(), on_client_error="raise", engine="sequential")
