"""A Flower user's own app: stock train and evaluate functions, with the mod ``sifted``."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from inline import InlineGrid, InlineNode
from torch import nn

import fedsift
from fedsift import algorithms
from fedsift.errors import TooFewClients
from fedsift.flower import FedSift, arrays_of, client_app, exchange, optimizer_for, sifted
from fedsift.flower.evaluation import weighted_mean
from fedsift.vector import Layout

CLIENTS = 4
SIZES = (10, 20, 30, 40)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.0)


class Net(nn.Module):
    """A model with running statistics and a frozen parameter, which a state_dict contains."""

    has_frozen_bias = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.first.bias.requires_grad_(not self.has_frozen_bias)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def load_data(partition):
    x = torch.randn(SIZES[partition], 6, generator=torch.Generator().manual_seed(partition))
    return x, x[:, :3].argmax(1)


def take_steps(model, optimizer, x, y, steps=3):
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def stock_app(mods=(), make_optimizer=None):
    """Return an app as Flower's users write it; it notes what it was called with."""
    app, calls = ClientApp(mods=list(mods)), []
    make_optimizer = make_optimizer or (lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9))

    @app.train()
    def train(msg, context):
        model, (x, y) = Net(), load_data(context.node_config["partition-id"])
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        calls.append(("train", dict(msg.content["config"])))
        loss = take_steps(model, make_optimizer(model), x, y)
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(x)})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        model, (x, y) = Net(), load_data(context.node_config["partition-id"])
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        calls.append(("evaluate", dict(msg.content["config"])))
        model.eval()
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        first = float(model.first.weight.detach().sum())
        metrics = MetricRecord({"eval_acc": accuracy, "w": first, "num-examples": len(x)})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    app.calls = calls
    return app


@dataclass
class Place:
    path: Path

    def grid(self, algorithm, clients=CLIENTS, make_optimizer=None, **options):
        mod = sifted(algorithm, state_dir=self.path / "state", **options)
        app = stock_app([mod], make_optimizer)
        return InlineGrid(InlineNode(app, n, clients) for n in range(clients))

    def strategy(self, algorithm, clients=CLIENTS, **options):
        return FedSift(algorithm, clients, self.path / "run", **{"wait": 0.1, **options})

    def history(self):
        lines = (self.path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def start(strategy, grid, rounds, **options):
    return strategy.start(grid, ArrayRecord(Net().state_dict()), rounds, 60.0, **options)


def test_a_stock_app_ends_where_flowers_fedavg_ends(place):
    """Weights, running statistics, counts of batches, and the weighted metrics of both sides."""
    grid = InlineGrid(InlineNode(stock_app(), n, CLIENTS) for n in range(CLIENTS))
    theirs = FedAvg(min_available_nodes=CLIENTS).start(
        grid, ArrayRecord(Net().state_dict()), num_rounds=3
    )
    algorithm = algorithms.fedavg()
    ours = start(place.strategy(algorithm), place.grid(algorithm), 3)
    expected = theirs.arrays.to_torch_state_dict()
    found = ours.arrays.to_torch_state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name].float(), x.float(), rtol=1e-5, atol=1e-6)
        assert found[name].dtype == Net().state_dict()[name].dtype
    for round in (1, 2, 3):
        evaluated = ours.evaluate_metrics_clientapp[round]
        assert dict(evaluated) == pytest.approx(dict(theirs.evaluate_metrics_clientapp[round]))
        trained, wanted = (r.train_metrics_clientapp[round]["train_loss"] for r in (ours, theirs))
        assert trained == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "algorithm",
    [algorithms.compressed(algorithms.fedavg(momentum=0.9), density=0.1),
     algorithms.sparse_fedsgd(density=0.1), algorithms.fedopt()],
    ids=str,
)  # fmt: skip
def test_methods_that_only_need_delta_w_work_with_any_optimizer(algorithm, buffers, place):
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    grid = place.grid(algorithm, make_optimizer=make, buffers=buffers)
    start(strategy := place.strategy(algorithm, buffers=buffers), grid, 3)
    assert [record["clients"] for record in place.history()] == [CLIENTS] * 3
    assert not any(record["problems"] for record in place.history())
    w = strategy.run.snapshot.state.w
    assert not torch.equal(w, strategy.run.federation.task.layout.flatten(Net().state_dict()))


