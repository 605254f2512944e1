"""A grid without a network: Flower's own messages go to the real ClientApp in this process, node after node."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedtailor.flower.apps import client

Spoil = Callable[[Message], Message | None]


class LoopbackGrid:
    """Nodes by their numbers, each with its ``--node-config``; ``spoil`` may change or swallow what a node answers."""

    def __init__(
        self, config: str, nodes: dict[int, dict[str, Any]], spoil: dict[int, Spoil] | None = None
    ) -> None:
        self.config, self.nodes, self.spoil = config, nodes, spoil or {}
        # As its own processes do at their start.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.replies: dict[str, Message] = {}
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self.sent.append(message)
            node = message.metadata.dst_node_id
            reply = self.delivered(message, node)
            changed = self.spoil[node](reply) if node in self.spoil else reply
            if changed is not None:
                self.replies[number] = changed
        return numbers

    def delivered(self, message: Message, node: int) -> Message:
        """What a node answers."""
        context = Context(
            run_id=1, node_id=node, node_config=self.nodes[node], state=RecordDict(),
            run_config={"config": self.config},
        )  # fmt: skip
        return client(message, context)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]
