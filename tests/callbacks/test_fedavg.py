import copy

import lightning as L
import pytest
import torch
from torch import nn

from pflight.callbacks import FedAvg
from pflight.datamodules import CropAndFlip, TensorClients
from pflight.errors import ConfigurationError
from pflight.models import MLP, Classifier
from tests import reference
from tests.runs import (
    CLASSES,
    FEATURES,
    assert_same,
    batches_of,
    batchnorm_client,
    flat,
    linear_client,
    network_client,
    quadratic_client,
    quiet_trainer,
    run,
    samples,
    sgd,
    small_data,
    world_q,
)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [("samples", [0.445, 0.2883333333]), ("uniform", [0.2966666667, 0.1966666667])],
)
def test_q2(weighting: str, expected: list[float]) -> None:
    federation = run(quadratic_client(), world_q(), FedAvg(weighting), local_steps=2)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("client", "expected"), [(0, [0.19, -0.36]), (1, [1.08, 0.19]), (2, [-0.38, 0.76])]
)
def test_q2_locals(client: int, expected: list[float]) -> None:
    federation = run(quadratic_client(), world_q([client]), FedAvg(), local_epochs=2)
    assert flat(federation.server_states()[0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.short("client-samples", "trainer-uniform")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("double_by", ["client", "trainer"])
def test_several_rounds_with_partial_participation(weighting: str, double_by: str) -> None:
    data = small_data(
        cohort_size=3, dtype=torch.float64 if double_by == "client" else torch.float32
    )
    client = linear_client(double=double_by == "client")
    trainer = {"precision": "64-true"} if double_by == "trainer" else {}
    federation = run(client, data, FedAvg(weighting), 4, trainer=trainer, local_epochs=2)
    world = reference.SoftmaxRegression(
        [data.samples(i, "train") for i in range(data.num_clients)], CLASSES
    )
    cohorts = [entry.clients for entry in federation.history]
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    expected = reference.fedavg(
        world,
        flat(client.state_dict()),
        cohorts,
        lambda t, i: batches_of(data, t, i, 2),
        lr=0.1,
        weighting=weighting,
    )
    state = federation.server_states()[0]
    assert {value.dtype for value in state.values()} == {torch.float64}
    assert flat(state) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert_same(federation.client_state(0), state)


def test_local_steps_may_end_inside_an_epoch() -> None:
    data = small_data(dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedAvg(), rounds=2, local_steps=5)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    expected = reference.fedavg(
        world,
        flat(client.state_dict()),
        [range(6)] * 2,
        lambda t, i: batches_of(data, t, i, 5)[:5],
        lr=0.1,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_cohorts_drawn_by_sample_count_use_the_same_weights() -> None:
    data = small_data(cohort_size=2, cohort_sampling="samples", dtype=torch.float64)
    client = linear_client(double=True)
    federation = run(client, data, FedAvg(), rounds=3)
    world = reference.SoftmaxRegression([data.samples(i, "train") for i in range(6)], CLASSES)
    expected = reference.fedavg(
        world,
        flat(client.state_dict()),
        [entry.clients for entry in federation.history],
        lambda t, i: batches_of(data, t, i, 1),
        lr=0.1,
    )
    assert flat(federation.server_states()[0]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("lr", [0.5, 1.0])
def test_the_server_steps_along_the_pseudo_gradient(lr: float) -> None:
    federation = run(
        quadratic_client(), world_q(), FedAvg(), local_steps=2, server_optimizer=sgd(lr)
    )
    assert flat(federation.server_states()[0]) == pytest.approx(
        [lr * 0.445, lr * 0.2883333333], abs=1e-9
    )


def test_clients_without_training_data_never_train_and_weigh_nothing() -> None:
    data = small_data(counts=[5, 0, 7], dtype=torch.float64)
    both = small_data(counts=[5, 0, 7], dtype=torch.float64, cohort_size=2)
    federation = run(linear_client(double=True), data, FedAvg("uniform"), rounds=2)
    assert [entry.clients for entry in federation.history] == [[0, 2], [0, 2]]
    other = run(linear_client(double=True), both, FedAvg("uniform"), rounds=2)
    assert_same(federation.server_states()[0], other.server_states()[0])


@pytest.mark.parametrize("central", ["client", "centralized"])
def test_one_client_with_all_data_is_one_epoch_of_a_plain_trainer(central: str) -> None:
    data = small_data(counts=[11])
    template = linear_client(optimizer=sgd(0.1, momentum=0.9))
    federation = run(template, data, FedAvg(), rounds=1)
    alone = linear_client(optimizer=sgd(0.1, momentum=0.9))
    local = data.client(0) if central == "client" else data.centralized()
    quiet_trainer(1, limit_val_batches=0).fit(alone, datamodule=local)
    torch.testing.assert_close(
        federation.server_states()[0], dict(alone.state_dict()), rtol=0, atol=1e-7
    )


def test_one_client_and_plain_sgd_go_on_like_a_plain_trainer() -> None:
    data = small_data(counts=[11], dtype=torch.float64)
    federation = run(linear_client(double=True), data, FedAvg(), rounds=4)
    alone = linear_client(double=True)
    quiet_trainer(4, limit_val_batches=0).fit(alone, datamodule=data.client(0))
    torch.testing.assert_close(
        federation.server_states()[0], dict(alone.state_dict()), rtol=1e-12, atol=1e-14
    )


def test_one_client_with_augmentation_goes_on_like_a_plain_trainer() -> None:
    images = torch.randn(9, 3, 4, 4, dtype=torch.float64)
    labels = torch.arange(9) % CLASSES
    options = {"num_classes": CLASSES, "batch_size": 4, "seed": 3}
    crop = CropAndFlip(padding=1)
    data = TensorClients([(images, labels)], augmentation=crop, **options)
    template = network_client(MLP(48, [5], CLASSES).double(), optimizer=sgd(0.1))
    federation = run(template, data, FedAvg(), rounds=3)
    for local in (data.client(0), data.centralized()):
        alone = copy.deepcopy(template)
        quiet_trainer(3, limit_val_batches=0).fit(alone, datamodule=local)
        torch.testing.assert_close(
            federation.server_states()[0], dict(alone.state_dict()), rtol=1e-12, atol=1e-14
        )
    plain = run(template, TensorClients([(images, labels)], **options), FedAvg(), rounds=3)
    assert flat(plain.server_states()[0]) != pytest.approx(flat(federation.server_states()[0]))


def test_the_callers_client_is_never_changed() -> None:
    client = batchnorm_client()
    before = {name: value.clone() for name, value in client.state_dict().items()}
    federation = run(client, small_data(), FedAvg(), rounds=2)
    assert_same(dict(client.state_dict()), before)
    assert client._trainer is None
    assert not hasattr(client, "client_method")
    assert all(parameter.grad is None for parameter in client.parameters())
    assert flat(federation.server_states()[0]) != pytest.approx(flat(before))


class TestBuffers:
    """Section 0.4: floats are averaged like parameters, counters take their maximum."""

    def locals_of(self, data: TensorClients) -> list[dict[str, torch.Tensor]]:
        states = []
        for i in range(data.num_clients):
            alone = batchnorm_client()
            quiet_trainer(1, limit_val_batches=0).fit(alone, datamodule=data.client(i))
            states.append(dict(alone.state_dict()))
        return states

    def test_shared(self) -> None:
        data = small_data(counts=[8, 4, 12])
        state = run(batchnorm_client(), data, FedAvg()).server_states()[0]
        models = self.locals_of(data)
        weights = torch.tensor([8, 4, 12]) / 24
        for name, value in state.items():
            if name.endswith("num_batches_tracked"):
                assert value.dtype == torch.int64
                assert value == 3
            else:
                mean = sum(w * model[name] for w, model in zip(weights, models, strict=True))
                torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)

    def test_local(self) -> None:
        data = small_data(counts=[8, 4, 12], cohort_size=2)
        federation = run(batchnorm_client(), data, FedAvg(buffers="local"))
        (entry,) = federation.history
        models = self.locals_of(data)
        initial = batchnorm_client().state_dict()
        for i in range(3):
            state = federation.client_state(i)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                kept = models[i] if i in entry.clients else initial
                torch.testing.assert_close(state[f"network.1.{name}"], kept[f"network.1.{name}"])
        assert_same(
            {"m": federation.server_states()[0]["network.1.running_mean"]},
            {"m": initial["network.1.running_mean"]},
        )

    def test_local_buffers_do_not_travel(self) -> None:
        federation = run(batchnorm_client(), small_data(), FedAvg(buffers="local"))
        parameters = sum(p.numel() for p in batchnorm_client().parameters())
        assert federation.history[0].bytes_down == 6 * 4 * parameters
        assert federation.history[0].bytes_up == 6 * 4 * parameters

    def test_shared_buffers_travel_and_are_counted_by_their_size(self) -> None:
        federation = run(batchnorm_client(), small_data(), FedAvg())
        parameters = sum(p.numel() for p in batchnorm_client().parameters())
        assert federation.history[0].bytes_up == 6 * (4 * parameters + 2 * 4 * 6 + 8)

    def test_reset(self) -> None:
        data = small_data(counts=[8, 4])
        federation = run(batchnorm_client(), data, FedAvg(buffers="reset"), rounds=3)
        state = federation.server_states()[0]
        initial = batchnorm_client().state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_same({"b": state[f"network.1.{name}"]}, {"b": initial[f"network.1.{name}"]})

    @pytest.mark.parametrize("count", [5, 9])
    def test_a_last_batch_of_one_sample_joins_the_one_before(self, count: int) -> None:
        seen: list[int] = []

        class Recording(Classifier):
            def training_step(self, batch, batch_idx):
                seen.append(len(batch[1]))
                return super().training_step(batch, batch_idx)

        federation = run(batchnorm_client(Recording), small_data(counts=[count]), FedAvg())
        assert seen == [*[4] * (count // 4 - 1), 5]
        assert federation.history[0].failed == []

    def test_a_network_that_mixes_no_samples_keeps_its_batch_of_one(self) -> None:
        seen: list[int] = []

        class Recording(Classifier):
            def training_step(self, batch, batch_idx):
                seen.append(len(batch[1]))
                return super().training_step(batch, batch_idx)

        run(linear_client(Recording), small_data(counts=[5]), FedAvg())
        assert seen == [4, 1]

    @pytest.mark.parametrize("options", [{"local_epochs": 2}, {"local_steps": 3}])
    def test_a_client_with_one_sample_is_skipped(self, options: dict[str, int]) -> None:
        client = batchnorm_client()
        federation = run(client, small_data(counts=[1]), FedAvg(), **options)
        assert federation.history[0].failed == []
        assert_same(federation.server_states()[0], dict(client.state_dict()))

    def test_frozen_parameters_stay_and_only_the_others_learn(self) -> None:
        client = network_client(nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)))
        client.network[0].requires_grad_(False)
        federation = run(client, small_data(), FedAvg(), rounds=2)
        before, after = client.state_dict(), federation.server_states()[0]
        assert_same({"w": after["network.0.weight"]}, {"w": before["network.0.weight"]})
        assert not torch.equal(after["network.1.weight"], before["network.1.weight"])
        assert [p.shape for p in federation.server.parameters()] == [(CLASSES, 5), (CLASSES,)]

    def test_without_any_trainable_parameter_nothing_is_learned(self) -> None:
        client = linear_client().requires_grad_(False)
        with pytest.raises(ConfigurationError):
            run(client, small_data(), FedAvg())


def test_a_client_of_world_q_may_have_no_bias_or_buffers() -> None:
    federation = run(quadratic_client(), world_q(), FedAvg(), rounds=60, local_steps=1)
    curvature, pull = torch.zeros(2), torch.zeros(2)
    for i, count in enumerate((1, 3, 2)):
        a, b = world_q().samples(i, "train")[0][0].float().split(2)
        curvature += count * a
        pull += count * a * b
    assert flat(federation.server_states()[0]) == pytest.approx(
        (pull / curvature).numpy(), abs=1e-3
    )


def test_it_is_the_default_server() -> None:
    federation = run(linear_client(), small_data())
    assert isinstance(federation.callback, FedAvg)
    assert federation.callback.weighting == "samples"


def test_bad_weighting() -> None:
    with pytest.raises(ConfigurationError, match=r"FedAvg: weighting .* got 'size'"):
        FedAvg("size")


def test_a_hypernet_sized_chunk_is_the_same_as_many_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = small_data(dtype=torch.float64)
    whole = run(linear_client(double=True), data, FedAvg(), rounds=2)

    class OneByOne(FedAvg):
        def round(self, cohort):
            self.on_round_start()
            for updates in self.clients.train(cohort, self.broadcast, max_chunk=1):
                self.receive(updates)
            self.set_pseudo_gradients()

    single = run(linear_client(double=True), data, OneByOne(), rounds=2)
    torch.testing.assert_close(
        whole.server_states()[0], single.server_states()[0], rtol=1e-12, atol=1e-14
    )


def test_the_server_module_is_all_that_the_trainer_sees() -> None:
    federation = run(linear_client(), small_data(), FedAvg())
    assert isinstance(federation, L.LightningModule)
    assert sum(p.numel() for p in federation.parameters()) == FEATURES * CLASSES + CLASSES
    assert samples(3, 0)[0].shape == (3, FEATURES)