ADAM = [
    algorithms.fedadam_ssm(density=0.2, local_steps=3, lr=0.01),
    algorithms.fedadam(local_steps=3, lr=0.01),
    algorithms.sift(density=0.2, local_steps=3, lr=0.01, clip=0.5),
]


@pytest.mark.parametrize("algorithm", ADAM, ids=lambda x: x.name)
def test_methods_with_moments_get_them_from_the_optimizer_of_the_round(
    algorithm, place, monkeypatch
):
    """The app's own loop of whole batches gives the state of the method's own steps."""
    monkeypatch.setattr(Net, "has_frozen_bias", False)  # d does not count frozen parameters
    grid = place.grid(algorithm, make_optimizer=optimizer_for)
    strategy = place.strategy(algorithm, batch_size=None, weights="examples")
    strategy.start(grid, ArrayRecord(Net().state_dict()), 3, 60.0)
    clients = [load_data(n) for n in range(CLIENTS)]
    result = fedsift.simulate(
        Net(), clients, algorithm=algorithm, rounds=3, batch_size=None, weights="examples"
    )
    model = Net()
    model.load_state_dict(strategy.run.result.arrays.to_torch_state_dict())
    expected = Net()
    result.load_into(expected)
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], x, rtol=1e-4, atol=1e-6)


def test_methods_with_moments_ask_for_their_optimizer(place):
    algorithm = algorithms.fedadam_ssm(density=0.2)
    with pytest.raises(TooFewClients, match=r"make the optimizer with .*optimizer_for\(model\)"):
        start(place.strategy(algorithm), place.grid(algorithm), 1)


@pytest.mark.parametrize(
    "algorithm", [algorithms.fedprox(), algorithms.scaffold(), algorithms.efficient_adam()], ids=str
)
def test_methods_with_steps_of_their_own_are_refused_with_advice(algorithm, place):
    with pytest.raises(TooFewClients, match=r"local steps of its own in round 1.*client_app"):
        start(place.strategy(algorithm), place.grid(algorithm), 1)


def test_the_optimizer_of_the_round_belongs_to_a_round():
    with pytest.raises(RuntimeError, match="call it in the train function"):
        optimizer_for(Net())


def test_the_optimizer_of_the_round_is_refused_without_moments(place):
    algorithm = algorithms.fedavg()
    grid = place.grid(algorithm, make_optimizer=optimizer_for)
    with pytest.raises(TooFewClients, match="fedavg has no moments: use any optimizer"):
        start(place.strategy(algorithm), grid, 1)


def test_configurations_reach_the_functions_with_the_round(place):
    algorithm = algorithms.fedavg()
    grid = place.grid(algorithm, clients=1)
    strategy = place.strategy(algorithm, clients=1)
    train, evaluate = ConfigRecord({"lr": 0.1}), ConfigRecord({"verbose": True})
    start(strategy, grid, 2, train_config=train, evaluate_config=evaluate)
    assert grid.nodes[100].app.calls == [
        ("train", {"lr": 0.1, "server-round": 1}),
        ("evaluate", {"verbose": True, "server-round": 1}),
        ("train", {"lr": 0.1, "server-round": 2}),
        ("evaluate", {"verbose": True, "server-round": 2}),
    ]
    assert (dict(train), dict(evaluate)) == ({"lr": 0.1}, {"verbose": True})


