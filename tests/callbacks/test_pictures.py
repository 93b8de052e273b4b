"""The pictures: what is drawn, when, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import Tensor, nn
from torch.testing import assert_close

from pflight import Federation
from pflight.callbacks import (
    AggregationWeights,
    ClusterExamples,
    ClusterPlot,
    ConvergencePlot,
    EmbeddingTrajectory,
    FedAvg,
    FeSEM,
    Local,
    convergence_figure,
)
from pflight.callbacks.monitors.pictures import (
    bars_figure,
    cluster_figure,
    embedding_figure,
    evolution_figure,
    examples_figure,
    heatmap_figure,
)
from pflight.callbacks.monitors.pictures.clusters import fold
from pflight.callbacks.monitors.pictures.embedding import mean_features
from pflight.callbacks.monitors.pictures.picture import RepeatedPicture
from pflight.data.palette import COLORS, FAINT, KINDS, MARKERS, point_style
from pflight.datamodules import TensorClients
from pflight.errors import ConfigurationError
from pflight.history import Round
from pflight.models import Classifier
from tests.event_files import read_events
from tests.runs import (
    CLASSES,
    dropout_client,
    flat,
    linear_client,
    network_client,
    quiet_trainer,
    run,
    small_data,
)


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    """Draw at a low resolution, which takes less time."""
    monkeypatch.setattr("pflight.callbacks.monitors.pictures.picture._DPI", 60)


@pytest.fixture
def undrawn(monkeypatch):
    """Make the figures of a run, but render none."""
    monkeypatch.setattr("pflight.callbacks.monitors.pictures.picture._write", lambda *_: None)


class Blank(RepeatedPicture):
    """A picture of nothing, which takes no time to render."""

    def figures(self, federation: Federation) -> dict[str, Figure]:
        return {"blank": Figure((1, 1))}


class Mixing(FedAvg):
    """FedAvg with the weights of a server that mixes layers: 0.5 for oneself, more each round."""

    def layer_weights(self, clients: Tensor) -> dict[str, Tensor]:
        total = self.clients.num_clients
        own = 0.5 + 0.1 * self.clients.rounds
        row = torch.full((len(clients), total), (1 - own) / (total - 1), dtype=torch.double)
        row[torch.arange(len(clients)), clients] = own
        return {"network.first": row, "network.second": row.flip(1)}


def drawn(folder: Path) -> list[str]:
    """Return the names of the pictures of a run, and see that each can be read."""
    paths = sorted(Path(folder, "pictures").glob("*"))
    for path in paths:
        assert imread(path).ndim == 3
    return [path.name for path in paths]


def legend(figure: Figure, index: int = 0) -> list[str]:
    return [text.get_text() for text in figure.legends[index].get_texts()]


def offsets(collection: Any) -> Tensor:
    return torch.as_tensor(collection.get_offsets().data)


def image_data(clients: int = 4, channels: int = 1, **options: Any) -> TensorClients:
    """Return clients with images of one class each; an image of class y is full of y."""
    x = torch.zeros(3, channels, 5, 4)
    pairs = [(x + client % 3, torch.full((3,), client % 3)) for client in range(clients)]
    return TensorClients(pairs, num_classes=3, **options)


def image_client() -> Classifier:
    return network_client(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)))


class TestWhenAndWhere:
    def test_every_and_the_last_round(self, tmp_path):
        options = {"default_root_dir": tmp_path}
        run(linear_client(), small_data(), FedAvg(), 5, Blank(every=2), trainer=options)
        assert drawn(tmp_path) == [f"blank-{i:04}.png" for i in (1, 3, 4)]

    @pytest.mark.long
    def test_a_second_fit_goes_on_with_the_rounds(self, undrawn):
        federation, drawn = Federation(linear_client()), []

        class Noted(Blank):
            def figures(self, federation: Federation) -> dict[str, Figure]:
                drawn.append(federation.history[-1].index)
                return {}

        for rounds in (3, 4):
            moves = EmbeddingTrajectory(rounds=[6], every=2)
            quiet_trainer(rounds, FedAvg(), Noted(every=2), moves).fit(federation, small_data())
        assert drawn == [1, 2, 3, 5, 6]
        assert moves.state_dict()["features"]["rounds"].tolist() == [3, 5]

    def test_by_default_with_each_evaluation(self, tmp_path):
        options = {"default_root_dir": tmp_path, "check_val_every_n_epoch": 3}
        run(linear_client(), small_data(), FedAvg(), 6, Blank(), trainer=options)
        assert drawn(tmp_path) == ["blank-0002.png", "blank-0005.png"]

    def test_the_last_round_of_a_run_that_stops_early(self, tmp_path):
        stop = EarlyStopping("val/macro_acc", patience=1, mode="min", stopping_threshold=2.0)
        run(
            linear_client(),
            small_data(),
            FeSEM(2),
            9,
            stop,
            Blank(every=9),
            ConvergencePlot(),
            trainer={"default_root_dir": tmp_path},
        )
        assert drawn(tmp_path) == ["blank-0000.png", "convergence-0000.png"]

    @pytest.mark.long
    def test_tensorboard_has_them_too(self, tmp_path):
        logger = TensorBoardLogger(tmp_path, name="", version="")
        run(
            linear_client(),
            small_data(),
            Mixing(),
            2,
            ConvergencePlot(),
            Blank(),
            AggregationWeights(client=3, every=2),
            trainer={"default_root_dir": tmp_path, "logger": logger},
        )
        assert read_events(tmp_path).images == {
            "pictures/convergence": [1],
            "pictures/blank": [0, 1],
            "pictures/weights/heatmap": [1],
            "pictures/weights/client-3-evolution": [1],
            "pictures/weights/client-3-layers": [1],
        }
        assert "weights-client-3-layers-0001.png" in drawn(tmp_path)

    def test_a_trial_run_writes_nothing(self, tmp_path):
        options = {"default_root_dir": tmp_path, "fast_dev_run": True}
        run(linear_client(), small_data(), FeSEM(2), 1, ClusterPlot(), trainer=options)
        assert not list(tmp_path.iterdir())

    def test_what_is_no_federation_has_no_pictures(self, tmp_path):
        pictures = [ClusterPlot(), ClusterExamples(), ConvergencePlot(), EmbeddingTrajectory()]
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            callbacks=[*pictures, AggregationWeights()],
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(linear_client(), datamodule=small_data().client(0))
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("kind", [ClusterPlot, ClusterExamples, AggregationWeights])
    def test_every_must_be_positive(self, kind):
        with pytest.raises(ConfigurationError, match=f"{kind.__name__}: every must be .* 1, got 0"):
            kind(every=0)


class TestClusterPlot:
    def test_points_are_the_clients_last_models(self, undrawn, monkeypatch):
        plot = ClusterPlot(every=3)
        seen: dict[str, Tensor] = {}

        def note(models: Tensor, *rest: Tensor) -> Figure:
            seen["models"], (seen["clusters"], seen["centers"]) = models, rest
            return cluster_figure(models, *rest)

        monkeypatch.setattr("pflight.callbacks.monitors.pictures.clusters.cluster_figure", note)
        options = {"fast_dev_run": False, "default_root_dir": "unused"}
        callback = FeSEM(2)
        returned: dict[int, Tensor] = {}

        class Noting(L.Callback):
            def on_fit_start(self, trainer, federation):
                def keep(updates):
                    states = [dict(state.items()) for state in updates.states]
                    vectors = [torch.from_numpy(flat(state)) for state in states]
                    returned.update(zip(updates.clients.tolist(), vectors, strict=True))

                federation.clients.on_updates.append(keep)

        module = run(
            linear_client(), small_data(cohort_size=3), callback, 3, plot, Noting(), trainer=options
        )
        expected = torch.stack([returned[client] for client in sorted(returned)])
        assert_close(seen["models"].double(), expected, rtol=0, atol=1e-7)
        assert torch.equal(seen["clusters"], callback.assignments)
        centers = [torch.from_numpy(flat(state)) for state in module.server_states()]
        assert_close(seen["centers"].double(), torch.stack(centers), rtol=0, atol=1e-7)

    def test_it_listens_only_while_it_trains(self, undrawn, tmp_path):
        plot = ClusterPlot()
        options = {"default_root_dir": tmp_path}
        module = run(linear_client(), small_data(), FeSEM(2), 1, plot, trainer=options)
        assert module.clients.on_updates == []

    def test_a_sample_of_the_clients(self, tmp_path):
        plot = ClusterPlot(max_clients=4)
        options = {"default_root_dir": tmp_path}
        run(linear_client(), small_data(), FedAvg(), 1, plot, trainer=options)
        assert len(plot.state_dict()["clients"]) == 4
        assert drawn(tmp_path) == ["clusters-0000.png"]

    def test_one_client_is_not_drawn(self, tmp_path):
        run(
            linear_client(),
            small_data(counts=[5]),
            FeSEM(1),
            1,
            ClusterPlot(),
            trainer={"default_root_dir": tmp_path},
        )
        assert not (tmp_path / "pictures").exists()

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    def test_a_resumed_run_knows_clients_that_answered_before(self, tmp_path):
        def go(rounds: int, folder: str, *more: L.Callback, **options: Any) -> ClusterPlot:
            plot = ClusterPlot(every=1)
            data = small_data(cohort_size=2)
            root = {"default_root_dir": tmp_path / folder}
            run(linear_client(), data, FedAvg(), rounds, plot, *more, trainer=root, **options)
            return plot

        whole = go(3, "whole", ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
        resumed = go(3, "resumed", ckpt_path=tmp_path / "epoch=0.ckpt")
        assert len(whole.state_dict()["clients"]) > 2
        assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
        one, other = (tmp_path / name / "pictures" for name in ("whole", "resumed"))
        assert drawn(other.parent) == ["clusters-0001.png", "clusters-0002.png"]
        for path in other.iterdir():
            assert path.read_bytes() == (one / path.name).read_bytes()

    def test_a_new_federation_starts_anew(self, undrawn, tmp_path):
        plot = ClusterPlot()
        for counts in ([5, 5, 5], [4, 4]):
            run(
                linear_client(),
                small_data(counts),
                FedAvg(),
                1,
                plot,
                trainer={"default_root_dir": tmp_path},
            )
        assert plot.state_dict()["clients"].tolist() == [0, 1]

    def test_too_small_a_sample_is_refused(self):
        with pytest.raises(ConfigurationError, match="max_clients must be at least 2, got 1"):
            ClusterPlot(max_clients=1)


class TestClusterFigure:
    def test_colours_labels_and_distances(self):
        models = torch.tensor([[0.0, 0, 0], [3, 4, 0], [0, 4, 0], [3, 0, 0]])
        figure = cluster_figure(models, torch.tensor([0, 1, -1, 0]), torch.tensor([[0.0, 4, 0]]))
        none, first, second, centers = figure.axes[0].collections
        assert legend(figure) == ["none (1)", "0 (2)", "1 (1)", "server model"]
        for points, color in ((none, FAINT), (first, COLORS[0]), (second, COLORS[1])):
            assert tuple(points.get_facecolor()[0][:3]) == to_rgba(color)[:3]
        assert_close(offsets(centers), offsets(none), rtol=0, atol=1e-6)
        assert_close(torch.pdist(offsets(first)), torch.tensor([3.0]).double())
        apart = (offsets(second)[0] - offsets(first)[0]).norm()
        assert float(apart) == pytest.approx(5)
        labels = figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        assert labels == (  # variances 4 and 2.25
            "first principal component (64% of variance)",
            "second principal component (36% of variance)",
        )

    def test_without_clusters_there_is_one_colour_and_no_legend(self):
        figure = cluster_figure(torch.eye(4))
        assert figure.legends == []
        (points,) = figure.axes[0].collections
        assert tuple(points.get_facecolor()[0][:3]) == to_rgba(COLORS[0])[:3]

    @pytest.mark.parametrize("models", [torch.zeros(3, 5), torch.tensor([[1.0], [2.0]])])
    def test_models_without_two_directions(self, models):
        figure = cluster_figure(models, torch.zeros(len(models)).long(), models[:1])
        figure.draw_without_rendering()
        assert max(map(abs, figure.axes[0].get_ylim())) < 1

    def test_many_clusters_differ_and_fit(self):
        count = 30
        clusters = torch.arange(count)
        figure = cluster_figure(torch.randn(count, 4), clusters, torch.randn(count, 4))
        *groups, _ = figure.axes[0].collections
        styles = {
            (tuple(g.get_facecolor()[0]), g.get_paths()[0].vertices.tobytes()) for g in groups
        }
        assert len(styles) == count
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1

    def test_folding_keeps_distances(self):
        vectors = torch.randn(12, 50_001, generator=torch.Generator().manual_seed(0))
        short = fold(vectors)
        assert short.shape == (12, 2048)
        ratio = torch.pdist(short) / torch.pdist(vectors)
        assert ratio.sub(1).abs().max() < 0.08  # five standard deviations
        assert_close(fold(3 * vectors[:1]), 3 * short[:1])

    def test_short_vectors_stay(self):
        vectors = torch.randn(3, 2048)
        assert fold(vectors) is vectors


class TestClusterExamples:
    def test_blocks_are_clusters(self):
        picture = ClusterExamples(per_cluster=2, images=2, every=1)
        figures: list[Figure] = []

        class Noting(L.Callback):
            def on_train_epoch_end(self, trainer, federation):
                figures.append(picture.figures(federation)["examples"])

        callback = FeSEM(3, num_restarts=5)
        options = {"fast_dev_run": True}
        run(image_client(), image_data(7), callback, 1, picture, Noting(), trainer=options)
        (figure,) = figures
        sizes = callback.assignments.bincount().tolist()
        plural = {1: "1 client", 2: "2 clients", 3: "3 clients"}
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert titles[:3] == [f"cluster {k}: {plural[size]}" for k, size in enumerate(sizes)]
        for k, axes in enumerate(figure.axes[:3]):
            rows = [int(text.get_text()) for text in axes.get_yticklabels()]
            assert len(rows) == min(2, sizes[k])
            assert {int(callback.assignments[client]) for client in rows} == {k}
            shown = axes.images[0].get_array()
            for line, client in enumerate(rows):
                assert shown[6 * line, 0].tolist() == [client % 3 / 2] * 3

    def test_without_clusters_all_clients_are_one_block(self, tmp_path):
        picture = ClusterExamples()
        options = {"default_root_dir": tmp_path}
        run(image_client(), image_data(), FedAvg(), 1, picture, trainer=options)
        assert drawn(tmp_path) == ["examples-0000.png"]

    @pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning")  # Lightning's own
    def test_data_that_are_no_images(self, tmp_path):
        picture = ClusterExamples(every=1)
        options = {"default_root_dir": tmp_path}
        with pytest.warns(UserWarning, match=r"sample of shape \[4\] is not an image") as caught:
            run(linear_client(), small_data(), FeSEM(2), 3, picture, trainer=options)
        assert sum("ClusterExamples" in str(warning.message) for warning in caught) == 1
        assert not (tmp_path / "pictures").exists()

    def test_colours_come_back_from_normalised_images(self):
        colours = torch.rand(4, 3, 6, 6, dtype=torch.double)
        colours[0, :, 0, 0], colours[1, :, 0, 0] = 0.0, 1.0  # each channel is spanned
        mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25])
        normalised = (colours - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
        figure = examples_figure({0: {7: normalised}})
        shown = torch.as_tensor(figure.axes[0].images[0].get_array())
        assert shown.shape == (7, 4 * 7, 3)
        for i, image in enumerate(colours):
            assert_close(shown[:6, 7 * i : 7 * i + 6], image.movedim(0, 2), rtol=0, atol=1e-7)
        assert (shown[6] == 1).all()  # the gap

    def test_images_are_spread_over_the_labels(self):
        y = torch.tensor([2, 0, 1, 0, 2, 1])
        data = TensorClients([(y.float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4), y)], num_classes=3)
        data.setup()
        row = ClusterExamples(images=3)._row(data, 0)
        assert row[:, 0, 0, 0].tolist() == [0, 1, 2]

    def test_options_out_of_range(self):
        with pytest.raises(ConfigurationError, match="images must be at least 1, got 0"):
            ClusterExamples(images=0)


class TestConvergence:
    def history(self, start: float) -> list[Round]:
        values = [start, start + 0.25, float("nan"), start + 0.5]
        return [Round(t, [0], metrics={"val/macro_acc": v}) for t, v in enumerate(values)]

    def test_a_curve_for_each_run(self):
        runs = {"K = 1": self.history(0.0), "K = 2": self.history(0.25)}
        figure = convergence_figure(runs, ["val/macro_acc"])
        (axes,) = figure.axes
        assert legend(figure) == ["K = 1", "K = 2"]
        one, two = axes.lines
        assert (one.get_color(), two.get_color()) == COLORS[:2]
        assert (one.get_marker(), two.get_marker()) == tuple(MARKERS[:2])
        assert one.get_xdata().tolist() == [0, 1, 2, 3]
        assert_close(
            torch.as_tensor(two.get_ydata()),
            torch.tensor([0.25, 0.5, torch.nan, 0.75]),
            equal_nan=True,
            check_dtype=False,
        )
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "validation macro accuracy")
        figure.draw_without_rendering()
        assert 0.75 < axes.get_ylim()[1] < 1

    def test_one_run_needs_no_legend(self):
        figure = convergence_figure({"a": self.history(0.0)}, ["val/macro_acc"])
        assert figure.legends == []

    @pytest.mark.long
    def test_reads_earlier_runs(self, tmp_path, monkeypatch):
        curves: dict[str, Any] = {}

        def note(runs: Any, metrics: Any) -> Figure:
            curves.update(runs)
            return draw(runs, metrics)

        from pflight.callbacks.monitors.pictures import convergence

        draw = convergence._draw
        monkeypatch.setattr(convergence, "_draw", note)

        def go(rounds: int, folder: str, *pictures: L.Callback) -> Federation:
            root = tmp_path / folder
            logger = TensorBoardLogger(root, name="", version="")
            options = {"default_root_dir": root, "logger": logger}
            return run(linear_client(), small_data(), FedAvg(), rounds, *pictures, trainer=options)

        earlier = go(2, "earlier")
        now = go(3, "now", ConvergencePlot(runs={"before": str(tmp_path / "earlier")}))
        assert list(curves) == ["before", "this run"]
        for label, module in (("before", earlier), ("this run", now)):
            for metric in ("val/micro_acc", "val/macro_acc"):
                rounds, values = curves[label][metric]
                assert list(rounds) == [entry.index for entry in module.history]
                expected = [entry.metrics[metric] for entry in module.history]
                assert values == pytest.approx(expected, rel=1e-6)
        assert drawn(tmp_path / "now") == ["convergence-0002.png"]
        figure = convergence_figure({"a": tmp_path / "earlier", "b": now.history})
        assert [len(axes.lines) for axes in figure.axes] == [2, 2]

    def test_folders_are_checked_before_training(self, tmp_path):
        picture = ConvergencePlot(runs=[str(tmp_path / "gone")])
        with pytest.raises(ConfigurationError, match=r"there is no run folder .*gone"):
            run(linear_client(), small_data(), FedAvg(), 1, picture)
        with pytest.raises(ConfigurationError, match="have none of val/micro_acc, val/macro_acc"):
            convergence_figure({"empty": tmp_path})

    @pytest.mark.filterwarnings("ignore:.isinstance:FutureWarning")  # Lightning's own
    def test_metrics_that_were_never_logged(self, tmp_path):
        picture = ConvergencePlot(["val/macro_acc", "val/mcaro_acc"])
        options = {"default_root_dir": tmp_path}
        with pytest.warns(UserWarning, match="leaves out val/mcaro_acc, which no round has"):
            run(linear_client(), small_data(), FedAvg(), 1, picture, trainer=options)
        assert drawn(tmp_path) == ["convergence-0000.png"]
        with pytest.raises(ConfigurationError, match="no round of 'a' has val/loss"):
            convergence_figure({"a": self.history(0.0)}, ["val/loss"])

    @pytest.mark.parametrize("runs", [["a/x", "b/x"], {"this run": "a"}])
    def test_labels_must_differ(self, runs):
        with pytest.raises(ConfigurationError, match="need different labels"):
            ConvergencePlot(runs=runs)


class TestEmbedding:
    def test_features_are_those_of_the_judged_models(self, tmp_path):
        picture = EmbeddingTrajectory(max_clients=3)
        data = small_data()
        options = {"default_root_dir": tmp_path}
        module = run(dropout_client(), data, Local(), 2, picture, trainer=options)
        state = picture.state_dict()
        assert state["features"]["rounds"].tolist() == [0, 1]
        last = state["features"]["values"][1]
        for client, mean in zip(state["clients"].tolist(), last, strict=True):
            network = module.client_module(client).network
            expected = network[:3](data.samples(client, "train")[0]).mean(0)
            assert_close(mean, expected.detach())
        assert drawn(tmp_path) == ["embedding-0001.png"]

    def test_the_layer_that_runs_last_counts(self):
        class Twisted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.output = nn.Linear(2, CLASSES)
                self.hidden = nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.output(self.hidden(x).relu())

        client = network_client(Twisted())
        x = torch.randn(5, 4)
        expected = client.network.hidden(x).relu().mean(0).detach()
        assert_close(mean_features(client, x, batch_size=2), expected)
        assert not client.network.output._forward_pre_hooks

    @pytest.mark.long
    def test_the_first_rounds(self, tmp_path):
        picture = EmbeddingTrajectory(rounds=[2, 3, 50], every=2, color="round")
        options = {"default_root_dir": tmp_path}
        run(linear_client(), small_data(), FedAvg(), 5, picture, trainer=options)
        assert picture.state_dict()["features"]["rounds"].tolist() == [1, 3]
        names = [f"embedding-first-{count}-rounds-0004.png" for count in (2, 3, 4)]
        assert drawn(tmp_path) == names

    @pytest.mark.long
    def test_rounds_that_are_not_drawn_are_not_kept(self, tmp_path):
        picture = EmbeddingTrajectory(rounds=[1, 2])
        options = {"default_root_dir": tmp_path}
        run(linear_client(), small_data(), FedAvg(), 4, picture, trainer=options)
        assert picture.state_dict()["features"]["rounds"].tolist() == [0, 1]

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    def test_a_resumed_run_draws_all_rounds(self, tmp_path):
        def go(folder: str, *more: L.Callback, **options: Any) -> dict[str, Any]:
            picture = EmbeddingTrajectory(max_clients=2)
            root = {"default_root_dir": tmp_path / folder}
            run(linear_client(), small_data(), FedAvg(), 3, picture, *more, trainer=root, **options)
            return picture.state_dict()

        whole = go("whole", ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
        resumed = go("resumed", ckpt_path=tmp_path / "epoch=0.ckpt")
        assert_close(resumed, whole, rtol=0, atol=0)
        one, other = (
            Path(tmp_path, folder, "pictures", "embedding-0002.png").read_bytes()
            for folder in ("whole", "resumed")
        )
        assert one == other

    def test_training_goes_on_as_without(self, undrawn, tmp_path):
        options = {"default_root_dir": tmp_path}
        plain = run(dropout_client(), small_data(), FedAvg(), 2, trainer=options)
        pictures = [EmbeddingTrajectory(), ClusterPlot(), ConvergencePlot()]
        watched = run(dropout_client(), small_data(), FedAvg(), 2, *pictures, trainer=options)
        assert_close(watched.server_states(), plain.server_states(), rtol=0, atol=0)

    def test_needs_a_linear_layer(self):
        network = nn.Sequential(nn.Conv1d(1, CLASSES, 4), nn.Flatten())

        class Reshaped(Classifier):
            def forward(self, x: Tensor) -> Tensor:
                return self.network(x.unsqueeze(1))

        with pytest.raises(ConfigurationError, match="last linear layer, but Sequential has none"):
            run(network_client(network, Reshaped), small_data(), FedAvg(), 1, EmbeddingTrajectory())

    def test_options_are_checked(self):
        for options in ({"rounds": [3, 0]}, {"every": 0}, {"max_clients": 0}):
            (name,) = options
            with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, got 0"):
                EmbeddingTrajectory(**options)
        data = TensorClients([(torch.ones(2, 4), torch.zeros(2).long())], num_classes=CLASSES)
        with pytest.raises(ConfigurationError, match="no client has test samples"):
            run(linear_client(), data, FedAvg(), 1, EmbeddingTrajectory(split="test"))

    def test_one_point_for_each_client_and_round(self):
        features = torch.randn(4, 12, 5)
        features[1, 2, 0] = torch.nan
        figure = embedding_figure(features, range(4), torch.arange(12))
        axes = figure.axes[0]
        shown = [offsets(points) for points in axes.collections]
        assert [len(points) for points in shown] == [4] * 12
        missing = torch.stack(shown).isnan().any(2).nonzero().tolist()
        assert missing == [[2, 1]]
        assert legend(figure) == [str(client) for client in range(12)]
        assert legend(figure, 1) == ["0", "3"]
        first, last = figure.legends[1].legend_handles
        assert to_rgba(first.get_color())[3] < to_rgba(last.get_color())[3] == 1
        assert all(map(torch.isfinite, torch.tensor(axes.get_xlim())))

    def test_the_ids_of_many_clients_are_at_their_last_points(self):
        features = torch.randn(3, 41, 4)
        features[2, 7] = torch.nan
        features[:, 8] = torch.nan
        figure = embedding_figure(features, range(3), torch.arange(100, 141))
        (axes,) = figure.axes
        ids = {text.get_text(): text.xy for text in axes.texts}
        assert ids.keys() == {str(client) for client in range(100, 141)} - {"108"}
        for c, last in ((0, 2), (7, 1), (40, 2)):
            assert ids[str(100 + c)] == pytest.approx(offsets(axes.collections[c])[last].tolist())
        assert [found.get_title().get_text() for found in figure.legends] == ["round"]

    def test_colours_by_round(self):
        figure = embedding_figure(torch.randn(3, 4, 5), [0, 5, 10], torch.arange(4), "round")
        (points,) = figure.axes[0].collections
        assert points.get_array().flatten().tolist() == [0, 5, 10] * 4
        assert figure.axes[1].get_ylabel() == "round"

    @pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 4), (2, 2, 1), (1, 4, 3)])
    def test_few_points(self, shape):
        figure = embedding_figure(torch.randn(shape), range(shape[0]), torch.arange(shape[1]))
        found = torch.stack([offsets(p) for p in figure.axes[0].collections])
        assert found.isfinite().all()

    def test_equal_features_are_one_point(self):
        figure = embedding_figure(torch.ones(2, 3, 4), range(2), torch.arange(3))
        assert all((offsets(p) == 0).all() for p in figure.axes[0].collections)


class TestAggregationWeights:
    @pytest.mark.long
    def test_what_is_drawn(self, undrawn, tmp_path):
        picture = AggregationWeights(client=2, clients=[1, 2, 4])
        options = {"default_root_dir": tmp_path}
        module = run(linear_client(), small_data(), Mixing(), 3, picture, trainer=options)
        figures = picture.figures(module)
        heat = figures["weights/heatmap"]
        panels = heat.axes[:2]
        assert [axes.get_title() for axes in panels] == ["first", "second"]
        first = torch.as_tensor(panels[0].images[0].get_array())
        assert_close(first, 0.04 + 0.76 * torch.eye(3))
        assert [text.get_text() for text in panels[0].get_xticklabels()] == ["1", "2", "4"]
        evolution = figures["weights/client-2-evolution"].axes[0]
        own = next(line for line in evolution.lines if line.get_label() == "client 2, itself")
        assert own.get_xdata().tolist() == [0, 1, 2]
        assert own.get_ydata().tolist() == pytest.approx([0.6, 0.7, 0.8])
        assert own.zorder == max(line.zorder for line in evolution.lines)
        assert own.get_linewidth() == max(line.get_linewidth() for line in evolution.lines)

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    def test_a_resumed_run_draws_all_rounds(self, undrawn, tmp_path):
        def go(folder: str, *more: L.Callback, **options: Any) -> list[dict[str, Any]]:
            pictures = [AggregationWeights(client=client, every=1) for client in (0, 3)]
            root = {"default_root_dir": tmp_path / folder}
            servers = Mixing(), 2, *pictures, *more
            run(linear_client(), small_data(), *servers, trainer=root, **options)
            return [picture.state_dict() for picture in pictures]

        whole = go("whole", ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
        resumed = go("resumed", ckpt_path=tmp_path / "epoch=0.ckpt")
        assert whole[0]["past"]["rounds"].tolist() == [0, 1]
        assert not torch.equal(whole[0]["past"]["values"][0], whole[1]["past"]["values"][0])
        assert_close(resumed, whole, rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("callback", "options", "message"),
        [
            (FedAvg, {}, r"layer_weights\(clients\), such as PFedLA; FedAvg has none"),
            (Mixing, {"layers": ["network.third"]}, "unknown layer 'third'; there are first, s"),
            (Mixing, {"client": 6}, "unknown client 6: the ids are 0 to 5"),
            (
                Mixing,
                {"clients": [1, -1]},
                "AggregationWeights: clients must be at least 0, got -1",
            ),
        ],
    )
    def test_what_can_not_be_drawn_is_an_error_before_training(self, callback, options, message):
        with pytest.raises(ConfigurationError, match=message):
            run(linear_client(), small_data(), callback(), 1, AggregationWeights(**options))

    def test_bars_add_up(self):
        weights = torch.tensor([[0.1, 0.4, 0.2, 0.1, 0.05, 0.05, 0.06, 0.04], [0.125] * 8])
        figure = bars_figure(weights, ["conv", "fc"], client=1)
        names = ["client 1, itself", *(f"client {i}" for i in (2, 0, 3, 6, 4)), "2 others"]
        assert legend(figure) == names[::-1]
        hatches = [group[0].get_hatch() for group in figure.axes[0].containers[:-1]]
        assert len(set(hatches)) == len(hatches)
        bars = torch.tensor(
            [[bar.get_height() for bar in group] for group in figure.axes[0].containers]
        )
        expected = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.06, 0.05, 0.09])
        assert_close(bars[:, 0], expected, check_dtype=False)
        assert_close(bars.sum(0), torch.ones(2), check_dtype=False)

    @pytest.mark.long
    def test_evolution_of_many_clients(self):
        weights = torch.softmax(torch.randn(20, 4, 100), dim=2)
        figure = evolution_figure(weights, range(20), ["a", "b", "c", "d"], client=5)
        figure.draw_without_rendering()
        panels = [axes for axes in figure.axes if axes.axison]
        assert [len(axes.lines) for axes in panels] == [100] * 4
        assert all(axes.get_ylim()[1] > weights.max() for axes in panels)
        assert legend(figure)[:2] == ["94 others", "client 5, itself"]

    def test_weights_that_are_nan_or_of_one_client(self):
        heatmap_figure({"x": torch.full((1, 1), torch.nan)}, [0]).draw_without_rendering()
        bars_figure(torch.ones(1, 1), ["x"], 0).draw_without_rendering()
        evolution_figure(torch.full((1, 1, 1), torch.nan), [0], ["x"], 0).draw_without_rendering()

    def test_heatmaps_of_all_layers_have_one_scale(self):
        matrices = {"a": torch.eye(100) * 0.5, "b": torch.eye(100)}
        figure = heatmap_figure(matrices, range(100))
        assert {axes.images[0].get_clim() for axes in figure.axes[:2]} == {(0.0, 1.0)}
        assert [int(t.get_text()) for t in figure.axes[0].get_xticklabels()] == [0, 20, 40, 60, 80]

    @pytest.mark.long
    def test_layers_are_named_as_in_pictures_or_with_their_network(self, undrawn):
        for name in ("second", "network.second"):
            picture = AggregationWeights(layers=[name], every=9)
            module = run(linear_client(), small_data(), Mixing(), 1, picture)
            panel, _ = picture.figures(module)["weights/heatmap"].axes
            assert panel.get_title() == "second"


class TestNames:
    """Pictures that tell clients apart show their names beside their numbers."""

    names = ("a$b$", "$\\frac$", "Charité", "d")

    @pytest.mark.long
    def test_weights(self, undrawn):
        data, picture = small_data((5, 6, 7, 8), client_names=self.names), AggregationWeights()
        figures = picture.figures(run(linear_client(), data, Mixing(), 1, picture))
        for figure in figures.values():
            figure.draw_without_rendering()
        heatmap, evolution, bars = figures.values()
        ticks = [t.get_text() for t in heatmap.axes[0].get_yticklabels()]
        assert ticks[1:3] == ["1 (\\$\\frac\\$)", "2 (Charité)"]
        assert "client 0 (a\\$b\\$), itself" in legend(evolution)
        assert "client 2 (Charité)" in legend(bars)
        assert bars.axes[0].get_ylabel() == "weight for client 0 (a\\$b\\$)"

    def test_examples(self, undrawn):
        picture, data = ClusterExamples(), image_data(client_names=self.names)
        module = run(image_client(), data, FeSEM(1), 1, picture)
        (figure,) = picture.figures(module).values()
        figure.draw_without_rendering()
        assert "2 (Charité)" in [t.get_text() for t in figure.axes[0].get_yticklabels()]

    def test_embedding(self):
        label = ["0 (a)", "1 (b)", "2 (c)"].__getitem__
        figure = embedding_figure(torch.randn(2, 3, 4), range(2), torch.arange(3), label=label)
        assert legend(figure) == ["0 (a)", "1 (b)", "2 (c)"]

    def test_partition(self):
        figure = image_data(client_names=self.names).partition_figure()
        figure.draw_without_rendering()
        assert figure.axes[0].get_xticklabels()[2].get_text() == "2 (Charité)"


def test_the_palette_is_told_apart():
    assert len({*COLORS, FAINT}) == len(COLORS) + 1
    assert len({point_style(index) for index in range(KINDS)}) == KINDS
    assert len({point_style(index)[1] for index in range(len(MARKERS))}) == len(MARKERS)


@pytest.mark.long
@pytest.mark.parametrize("width", ["narrow", "wide"])
def test_nothing_is_cut_off(width):
    names = {"narrow": "K", "wide": "a run with quite a long name, number"}
    rounds = [Round(t, [0], metrics={"val/micro_acc": t / 3, "val/macro_acc": 0.5}) for t in (0, 1)]
    figures = [
        convergence_figure({f"{names[width]} {k}": rounds for k in range(12)}),
        bars_figure(torch.full((6, 8), 0.125), [f"{names[width]}-{k}"[:24] for k in range(6)], 0),
        embedding_figure(torch.randn(2, 30, 3), range(2), torch.arange(30)),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        for part in (*figure.axes, *figure.legends):
            box = part.get_tightbbox()
            assert min(box.x0, box.y0) >= -1
            assert box.x1 <= figure.bbox.x1 + 1
            assert box.y1 <= figure.bbox.y1 + 1
