"""The ClientApp."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedadam_ssm.dataset import load_share
from fedadam_ssm.model import make_model
from fedadam_ssm.strategy import make_algorithm
from fedsift.flower import client_app

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the method's local steps on the client's share of the data."""
    config = context.run_config

    def load_data(partition: int, partitions: int) -> object:
        return load_share(config, partition, partitions)

    inner = client_app(lambda: make_model(config), load_data, make_algorithm)
    return inner(message, context)