def test_clients_evaluate_the_model_of_the_round_and_receive_it_once(place):
    """They receive the changes with the request to evaluate, and the next one carries none."""
    algorithm = algorithms.compressed(algorithms.fedavg(), density=0.1)
    grid, strategy = place.grid(algorithm), place.strategy(algorithm)
    result = start(strategy, grid, 2)
    assert [node.kinds for node in grid.nodes.values()] == [
        ["full", "delta", "none", "delta"]
    ] * CLIENTS
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    last = place.history()[-1]["evaluation"]
    assert last["clients"] == CLIENTS
    assert last["metrics"]["w"] == pytest.approx(float(model.first.weight.detach().sum()))
    assert result.evaluate_metrics_clientapp[2]["w"] == last["metrics"]["w"]
    report = (place.path / "run" / "report.html").read_text(encoding="utf-8")
    assert "eval_acc, clients\\u0027 mean" in report or "eval_acc, clients' mean" in report


def test_a_continued_run_returns_the_metrics_of_all_rounds(place, caplog):
    caplog.set_level(logging.INFO, "flwr")
    algorithm, grid = algorithms.fedavg(), place.grid(algorithms.fedavg())

    def evaluate(round, arrays):
        own = {"mine": 1.0, "not finite": float("inf"), "list": [1.0], "seconds": -1.0}
        return MetricRecord({"accuracy": 0.5 + round / 10, **own})

    first = start(place.strategy(algorithm), grid, 2, evaluate_fn=evaluate)
    again = start(place.strategy(algorithm), grid, 2, evaluate_fn=evaluate)
    assert "finished: to train again, choose another folder" in caplog.text
    assert again.evaluate_metrics_clientapp == first.evaluate_metrics_clientapp
    assert [dict(again.evaluate_metrics_serverapp[n]) for n in (1, 2)] == [
        {"accuracy": 0.6, "mine": 1.0}, {"accuracy": 0.7, "mine": 1.0}
    ]  # fmt: skip
    assert "mine" not in again.train_metrics_clientapp[2]
    record = place.history()[1]
    assert (record["mine"], record["not finite"], "list" in record) == (1.0, None, False)
    assert record["seconds"] >= 0
    assert "mine" in (place.path / "run" / "report.html").read_text(encoding="utf-8")
    assert again.train_metrics_clientapp[2]["clients"] == CLIENTS


def test_clients_evaluate_the_average_of_sift(place):
    algorithm = algorithms.sift(density=0.2, average=0.9)
    grid = place.grid(algorithm, make_optimizer=optimizer_for)
    result = start(strategy := place.strategy(algorithm), grid, 3)
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    found = place.history()[-1]["evaluation"]["metrics"]["w"]
    assert found == pytest.approx(float(model.first.weight.detach().sum()))
    layout = strategy.run.federation.task.layout
    state = layout.unflatten(strategy.run.snapshot.state.w)
    assert found != pytest.approx(float(state["first.weight"].sum()), rel=1e-3)


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 4), (0.75, 3), (0.1, 2), (0.0, 0)])
def test_a_fraction_of_the_clients_evaluates(fraction, number, place):
    algorithm = algorithms.fedavg()
    strategy = place.strategy(algorithm, fraction_evaluate=fraction)
    result = start(strategy, grid := place.grid(algorithm), 2)
    evaluated = [call for call in grid.nodes[100].app.calls if call[0] == "evaluate"]
    assert len(evaluated) == 2 * number
    assert (2 in result.evaluate_metrics_clientapp) == (number > 0)
    assert ("evaluation" in place.history()[0]) == (number > 0)


