"""The runs of a comparison: which there are, and what tells them apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pflight.command.config_files import config_file
from pflight.errors import ConfigurationError, UnknownOptionError
from pflight.experiments.plan import Plan, flat, methods_of, of_data, values_of

from .small import DATA, data_config, method_config

MU = "trainer.callbacks.mu"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan([data_config(tmp_path_factory.mktemp("plan"))])


def rows_of(plan: Plan, *methods: str, **settings: Any) -> Any:
    named = {name.replace("__", "."): values for name, values in settings.items()}
    return plan.rows(methods_of(methods), named)


def test_all_are_the_shipped_ones_that_any_module_takes() -> None:
    names = {method.name for method in methods_of(["all"])}
    assert {"fesem", "pfedla_sparse", "local"} <= names
    assert names.isdisjoint({"fedit", "ffa_lora", "fedsa_lora"})


class TestSettings:
    @pytest.mark.long
    def test_of_one_method_only_leave_the_others_one_row(self, plan):
        rows = plan.rows(methods_of(["fedavg", "fedprox"]), {MU: [0.1, 1]})
        assert [(row.method.name, dict(row.settings)) for row in rows] == [
            ("fedavg", {}),
            ("fedprox", {MU: 0.1}),
            ("fedprox", {MU: 1}),
        ]
        assert [dict(flat(row.config)).get(MU) for row in rows] == [None, 0.1, 1]

    def test_may_be_of_a_callback_by_its_class(self, plan):
        of_fedprox = "trainer.callbacks.FedProx.mu"
        rows = plan.rows(methods_of(["fedavg", "fedprox"]), {of_fedprox: [0.1, 1]})
        assert [(row.method.name, dict(row.settings)) for row in rows] == [
            ("fedavg", {}),
            ("fedprox", {of_fedprox: 0.1}),
            ("fedprox", {of_fedprox: 1}),
        ]
        assert [dict(flat(row.config)).get(MU) for row in rows] == [None, 0.1, 1]

    @pytest.mark.long
    def test_are_multiplied(self, plan):
        settings = {MU: [0.1, 1], "model.local_epochs": [1, 2]}
        rows = plan.rows(methods_of(["fedprox", "fedavg"]), settings)
        assert [row.method.name for row in rows] == ["fedprox"] * 4 + ["fedavg"] * 2
        assert len({row.key for row in rows}) == len({row.folder for row in rows}) == 6

    def test_with_one_value_are_of_all_rows_and_tell_none_apart(self, plan):
        (row,) = plan.rows(methods_of(["fedavg"]), {"model.local_epochs": [3]})
        assert row.settings == {}
        assert dict(flat(row.config))["model.local_epochs"] == 3

    def test_that_are_equal_are_one_row(self, plan):
        assert len(plan.rows(methods_of(["fedavg"]), {"model.local_epochs": [1, 1]})) == 1

    def test_may_be_classes(self, plan):
        told = values_of(["data.partition={class_path: Dirichlet, init_args: {alpha: 0.3}}"])
        fixed, varied = of_data(told)
        assert not varied
        with_partition = Plan(list(map(str, plan.configs)), fixed)
        assert with_partition.data["init_args"]["partition"]["init_args"]["alpha"] == 0.3
        assert plan.data != with_partition.data

    @pytest.mark.short(
        "model.local_epoch-*", "seed_everything-*", "trainer.default_root_dir-*", "ckpt_path-*"
    )
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("trainer.callbacks.nu", 1, "--set trainer.callbacks.nu: no method has it: there is"),
            ("model.local_epoch", 1, "did you mean model.local_epochs"),
            ("model.local_epochs", "many", "model.local_epochs: expected a whole number, got many"),
            ("seed_everything", 3, "--set seed_everything: a comparison gives each run its own"),
            ("trainer.default_root_dir", "x", "gives each run its own"),
            ("ckpt_path", "x", "gives each run its own"),
        ],
    )
    def test_that_are_wrong(self, plan, name, value, message):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            plan.rows(methods_of(["fedavg", "fedprox"]), {name: [value]})

    def test_of_the_data_have_one_value(self):
        assert of_data({"data.num_clients": [8], MU: [1, 2]}) == (
            ["--data.num_clients=8"],
            {MU: [1, 2]},
        )
        with pytest.raises(ConfigurationError, match="on the same data: give one value"):
            of_data({"data.num_clients": [8, 9]})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,5", [1, 5]),
        ("--a=1e-3, 0.1", [0.001, 0.1]),
        ("a=[1,2],[3]", [[1, 2], [3]]),
        ("a={b: 1, c: [2, 3]},null", [{"b": 1, "c": [2, 3]}, None]),
        ("a='1,5',x=y", ["1,5", "x=y"]),
        ('a="[",b', ["[", "b"]),
    ],
)
def test_values(text, values):
    assert values_of([text]) == {"a": values}


@pytest.mark.parametrize("text", ["a=[1", "a={b: [}", "a=!!python/x 1"])
def test_values_that_are_none(text):
    with pytest.raises(ConfigurationError, match=r"--set a=.*: a value is not YAML"):
        values_of([text])


def test_an_option_comes_once():
    with pytest.raises(ConfigurationError, match="--set has a twice"):
        values_of(["a=1", "b=1", "a=2"])


class TestKey:
    def test_comments_order_and_spelled_out_defaults_do_not_count(self, plan, tmp_path):
        parts = DATA.split("model:")
        text = f"# A comment.\nmodel:{parts[1]}{parts[0]}seed_everything: 7\n"
        text = text.replace("max_epochs: 3", "default_root_dir: there, max_epochs: 3")
        other = Plan([data_config(tmp_path, text.replace("lr: 0.1", "lr: 1e-1, momentum: 0"))])
        (one,), (two,) = rows_of(plan, "fedavg"), rows_of(other, "fedavg")
        assert one.key == two.key

    @pytest.mark.short("lr: *", "max_epochs: *")
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("batch_size: 20", "batch_size: 21"),
            ("hidden: [4]", "hidden: [5]"),
            ("lr: 0.1", "lr: 0.1, nesterov: false, dampening: 0.5"),
            ("max_epochs: 3", "max_epochs: 4"),
            ("accelerator: cpu", "accelerator: cpu, precision: 64"),
            ("trainer:", "monitor: val/macro_f1\nmode: max\ntrainer:"),
        ],
    )
    def test_every_option_counts(self, plan, tmp_path, old, new):
        other = Plan([data_config(tmp_path, DATA.replace(old, new))])
        (one,), (two,) = rows_of(plan, "fedavg"), rows_of(other, "fedavg")
        assert one.key != two.key

    def test_names_of_folders_are_safe_and_short(self, plan):
        values = ["a/../b", "x" * 300, "é \n*?"]
        rows = plan.rows(methods_of(["fedavg"]), {})
        (row,) = rows
        for value in values:
            settings = {"trainer.logger": value}
            folder = type(row)(row.method, settings, {}, [], row.config).folder
            assert Path(folder).name == folder
            assert len(folder) < 120
            assert re.fullmatch(r"fedavg,logger=[\w.=+-]*-[0-9a-f]{8}", folder)


class TestMethods:
    def test_by_name_and_by_file(self, tmp_path):
        own = method_config(tmp_path, "mine", "{class_path: FedProx}", "Mine, but better: it is.")
        shipped, mine = methods_of(["fedavg", own])
        assert (shipped.name, shipped.title) == ("fedavg", "FedAvg")
        assert (mine.name, mine.title) == ("mine", "Mine, but better")
        assert "model.client.optimizer.lr" in shipped.space
        assert mine.space == {}

    def test_named_twice_is_one(self):
        assert len(methods_of(["fedavg", "fedavg"])) == 1

    def test_a_copy_with_the_title_of_another_has_its_own_name(self, tmp_path):
        copy = tmp_path / "mine.yaml"
        copy.write_text(Path(config_file("configs/algorithm/local.yaml")).read_text())
        assert [method.title for method in methods_of([str(copy), "local"])] == ["mine", "Local"]
        assert [method.title for method in methods_of([str(copy)])] == ["Local"]
        titles = [method.title for method in methods_of([str(copy), "all"])]
        assert titles[0] == "mine"
        assert "Local" in titles

    def test_with_the_same_options_are_two_rows(self, plan, tmp_path):
        own = method_config(tmp_path, "mine", "{class_path: FedAvg}")
        one, other = rows_of(plan, "fedavg", own)
        assert one.config == other.config
        assert one.key != other.key

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["fedavgs"], "there is no method 'fedavgs': did you mean fedavg?"),
            (["mine.yaml"], "there is no config file 'mine.yaml'"),
            (["."], "there is no method '.'"),
            ([""], "there is no method ''"),
        ],
    )
    def test_that_do_not_exist(self, names, message):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            methods_of(names)

    def test_of_one_name(self, tmp_path):
        own = method_config(tmp_path, "fedavg", "{class_path: FedAvg}")
        with pytest.raises(ConfigurationError, match=r"two methods are called fedavg: .*rename"):
            methods_of(["fedavg", own])

    def test_with_a_search_space_that_is_none(self, tmp_path):
        own = tmp_path / "mine.yaml"
        own.write_text("search_space: [1, 2]\n")
        with pytest.raises(ConfigurationError, match="search_space must have a range for each"):
            methods_of([str(own)])

    def test_a_wrong_option_in_the_file_is_named(self, plan, tmp_path):
        own = method_config(tmp_path, "mine", "{class_path: FedProx, init_args: {nu: 1}}")
        with pytest.raises(UnknownOptionError, match="nu"):
            rows_of(plan, own)


class TestConfiguration:
    def test_leaves_the_method_to_methods(self, tmp_path):
        text = DATA.replace("{max_epochs: 3", "{callbacks: [{class_path: Ditto}], max_epochs: 3")
        with pytest.raises(ConfigurationError, match=r"leaves the method to --methods.* has Ditto"):
            Plan([data_config(tmp_path, text)])

    def test_has_data(self, tmp_path):
        text = "model:" + DATA.partition("model:")[2]
        with pytest.raises(ConfigurationError, match="data"):
            Plan([data_config(tmp_path, text)])

    def test_exists(self, tmp_path):
        with pytest.raises(ConfigurationError, match="there is no config file"):
            Plan([str(tmp_path / "nothing.yaml")])
        with pytest.raises(ConfigurationError, match="give --config"):
            Plan([])
