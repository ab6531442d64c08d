"""The Flower strategy ``FedSift(algorithm, clients, folder)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import Tensor, nn

from fedsift.algorithms.buffers import BUFFERS, with_buffers
from fedsift.algorithms.method import Algorithm
from fedsift.algorithms.registry import require_own_rounds
from fedsift.errors import require_choice
from fedsift.federation.norm_bound import MAX_NORM_RATIO, check_max_norm_ratio
from fedsift.federation.round import MAX_SAMPLES
from fedsift.flower.arrays import vector_from_arrays
from fedsift.flower.deployment import Deployment
from fedsift.flower.engine import EvaluateFn, RemoteEngine
from fedsift.flower.metrics import check_metrics_port, metrics_server
from fedsift.flower.noise import RATE
from fedsift.flower.protection import Protection
from fedsift.flower.protocol import NUM_EXAMPLES
from fedsift.flower.run import DeployedRun
from fedsift.flower.sampling import (
    Sampling,
    check_sizes,
    chosen_participation,
    chosen_weights,
    nodes_to_wait_for,
)
from fedsift.flower.server_model import ServerModel
from fedsift.privacy import DifferentialPrivacy
from fedsift.privacy.robust import Aggregation
from fedsift.privacy.secure.settings import SecureSettings, settings_from
from fedsift.runs.config import KEEP_CHECKPOINTS, RunConfig, check_keep_checkpoints
from fedsift.runs.folder import RunFolder
from fedsift.task import Loss, Weights
from fedsift.vector import Layout


class FedSift(Strategy):
    """A Flower strategy that trains with a fedsift algorithm and writes a run folder.

    To move a FedAvg app to fedsift, replace the strategy in the ServerApp with this one, and add
    the mod :func:`fedsift.flower.sifted` to the ClientApp. Without train functions of your own,
    :func:`fedsift.flower.client_app` makes the ClientApp.

    Parameters
    ----------
    algorithm
        A method from ``fedsift.algorithms``. The clients must use the same one.
    clients
        The total number of clients, one per SuperNode, numbered by ``partition-id``.
    folder
        The run folder. If it already contains this run, the run is continued.
    batch_size
        Samples per local step; None takes the whole local data set.
    weights
        The clients' weights in the mean: ``"batch"``, their mini-batch sizes; ``"examples"``, their
        numbers of samples; ``"equal"``; or None for the algorithm's own.
    weighted_by_key
        The metric that holds a client's number of samples. If it is given, updates are weighted by
        it, too, as in FedAvg; by default, ``weights`` decides that, and metrics are weighted by
        ``num-examples``.
    max_samples
        The largest number of samples that a client may report.
    participation
        The fraction of clients that train in each round.
    fraction_train
        The same, rounded down as in FedAvg.
    min_train_nodes
        At least this many clients train in each round, whatever ``fraction_train``; 2 by default.
    fraction_evaluate
        The fraction of connected SuperNodes that evaluate the global model after each round, of
        those that can. 0 disables evaluation by clients.
    min_evaluate_nodes
        At least this many evaluate, if as many are connected.
    min_available_nodes
        Wait for this many SuperNodes before each round, and for ``min_train_nodes`` if that is
        more. By default, for all ``clients`` before the first round, and for ``min_clients`` before
        later ones.
    min_clients
        Stop the run if a round merges fewer updates than this. It can be continued later.
    max_norm_ratio
        Reject an update if the L2 norm of its W is more than this many times the usual norm in this
        and recent rounds. The limit for M is twice that, for V the square of the limit for M.
        0 or None disables the bound.
    buffers
        What happens to running statistics, such as those of batch normalization: ``"average"``,
        ``"local"`` or ``"frozen"``, as in :func:`fedsift.simulate`. The clients must use the same.
    secure
        Aggregate securely: the server gets the sum of the clients' values only. The clients must
        pass the same to :func:`client_app`. See :class:`fedsift.privacy.SecureSettings`.
    network
        The model, for methods whose server computes gradients, such as ``e3sfc``. It must be the
        clients' model. Server and clients must compute the same bits, which needs the same version
        of PyTorch and the same kind of processor.
    input_shape
        The shape of one input, such as ``(3, 32, 32)``, for methods that synthesize samples.
    loss
        The clients' loss, for methods whose server computes gradients.
    privacy
        Clip each update and add Gaussian noise to their sum, on this server. Metrics include ε, and
        training stops before the budget is exceeded. See
        :class:`fedsift.privacy.DifferentialPrivacy`.
    aggregation
        ``"mean"``, ``"median"`` or ``"trimmed"``, as in :func:`fedsift.simulate`. The last two need
        memory for all updates of a round on the server.
    keep_checkpoints
        Number of checkpoints that the folder keeps, for ``fedsift rollback``.
    enough
        Close the round after this many valid updates. None waits for every client.
    wait
        Seconds to wait for SuperNodes.
    seed
        Seed of cohorts and mini-batches.
    metrics_port
        Serve metrics for Prometheus at ``http://127.0.0.1:PORT/metrics``. None serves none.
    dataset, model, partition, theta
        Descriptions for the run's summary and report. Like all settings, they must not change when
        a run is continued.

    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: int,
        folder: str | Path,
        *,
        batch_size: int | None = 64,
        weights: Weights | None = None,
        weighted_by_key: str | None = None,
        max_samples: int = MAX_SAMPLES,
        participation: float | None = None,
        fraction_train: float | None = None,
        min_train_nodes: int | None = None,
        fraction_evaluate: float = 1.0,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int | None = None,
        min_clients: int = 1,
        max_norm_ratio: float | None = MAX_NORM_RATIO,
        buffers: str = "average",
        secure: bool | SecureSettings = False,
        privacy: DifferentialPrivacy | None = None,
        aggregation: Aggregation = "mean",
        network: nn.Module | None = None,
        input_shape: Sequence[int] | None = None,
        loss: Loss = nn.functional.cross_entropy,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
        enough: int | None = None,
        wait: float = 300.0,
        seed: int = 0,
        metrics_port: int | None = None,
        dataset: str = "your own",
        model: str = "your own",
        partition: str = "by node",
        theta: float = 0.1,
    ) -> None:
        check_sizes(clients, batch_size)
        check_max_norm_ratio(max_norm_ratio)
        check_keep_checkpoints(keep_checkpoints)
        check_metrics_port(metrics_port)
        require_choice("buffers", buffers, BUFFERS)
        require_own_rounds(algorithm)
        weights = chosen_weights(weights, weighted_by_key)
        self.sampling = Sampling(
            clients,
            chosen_participation(participation, fraction_train, min_train_nodes, clients),
            min_clients,
            enough,
            nodes_to_wait_for(min_available_nodes, min_train_nodes, clients),
            fraction_evaluate,
            min_evaluate_nodes,
        )
        self.protection = Protection(
            settings_from(secure), privacy, aggregation, float(max_norm_ratio or 0)
        )
        self.protection.check_fits(algorithm, self.sampling, weights)
        self.server_model = ServerModel(network, input_shape, loss)
        self.server_model.check_fits(algorithm)
        self.algorithm, self.path = algorithm, Path(folder)
        self.weights: Weights | None = weights if privacy is None else "equal"
        self.weight_key = weighted_by_key or NUM_EXAMPLES
        self.batch_size, self.max_samples, self.seed = batch_size, max_samples, seed
        self.buffers, self.wait = buffers, wait
        self.keep_checkpoints, self.metrics_port = keep_checkpoints, metrics_port
        self.labels: dict[str, Any] = {
            "dataset": dataset, "model": model, "partition": partition, "theta": theta,
        }  # fmt: skip
        self.run: DeployedRun | None = None

    def summary(self) -> None:
        """Log the settings."""
        clients, least = self.sampling.clients, self.sampling.min_clients
        log(INFO, "\t├──> %r", self.algorithm)
        log(INFO, "\t├──> %s clients, at least %s per round", clients, least)
        log(INFO, "\t└──> run folder: %s", self.path.absolute())

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train until the run has ``num_rounds`` rounds, from its checkpoint if there is one.

        A round ends after ``timeout`` seconds at the latest, with the replies received by then.
        ``train_config`` and ``evaluate_config`` are passed to the clients' own functions, with
        ``server-round`` added. ``evaluate_fn`` is called before the first round, with round 0, and
        after each round. The ``accuracy`` and ``loss`` that it returns after a round become part of
        the run's metrics, and so do the weighted means of what clients report.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, got {num_rounds}")
        layout, w = vector_from_arrays(initial_arrays)
        self.summary()
        folder = RunFolder.create_or_extend(self.path, self.config(num_rounds))
        with folder.locked():
            run = self.run = self.restore_run(folder, layout, w, timeout, evaluate_fn)
            with metrics_server(self.metrics_port, run.metrics), run.watch.until_end():
                if run.snapshot.round == 0:
                    run.engine.evaluate_arrays(0, initial_arrays)
                if run.snapshot.round >= num_rounds:
                    log(INFO, "this run is finished: to train again, choose another folder")
                while run.snapshot.round < num_rounds and run.may_continue():
                    log(INFO, "[ROUND %s/%s]", run.snapshot.round + 1, num_rounds)
                    self.run_round(run, train_config, evaluate_config, grid)
                run.finish()
        return run.result

    def run_round(
        self,
        run: DeployedRun,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        grid: Grid,
    ) -> None:
        """Train a round, let clients evaluate its model, and write it to the run folder."""
        round, result = run.snapshot.round + 1, run.result
        config = train_config or ConfigRecord()
        messages = self.configure_train(round, result.arrays, config, grid)
        _, metrics = self.aggregate_train(round, run.engine.current.replies(messages))
        result.train_metrics_clientapp[round] = metrics
        config = evaluate_config or ConfigRecord()
        messages = self.configure_evaluate(round, result.arrays, config, grid)
        replies = run.evaluation.exchange.replies(messages) if run.evaluation else []
        if (measured := self.aggregate_evaluate(round, replies)) is not None:
            result.evaluate_metrics_clientapp[round] = measured
        run.write_round()

    def config(self, rounds: int) -> RunConfig:
        """Return the configuration that defines the run."""
        sampling, protection = self.sampling, self.protection
        secure, private = protection.secure, protection.privacy
        noise: dict[str, Any] = private.calibrated(RATE, rounds).settings() if private else {}
        return RunConfig(
            algorithm=self.algorithm.name,
            clients=sampling.clients,
            rounds=rounds,
            batch_size=self.batch_size or 0,
            weights=self.weights or self.algorithm.weights,
            participation=sampling.participation,
            min_clients=sampling.min_clients,
            max_norm_ratio=protection.max_norm_ratio,
            buffers=self.buffers,
            secure=secure is not None,
            secure_neighbors=secure.neighbors if secure else 0,
            secure_threshold=secure.threshold if secure else 0,
            aggregation=protection.aggregation,
            keep_checkpoints=self.keep_checkpoints,
            wire="flower",
            seed=self.seed,
            device="cpu",
            settings=dict(self.algorithm.settings),
            **self.labels,
            **noise,
        )

    def restore_run(
        self,
        folder: RunFolder,
        layout: Layout,
        w: Tensor,
        timeout: float,
        evaluate_fn: EvaluateFn | None,
    ) -> DeployedRun:
        """Return the run in the folder, ready for its next round."""
        if self.buffers == "frozen":
            layout, w = layout.without_buffers(), layout.split(w)[0]
        sampling, protection = self.sampling, self.protection
        protection.check_buffers(layout, self.buffers)
        algorithm = with_buffers(self.algorithm, layout, self.buffers)
        task = self.server_model.task(
            algorithm, layout, sampling.clients, self.batch_size, self.seed
        )
        engine = RemoteEngine(evaluate_fn, sampling.enough, Result())
        config = folder.config()
        assert isinstance(config, RunConfig)
        federation = Deployment(
            task,
            algorithm,
            engine,
            sampling.participation,
            min_clients=sampling.min_clients,
            max_samples=self.max_samples,
            max_norm_ratio=protection.max_norm_ratio,
            weights=self.weights,
            aggregation=protection.aggregation,
            weight_key=self.weight_key,
            secure=protection.secure,
            privacy=config.privacy,
            noise_file=folder.path / "noise-draws.txt",
        )
        return DeployedRun.restore(
            folder, federation, engine, w, timeout, self.wait, sampling.min_nodes
        )

    @property
    def current_run(self) -> DeployedRun:
        """The run in progress."""
        if self.run is None:
            raise RuntimeError("no run is in progress: call start")
        return self.run

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Wait for enough nodes, and return the requests of the round."""
        with_round = ConfigRecord({**config, "server-round": server_round})
        return self.current_run.start_round(with_round, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Merge the replies as they arrive."""
        return self.current_run.merge_replies(replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the requests to the nodes that evaluate the model of the round."""
        with_round = ConfigRecord({**config, "server-round": server_round})
        fraction, least = self.sampling.fraction_evaluate, self.sampling.min_evaluate_nodes
        return self.current_run.start_evaluation(fraction, least, with_round, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the weighted means of the clients' metrics."""
        return self.current_run.merge_evaluations(replies)