def test_a_client_that_cannot_evaluate_is_named_and_left_out(place):
    algorithm = algorithms.fedavg()
    grid = place.grid(algorithm)
    honest = grid.answer

    def answer(node, node_id, message):
        reply = honest(node, node_id, message)
        if message.metadata.message_type == "evaluate" and node_id in (100, 101):
            claim = {100: -1.0, 101: 1e9}[node_id]
            metrics = MetricRecord({"w": 1e300, "num-examples": claim, "train_loss": 0.0})
            reply.content["metrics"] = metrics
        elif message.metadata.message_type == "evaluate" and node_id == 102:
            return Message(RecordDict(), reply_to=message)
        return reply

    grid.answer = answer
    result = start(place.strategy(algorithm), grid, 1)
    evaluation = place.history()[0]["evaluation"]
    assert (evaluation["clients"], evaluation["metrics"].keys()) == (1, {"eval_acc", "w"})
    assert "must be positive and at most 1000000" in evaluation["problems"]["0"]
    assert "is 1000000000.0" in evaluation["problems"]["1"]
    assert "lacks" in evaluation["problems"]["2"]
    assert abs(result.evaluate_metrics_clientapp[1]["w"]) < 100


def test_an_app_without_an_evaluate_function_trains(place):
    algorithm = algorithms.fedavg()
    grid = place.grid(algorithm, clients=1)
    del grid.nodes[100].app._registered_funcs["evaluate.default"]
    result = start(place.strategy(algorithm, clients=1), grid, 2)
    assert result.evaluate_metrics_clientapp == {}
    evaluation = place.history()[-1]["evaluation"]
    assert "No evaluate function registered" in evaluation["problems"]["0"]
    assert place.history()[-1]["clients"] == 1


def test_the_key_of_the_weights_can_be_chosen(place):
    algorithm = algorithms.fedadam_ssm(density=0.2, lr=0.01)
    grid = place.grid(algorithm, make_optimizer=optimizer_for)
    start(strategy := place.strategy(algorithm, weighted_by_key="num-examples"), grid, 1)
    assert strategy.run.federation.weighting == "examples"
    with pytest.raises(ValueError, match="weighted_by_key contradicts weights='equal'"):
        place.strategy(algorithm, weighted_by_key="n", weights="equal")
    with pytest.raises(TooFewClients, match="MetricRecord with a positive 'size'"):
        FedSift(algorithm, 4, place.path / "other", wait=0.1, weighted_by_key="size").start(
            grid, ArrayRecord(Net().state_dict()), 1, 60.0
        )


def test_at_least_min_train_nodes_train_and_min_available_nodes_are_waited_for(place):
    algorithm = algorithms.fedavg()
    strategy = place.strategy(algorithm, fraction_train=0.25, min_train_nodes=3)
    start(strategy, place.grid(algorithm), 1)
    assert place.history()[0]["clients"] == 3
    for other in ({"fraction_train": 0.5}, {"min_train_nodes": 2}):
        with pytest.raises(ValueError, match="participation excludes fraction_train"):
            place.strategy(algorithm, participation=0.5, **other)
    grid = place.grid(algorithm)
    grid.nodes[103].is_online = False
    with pytest.raises(TooFewClients, match="3 of at least 4 SuperNodes"):
        start(place.strategy(algorithm, fraction_train=0.75, min_available_nodes=4), grid, 2)
    start(place.strategy(algorithm, fraction_train=0.75, min_available_nodes=3), grid, 2)
    assert place.history()[1]["clients"] >= 2


@pytest.mark.parametrize(
    ("fraction", "least"), [(1.0, None), (0.99, None), (0.5, None), (0.1, None), (0.1, 3), (0.5, 4)]
)
def test_as_many_clients_train_as_with_fedavg(fraction, least, place):
    options = {"fraction_train": fraction} | ({} if least is None else {"min_train_nodes": least})
    algorithm = algorithms.fedavg()
    grid = place.grid(algorithm)
    theirs = FedAvg(**options).configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    strategy = place.strategy(algorithm, **options)
    start(strategy, grid, 1)
    assert len(strategy.run.federation.cohort(1)) == len(theirs)


def test_a_fraction_of_nobody_is_refused(place):
    with pytest.raises(ValueError, match="fraction_train must be greater than 0"):
        place.strategy(algorithms.fedavg(), fraction_train=0.0)


