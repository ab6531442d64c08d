import resource
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from faulty.task import BATCH, SEED, make_algorithm, make_model, note
from fedsift.flower import FedSift

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    folder = config["folder"]
    note(folder, "server")
    strategy = FedSift(
        make_algorithm(config), config["clients"], f"{folder}/run",
        batch_size=BATCH, seed=SEED, wait=config["wait"], metrics_port=config["metrics"] or None,
        secure=bool(config["secure"]),
    )  # fmt: skip

    def evaluate(round, arrays):
        """Shorten the timeout of the round in which a client hangs; the others need less."""
        own = 3 * strategy.run.checkpoint.seconds / max(1, strategy.run.snapshot.round)
        strategy.run.timeout = own + 5 if round == config["hang"] - 1 else config["timeout"]

    start = {name: Array(p.detach()) for name, p in make_model().named_parameters()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strategy.start(grid, ArrayRecord(start), config["rounds"], config["timeout"],
                   evaluate_fn=evaluate)  # fmt: skip
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    Path(folder, "growth").write_text(str(growth))
