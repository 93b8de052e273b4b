"""What can't be done is said in one line, before any training."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from pflight import Federation
from pflight.callbacks import FedAvg, FeSEM, Local
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.models import Classifier, ProximalClient
from tests.runs import (
    CLASSES,
    FEATURES,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    samples,
    small_data,
)


def fails(message: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 250


def test_it_is_lightnings_error_and_a_value_error() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(ConfigurationError, L.pytorch.utilities.exceptions.MisconfigurationException)


def test_two_server_callbacks() -> None:
    trainer = quiet_trainer(1, FedAvg(), Local())
    fails("FedAvg and Local", trainer.fit, Federation(linear_client()), datamodule=small_data())


OF_ONE_MODEL = {
    "BackboneFinetuning": {},
    "BaseFinetuning": {},
    "BatchSizeFinder": {},
    "EMAWeightAveraging": {},
    "GradientAccumulationScheduler": {"scheduling": {1: 2}},
    "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "SpikeDetection": {},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "WeightAveraging": {},
}


@pytest.mark.parametrize("name", OF_ONE_MODEL)
def test_callbacks_of_one_model_are_refused(name: str) -> None:
    callback = getattr(L.pytorch.callbacks, name)(**OF_ONE_MODEL[name])
    trainer, federation = quiet_trainer(1, callback), Federation(linear_client())
    fails(f"the Trainer's {name} works on the one model", trainer.fit, federation,
          datamodule=small_data())  # fmt: skip
    assert not federation.history


def test_machines_that_nobody_has_started_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    trainer = quiet_trainer(1, strategy="ddp", devices=1, num_nodes=3)
    fails("num_nodes=3 waits for processes on as many machines", trainer.fit,
          Federation(linear_client()), datamodule=small_data())  # fmt: skip


@pytest.mark.parametrize("client", [-1, 6, 100])
def test_an_unknown_client(client: int) -> None:
    federation = run(linear_client(), small_data())
    fails(rf"unknown client {client}: .*0 to 5", federation.client_state, client)
    fails(rf"unknown client {client}", federation.client_module, client)
    fails(rf"unknown client {client}", small_data().samples, client, "train")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Linear(FEATURES + 1, CLASSES), r"samples of shape \(4,\) \(float32\)"),
        (nn.Conv2d(1, 3, 3), r"samples of shape \(4,\)"),
        (nn.Linear(FEATURES, CLASSES + 2), r"\[2, 5\] for 2 samples of 3 classes"),
        (nn.Linear(FEATURES, CLASSES - 1), r"\[2, 2\] for 2 samples of 3 classes"),
        (nn.Sequential(nn.Linear(FEATURES, 3), nn.Unflatten(1, (3, 1))), r"\[2, 3, 1\]"),
        (
            nn.RNN(FEATURES, CLASSES),
            "tuple; it",
        ),
    ],
)
@pytest.mark.parametrize("callback", [FedAvg, lambda: FeSEM(2)])
def test_a_network_that_does_not_fit_the_data(network: nn.Module, message: str, callback: Any):
    fails(message, run, network_client(network), small_data(), callback())


@pytest.mark.parametrize("kind", [Classifier, ProximalClient])
@pytest.mark.parametrize("outputs", [CLASSES - 2, CLASSES - 1, CLASSES + 2])
def test_a_network_that_does_not_fit_data_for_training_alone(
    kind: type[Classifier], outputs: int
) -> None:
    data = TensorClients([samples(8, seed) for seed in range(3)], num_classes=CLASSES)
    client = kind(nn.Linear(FEATURES, outputs), num_classes=CLASSES)
    fails(rf"outputs of shape \[2, {outputs}\] for 2 samples of 3 classes", run, client, data)


class Autoencoder(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[0])


def test_a_loss_of_ones_own_may_take_other_outputs() -> None:
    data = TensorClients([samples(8, seed) for seed in range(3)], num_classes=CLASSES)
    run(Autoencoder(nn.Linear(FEATURES, FEATURES), num_classes=CLASSES), data)


def test_a_network_of_another_precision_than_the_data() -> None:
    fails("float64", run, linear_client(), small_data(dtype=torch.float64))


@pytest.mark.parametrize("participation", [0, 0.0, -0.1, 1.01, 2])
def test_participation_out_of_range(participation: float) -> None:
    fails(r"participation must be in \[1e-09, 1\]", small_data, participation=participation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort_size": 7}, "cohort_size is 7, but only 6 clients"),
        ({"cohort_size": 0}, "cohort_size must be at least 1"),
        ({"cohort_size": 2, "participation": 0.5}, "cohort_size or participation, not both"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_classes": 2}, "num_classes is 2"),
        ({"holdout_clients": 1.0}, "holdout_clients"),
    ],
)
def test_data_options(options: dict[str, Any], message: str) -> None:
    fails(message, small_data, **options)


def test_more_clusters_than_clients() -> None:
    fails(r"num_clusters \(7\) exceeds .*\(6\)", run, linear_client(), small_data(), FeSEM(7))


def test_more_clusters_than_clients_that_train() -> None:
    data = small_data(counts=[4, 0, 0, 0, 5, 6])
    fails("num_clusters", run, linear_client(), data, FeSEM(4))


def test_data_that_is_not_federated() -> None:
    trainer, federation = quiet_trainer(), Federation(linear_client())
    fails("got ClientData", trainer.fit, federation, datamodule=small_data().client(0))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_no_data() -> None:
    loader = torch.utils.data.DataLoader([torch.zeros(3)])
    with pytest.raises(ConfigurationError, match="federated data"):
        quiet_trainer(limit_val_batches=0).fit(Federation(linear_client()), loader)
    with pytest.raises(ConfigurationError, match="federated data"):
        quiet_trainer().fit(Federation(linear_client()))


def test_another_number_of_classes_than_the_data() -> None:
    client = Classifier(nn.Linear(FEATURES, 4), num_classes=4)
    fails("num_classes=4, but the data have num_classes=3", run, client, small_data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_epochs": 0}, "local_epochs must be at least 1"),
        ({"local_steps": 0}, "local_steps must be at least 1"),
        ({"finetune_epochs": -1}, "finetune_epochs"),
        ({"newcomer_epochs": -1}, "newcomer_epochs"),
        ({"engine": "warp"}, "'warp'"),
        ({"on_client_error": "ignore"}, "'ignore'"),
        ({"seed": -1}, "seed"),
    ],
)
def test_federation_options(options: dict[str, Any], message: str) -> None:
    fails(message, Federation, linear_client(), **options)


def test_a_client_that_is_no_client_module() -> None:
    fails("must be a LightningModule, got Linear", Federation, nn.Linear(2, 2))


def test_a_federation_keeps_its_algorithm_and_its_clients() -> None:
    federation = run(linear_client(), small_data(), Local())
    other = quiet_trainer(1, FedAvg())
    fails(
        r"trained with Local, but this Trainer has FedAvg",
        other.fit,
        federation,
        datamodule=small_data(),
    )
    fewer = small_data(counts=[4] * 5)
    fails("set up for 6 clients", quiet_trainer(1, Local()).fit, federation, datamodule=fewer)


def test_several_optimizers_without_manual_optimization() -> None:
    class Two(Classifier):
        def configure_optimizers(self):
            return [torch.optim.SGD([p], 0.1) for p in self.network.parameters()]

    fails("automatic_optimization", run, linear_client(Two), small_data())


def test_a_plateau_that_watches_nothing() -> None:
    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "nothing"},
            }

    with pytest.raises(MisconfigurationException, match="conditioned on metric nothing"):
        run(linear_client(Plateau), small_data())


@pytest.mark.parametrize("algorithm", ["l1", ""])
def test_a_clipping_algorithm_that_does_not_exist(algorithm: str) -> None:
    fails(
        "gradient_clip_algorithm",
        lambda: run(
            linear_client(gradient_clip_val=1.0, gradient_clip_algorithm=algorithm), small_data()
        ),
    )


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_clip_value_that_is_not_positive(value: float) -> None:
    fails("gradient_clip_val", linear_client, gradient_clip_val=value)


def test_a_metric_that_needs_two_classes() -> None:
    fails("binary", run, linear_client(), small_data(), f1_average="binary")


def test_a_buffer_policy_that_does_not_exist() -> None:
    fails("FedAvg: buffers", FedAvg, buffers="mine")


def test_an_optimizer_that_can_not_be_built() -> None:
    client = linear_client(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0))
    with pytest.raises(ConfigurationError, match="optimizer can't be built: Invalid learning rate"):
        run(client, small_data())


def test_a_fraction_of_the_batches_names_its_own_option() -> None:
    with pytest.raises(ConfigurationError, match=r"overfit_batches=0\.3 is a fraction"):
        run(linear_client(), small_data(), trainer={"overfit_batches": 0.3})
