"""The ClientApp, which fedsift makes from the model, the text and the algorithm."""

from functools import partial

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsift.flower import client_app
from fedsift.llm import next_token_loss
from finetuning.algorithm import make_algorithm
from finetuning.dataset import load_text
from finetuning.model import make_model

app = ClientApp()


@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Train on the site's text, or evaluate on its held-out end."""
    text = partial(load_text, context.run_config, context.node_config)
    inner = client_app(
        partial(make_model, context.run_config),
        lambda partition, partitions: text(partition, partitions).clients[0],
        make_algorithm,
        loss=next_token_loss,
        load_test=lambda partition, partitions: text(partition, partitions).test,
    )
    return inner(message, context)
