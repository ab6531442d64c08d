"""A Flower grid without a network: each request is answered immediately, in this process."""

from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsift.flower.protocol import RECORD, TrainRequest


@dataclass
class InlineNode:
    app: object
    partition: int
    partitions: int
    is_online: bool = True
    kinds: list = field(default_factory=list)
    requests: list = field(default_factory=list)


class InlineGrid(Grid):
    """Hands messages to the apps of its nodes. Nodes in ``silent`` never reply."""

    def __init__(self, nodes, run_config=None):
        self.run_config = run_config or {}
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.nodes = dict(enumerate(nodes, start=100))
        self.replies, self.count, self.silent = {}, 0, set()

    def get_node_ids(self):
        return [n for n, node in self.nodes.items() if node.is_online]

    def push_messages(self, messages):
        return [self.push(message) for message in messages]

    def push(self, message):
        self.count += 1
        name, node_id = str(self.count), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = name
        if node_id not in self.silent:
            self.replies[name] = self.answer(self.nodes[node_id], node_id, message)
        return name

    def answer(self, node, node_id, message):
        if RECORD in message.content.config_records:
            node.kinds.append(TrainRequest.from_records(message.content).kind)
        node.requests.append(message)
        config = {"partition-id": node.partition, "num-partitions": node.partitions}
        config = {} if node.partition is None else config
        context = Context(1, node_id, config, RecordDict(), self.run_config)
        try:
            return node.app(message, context)
        except Exception as problem:
            return Message(Error(2, str(problem)), reply_to=message)

    def pull_messages(self, ids):
        return [self.replies.pop(id) for id in ids if id in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError
