"""What can be wrong before anything starts is said in one line."""

from __future__ import annotations

import re
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pflight import Federation
from pflight.__main__ import main
from pflight.callbacks import FedAvg
from pflight.data.loaders import Split
from pflight.datamodules import FederatedDataModule
from pflight.deploy.certificates import (
    check_server,
    keys_in,
    make_certificates,
    make_key,
    write_private,
)
from pflight.deploy.client import NodeCLI, supernode
from pflight.deploy.node import Node
from pflight.deploy.processes import Process, ProcessEndedError, free_port
from pflight.errors import ConfigurationError
from tests.runs import linear_client

QUICKSTART = "configs/quickstart.yaml"


def deploy(*arguments: object) -> None:
    main(["deploy", *map(str, arguments)])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what returns the one line that a command ends with."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            deploy(*arguments)
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("pflight: error: ")

    return run


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    folder = tmp_path / "certificates"
    deploy("certificates", folder, "--host", "127.0.0.1")
    make_key(tmp_path / "node.key").rename(folder / "nodes" / "node.pub")
    return folder


@contextmanager
def answering(certificates: Path) -> Iterator[str]:
    """Answer TLS connections; yield the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            try:
                context.wrap_socket(plain.accept()[0], server_side=True).close()
            except OSError:  # who does not trust it hangs up
                return

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{plain.getsockname()[1]}"
        thread.join(10)


def test_certificates_are_trusted_and_renewed(certificates: Path, tmp_path: Path) -> None:
    with answering(certificates) as address:
        assert check_server(address, certificates / "ca.pem")
    root = (certificates / "ca.pem").read_bytes()
    before = (certificates / "server.pem").read_bytes()
    deploy("certificates", certificates, "--host", "127.0.0.1")
    assert (certificates / "ca.pem").read_bytes() == root
    assert (certificates / "server.pem").read_bytes() != before
    with answering(certificates) as address:
        assert check_server(address, certificates / "ca.pem")
    for private in ("ca.key", "server.key"):
        assert stat.S_IMODE((certificates / private).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "node.key").stat().st_mode) == 0o600


def test_a_server_that_is_not_trusted(certificates: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_certificates(other, ["127.0.0.1"])
    with (
        answering(other) as address,
        pytest.raises(ConfigurationError, match=r"can't be trusted: .*ca\.pem"),
    ):
        check_server(address, certificates / "ca.pem")
    make_certificates(certificates, ["127.0.0.1"], days=-1)
    with (
        answering(certificates) as address,
        pytest.raises(ConfigurationError, match="certificate has expired"),
    ):
        check_server(address, certificates / "ca.pem")


@pytest.mark.long
def test_a_supernode_whose_port_was_taken_meanwhile_ends(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of a machine may be given the same free port; a node starts one that ends anew."""
    other = tmp_path / "other"
    make_certificates(other, ["127.0.0.1"])
    write_private(other / "secret", b"0" * 64)
    there = tmp_path, "localhost:1", other / "ca.pem", tmp_path / "node.key", other
    with answering(certificates) as address:
        port = int(address.rpartition(":")[2])
        monkeypatch.setattr("pflight.deploy.client.free_port", lambda: port)
        with pytest.raises(ProcessEndedError, match="API failed to start"), supernode(*there):
            pass


def test_nobody_is_at_an_address(certificates: Path) -> None:
    assert not check_server(f"127.0.0.1:{free_port()}", certificates / "ca.pem")


