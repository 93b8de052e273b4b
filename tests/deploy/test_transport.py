"""What Flower carries, and how its failures are met."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from pflight.deploy.flower import GridPost
from pflight.deploy.messages import numbers_of, packed
from pflight.deploy.remote import Asked


class Flower:
    """A grid and its runtime, where nodes answer some seconds after they were asked.

    Args:
        delays: After which seconds each client's answer comes.
        halves: The clients whose answer never comes as a whole.
        pull: Seconds that it takes to pull a part of an answer.
    """

    node = Node(node_id=1)
    run = SimpleNamespace(run_id=1)

    def __init__(
        self, delays: dict[int, float], halves: Iterable[int] = (), pull: float = 0.0
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.delays, self.halves, self.pull = delays, {*halves}, pull
        self.parts: dict[str, bytes] = {}
        self._runtime_client = SimpleNamespace(
            PullMessages=self.pull_answers,
            PullObject=self.pull_part,
            ConfirmMessageReceived=lambda request: None,
        )
        self._answers: dict[str, tuple[float, Message]] = {}

    def post(self, timeout: float) -> GridPost:
        """Return what carries messages to the nodes."""
        post = GridPost(self, timeout, patience=1.0)  # type: ignore[arg-type]
        post.keys = {client: bytes([client]) for client in self.delays}
        return post

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=10 + i, public_key=bytes([i])) for i in self.delays]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = id_ = message.object_id
            client = message.metadata.dst_node_id - 10
            answer = Message(packed({}, {"client": client}), reply_to=message)
            answer.metadata.__dict__["_message_id"] = answer.object_id
            self._answers[id_] = time.monotonic() + self.delays[client], answer
        return [message.metadata.message_id for message in messages]

    def pull_answers(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        response = PullAppMessagesResponse()
        for id_ in request.message_ids:
            if self._answers[id_][0] > time.monotonic():
                continue
            answer = self._answers.pop(id_)[1]
            parts = get_all_nested_objects(answer)
            self.parts |= {name: part.deflate() for name, part in parts.items()}
            if answer.metadata.src_node_id - 10 in self.halves:
                self.parts[answer.object_id] = b""
            response.message_object_trees.append(get_object_tree(answer))
            response.messages_list.append(message_to_proto(remove_content_from_message(answer)))
        return response

    def pull_part(self, request: PullObjectRequest) -> PullObjectResponse:
        time.sleep(self.pull)
        content = self.parts[request.object_id]
        return PullObjectResponse(
            object_found=True, object_available=content != b"", object_content=content
        )


def answers(post: GridPost, clients: Iterable[int]) -> list[Any]:
    """Ask all clients, and return which have answered, or why not."""
    post.send(Asked(client, "train", 0, packed()) for client in clients)
    received = (post.receive(client) for client in clients)
    return [one if isinstance(one, str) else numbers_of(one)["client"] for one in received]


LATE = "its node did not answer within 0.5 s"


@pytest.mark.parametrize("halves", [(), (0,)], ids=["slow", "half an answer"])
def test_who_has_answered_counts_whoever_else_is_slow(halves: tuple[int, ...]) -> None:
    """Two are asked after the one that took all the time, and what they sent takes time itself."""
    flower = Flower({0: 0.1 if halves else 60.0, 1: 0.0, 2: 0.2}, halves, pull=0.1)
    begun = time.monotonic()
    assert answers(flower.post(timeout=0.5), [0, 1, 2]) == [LATE, 1, 2]
    assert time.monotonic() - begun < 5