def test_nodes_that_must_train_are_waited_for(place):
    """As with FedAvg, even if min_available_nodes is smaller."""
    grid = place.grid(algorithm := algorithms.fedavg())
    grid.nodes[103].is_online = False
    strategy = place.strategy(algorithm, min_train_nodes=4, min_available_nodes=2)
    with pytest.raises(TooFewClients, match="3 of at least 4 SuperNodes"):
        start(strategy, grid, 1)


def test_the_mod_needs_fedsift_on_the_server(place):
    grid = place.grid(algorithms.fedavg())
    message = Message(RecordDict(), dst_node_id=100, message_type="train")
    reply = grid.answer(grid.nodes[100], 100, message)
    assert "needs fedsift.flower.FedSift as the server's strategy" in reply.error.reason


def test_a_client_without_the_mod_is_told_to_add_it(place):
    grid = InlineGrid(InlineNode(stock_app(), n, CLIENTS) for n in range(CLIENTS))
    with pytest.raises(TooFewClients, match=r"needs the mod fedsift.flower.sifted"):
        start(place.strategy(algorithms.fedavg()), grid, 1)


def test_settings_that_differ_are_named(place):
    grid = place.grid(algorithms.sift(density=0.1))
    said = r"server runs sift\(density=0.2\), this client sift\(density=0.1\): use the same"
    with pytest.raises(TooFewClients, match=said):
        start(place.strategy(algorithms.sift(density=0.2)), grid, 1)


def test_a_reply_without_the_arrays_that_were_sent_is_refused_with_advice(place):
    algorithm = algorithms.fedavg()
    app = ClientApp(mods=[sifted(algorithm, state_dir=place.path / "state")])

    @app.train()
    def train(msg, context):
        arrays = ArrayRecord({"first.weight": msg.content["arrays"]["first.weight"]})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    grid = InlineGrid([InlineNode(app, 0, 1)])
    with pytest.raises(TooFewClients, match=r"lack 'first.bias': reply with all that were"):
        start(place.strategy(algorithm, clients=1), grid, 1)


def test_a_client_that_lost_its_disk_receives_the_layout_again(place):
    algorithm = algorithms.fedavg()
    grid, strategy = place.grid(algorithm, clients=1), place.strategy(algorithm, clients=1)

    def wipe(round, arrays):
        if round == 1:
            (file,) = (place.path / "state").rglob("client.safetensors")
            file.unlink()

    start(strategy, grid, 2, evaluate_fn=wipe)
    assert grid.nodes[100].kinds == ["full", "delta", "full", "none", "delta"]
    assert [record["clients"] for record in place.history()] == [1, 1]


def test_client_apps_evaluate_on_their_test_data(place):
    algorithm = algorithms.fedadam_ssm(density=0.2, lr=0.01)

    def load(partition, partitions):
        return load_data(partition)

    app = client_app(Net, load, algorithm, load_test=load, state_dir=place.path / "state")
    grid = InlineGrid(InlineNode(app, n, CLIENTS) for n in range(CLIENTS))
    strategy = place.strategy(algorithm)
    result = strategy.start(grid, arrays_of(Net()), 2, 60.0)
    model, weights = Net(), strategy.run.federation.model_weights(strategy.run.snapshot)
    layout = strategy.run.federation.task.layout
    layout.write(weights, model)
    model.eval()
    found = []
    for x, y in (load_data(n) for n in range(CLIENTS)):
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        loss = nn.functional.cross_entropy(model(x), y).item()
        found.append({"accuracy": accuracy, "loss": loss, "n": len(x)})
    for name in ("accuracy", "loss"):
        expected = weighted_mean(name, "n", found)
        assert result.evaluate_metrics_clientapp[2][name] == pytest.approx(expected, rel=1e-5)
    assert Layout.of(model).d == layout.d