def test_a_port_that_is_taken(certificates: Path, refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = "--host=127.0.0.1", f"--port={taken.getsockname()[1]}"
        said = refused("server", "--certificates", certificates, *where, "--config", QUICKSTART)
    assert said.startswith(f"the server can't listen at 127.0.0.1:{where[1][7:]}")
    assert not (certificates / "superlink").exists()


def test_certificates_that_are_missing(
    certificates: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    said = refused("server", "--certificates", tmp_path, "--config", QUICKSTART)
    assert re.search(r"no .*ca\.pem: make it with pflight deploy certificates", said)
    (certificates / "ca.key").unlink()
    assert "has no ca.key: put it back" in refused("certificates", certificates)


@pytest.mark.parametrize("name", ["server.pem", "server.key", "ca.pem"])
def test_certificates_that_can_not_be_used(
    name: str, certificates: Path, refused: Callable[..., str]
) -> None:
    (certificates / name).write_text("garbage")
    assert name in refused("server", "--certificates", certificates, "--config", QUICKSTART)
    made = certificates if name == "ca.pem" else certificates / name
    assert name in refused("certificates", made)


def test_keys_that_can_not_be_used(
    certificates: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    nodes = certificates / "nodes"
    assert "a node keeps its key" in refused("certificates", tmp_path, "--key", "node")
    (nodes / "again.pub").write_bytes((nodes / "node.pub").read_bytes())
    with pytest.raises(ConfigurationError, match=r"again\.pub and node\.pub in .* the same key"):
        keys_in(nodes)
    (nodes / "again.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(ConfigurationError, match=r"again\.pub is not the public key of a node"):
        keys_in(nodes)
    with pytest.raises(ConfigurationError, match="no node's public key"):
        keys_in(tmp_path / "empty")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("server", "localhost", "localhost is no HOST:PORT"),
        ("server", "::1:9092", "is no HOST:PORT"),
        ("server", "localhost:99999", "99999 is no port"),
        ("server", "[::1]:many", "many is no port"),
        ("server", "no.such.host.invalid:1", "the host no.such.host.invalid can't be found"),
        ("ca", "none", "none is not the server's ca.pem: No such file"),
        ("ca", "garbage", "garbage is not the server's ca.pem: it has no certificate"),
        ("ca", ".", "is not the server's ca.pem: Is a directory"),
        ("key", "none", "none is not the private key of a node"),
        ("key", "garbage", "garbage is not the private key of a node"),
        ("folder", "garbage", "garbage is no folder to write to"),
        ("folder", "garbage/state", "state is no folder to write to"),
        ("client", "one", "invalid int value: 'one'"),
        ("clinet", "1", "there is no option clinet: did you mean client"),
    ],
)
def test_a_client_that_can_not_start(
    option: str,
    value: str,
    said: str,
    certificates: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_text("garbage")
    ca, key = certificates / "ca.pem", tmp_path / "node.key"
    given = {"server": "localhost:1", "ca": ca, "key": key, "folder": tmp_path / "state"}
    pairs = ((f"--{name}", whose) for name, whose in {**given, option: value}.items())
    assert said in refused("client", *chain(*pairs))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("server --round-timeout -1", "-1 is no positive number"),
        ("server --round-timeout nan", "nan is no positive number"),
        ("server --patience 0", "0 is no positive number"),
        ("server --places 0", "0 is no positive number"),
        ("server --port 0", "0 is no port: give a number from 1 to 65535"),
        ("server --host 192.0.2.7", "give an address of this machine as --host"),
        ("server --host no.such.host.invalid", "give an address of this machine as --host"),
        ("server --max-share 2", "2 is no share"),
        ("server --max-samples 0", "0 is no positive number"),
        ("certificates keys --key ../../x", "../../x is no name of a key"),
        ("certificates keys --key .hidden", ".hidden is no name of a key"),
        ("demo --nodes 0", "0 is no positive number"),
        ("demo --nods 2", "there is no option nods: did you mean nodes?"),
    ],
)
def test_options_that_can_not_be(
    given: str, said: str, certificates: Path, refused: Callable[..., str]
) -> None:
    command, *options = given.split()
    where = ("--certificates", certificates) if command == "server" else ()
    assert said in refused(command, *where, *options)


def test_certificates_for_a_host_that_is_none(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Nothing is made, of an authority either."""
    folder = tmp_path / "made"
    said = refused("certificates", folder, "--host", "bad!host")
    assert "--host: no server has such a name" in said
    assert not folder.exists()


@pytest.mark.parametrize("option", ["num_clusters=auto", "matching=bbp_map"])
def test_a_method_that_can_not_be_deployed(
    option: str, certificates: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """It is said before anything is started."""
    where = "--certificates", certificates, f"--port={free_port()}", "--config", QUICKSTART
    root = "--trainer.default_root_dir", tmp_path / "run"
    said = refused("server", *where, *root, f"--trainer.callbacks.{option}")
    assert option.split("=")[0] in said
    assert not (certificates / "superlink").exists()


def test_a_client_whose_options_are_wrong(
    certificates: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    where = "--server", "localhost:1", "--ca", certificates / "ca.pem"
    own = "--key", tmp_path / "node.key", "--folder", tmp_path / "state", "--config", QUICKSTART
    said = refused("client", *where, *own, "--trainer.max_epochs", "many")
    assert "max_epochs" in said
    own = "--key", certificates / "nodes" / "node.pub", "--folder", tmp_path / "state"
    assert "node.pub is not the private key of a node" in refused("client", *where, *own)


def test_data_that_do_not_fit_the_model(tmp_path: Path) -> None:
    network = "--model.client.init_args.network.init_args.in_features=63"
    with pytest.raises(ConfigurationError, match="can't take the data's samples of shape"):
        NodeCLI(["fit", "--config", QUICKSTART, network], tmp_path, 0)
    with pytest.raises(ConfigurationError, match="unknown client 20: the ids are 0 to 19"):
        NodeCLI(["fit", "--config", QUICKSTART], tmp_path, 20)


class OwnSamples(FederatedDataModule):
    """Samples of a node, which may be wrong.

    Args:
        wrong: What is.
    """

    def __init__(self, wrong: str) -> None:
        super().__init__(num_classes=3, batch_size=4)
        self.num_clients, self.wrong = 1, wrong

    def setup(self, stage: str | None = None) -> None:
        if self.wrong == "missing":
            Path("no.csv").read_text()
        super().setup(stage)

    def samples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        x, y = torch.ones(9, 4), torch.arange(9) % 3
        if (self.wrong, split) == ("infinite", "train"):
            x[7] = torch.inf
        if self.wrong == split:
            y[7] = 3
        return x, y


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("missing", r"OwnSamples can't be set up: FileNotFoundError: .* 'no\.csv'"),
        ("infinite", "train samples of client 0 can't be used: its result is NaN or infinite"),
        ("train", "train samples of client 0 can't be used: .* labels go from 0 to 3"),
        ("val", "val samples of client 0 can't be used: .* labels go from 0 to 3"),
        ("test", "test samples of client 0 can't be used: .* labels go from 0 to 3"),
    ],
)
def test_data_are_tried_before_a_node_connects(wrong: str, said: str, tmp_path: Path) -> None:
    def start(wrong: str) -> None:
        federation, how = Federation(linear_client()), {"accelerator": "cpu"}
        Node(federation, FedAvg(), OwnSamples(wrong), tmp_path, how).check_samples()

    start("")
    with pytest.raises(ConfigurationError, match=said):
        start(wrong)


def test_flower_is_an_extra(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setattr("pflight.deploy.command.find_spec", lambda name: None)
    assert "pip install 'pflight[flower]'" in refused("demo")


END = """
print("\x1b[91mERROR [0m:     Exit Code: 305\\nFailed to activate SuperNode.\\n")
print("For more information, visit: <https://flower.ai>\\nINFO:     Shutting down")
print("ERROR:    Cancel 1 running task(s), timeout graceful shutdown exceeded")
raise ValueError("of no interest")
"""


def test_the_end_of_a_process_is_told_in_one_line(tmp_path: Path) -> None:
    """The reason stands before what Flower and its server write as they end."""
    process = Process([sys.executable, "-c", END], tmp_path, "supernode")
    process._process.wait()
    with pytest.raises(ProcessEndedError, match="Failed to activate SuperNode") as told:
        process.check()
    assert not re.search(r"Traceback|File|For more|INFO|\n|\x1b", str(told.value))
