"""Models with adapters and attention masks, and partitions of Hugging Face data sets, offline."""

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import fedsift
from fedsift import algorithms, data

METHOD = algorithms.fedadam_ssm(density=0.2, local_steps=3, lr=0.01)
DENSE = algorithms.fedadam(local_steps=3, lr=0.01)
pytestmark = pytest.mark.filterwarnings("ignore:the (final accuracy|test loss)")


def texts(client, number=12):
    """Return tokens of sentences of different lengths, padded and masked, and their labels."""
    draw = torch.Generator().manual_seed(client)
    tokens = torch.randint(2, 60, (number, 10), generator=draw)
    lengths = torch.randint(4, 11, (number,), generator=draw)
    mask = (torch.arange(10) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}, (tokens[:, 0] > 30).long()


def with_adapters():
    """Return a small BERT of which only the adapters and the head are trained."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2))


def logits_loss(output, y):
    return cross_entropy(output.logits, y)


def test_adapters_are_trained_and_sent_alone(tmp_path):
    model = with_adapters()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]

    def simulate(rounds, **given):
        return fedsift.simulate(
            model, [texts(n) for n in range(3)], texts(9), DENSE, rounds, batch_size=4,
            loss=logits_loss, client_tests=[texts(n) for n in range(3)], progress=False, **given,
        )  # fmt: skip

    result = simulate(4, out=tmp_path / "run")
    assert result.accuracy is not None  # measured on the logits
    assert len(result.history[-1]["client_accuracy"]) == 3
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert result.state.w.shape == (parameters,)
    assert result.history[-1]["uplink_bytes"] < 4 * 12.1 * parameters + 4 * 100
    assert torch.equal(simulate(4, start=simulate(2)).state.w, result.state.w)
    result.load_into(model)
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    assert set(changed) == set(trainable)


def test_the_default_loss_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"pass a loss that takes output\.logits") as problem:
        fedsift.simulate(with_adapters(), [texts(0)], rounds=1)
    assert "\n" not in str(problem.value)


class Logits:
    """What a Hugging Face model returns."""

    def __init__(self, logits):
        self.logits = logits


class Classifier(nn.Linear):
    def forward(self, x):
        return Logits(super().forward(x))


def test_accuracy_is_measured_on_the_logits_of_an_object():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = Classifier(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    ours = fedsift.simulate(model, [(x, y)], (x, y), METHOD, 2, loss=logits_loss)
    theirs = fedsift.simulate(plain, [(x, y)], (x, y), METHOD, 2)
    assert [r["accuracy"] for r in ours.history] == [r["accuracy"] for r in theirs.history]
    torch.testing.assert_close(ours.state.w, theirs.state.w)
    with pytest.raises(ValueError, match="returns an object of Logits: pass a loss"):
        fedsift.simulate(model, [(x, y)], rounds=1)


def digits():
    datasets = pytest.importorskip("datasets")
    x, y = data.load("digits").train
    images = (255 * x[:200, 0]).to(torch.uint8).numpy()
    columns = {"image": datasets.Image(), "label": datasets.Value("int64")}
    values = {"image": [Image.fromarray(image) for image in images], "label": y[:200].tolist()}
    return datasets.Dataset.from_dict(values, features=datasets.Features(columns))


def test_partitions_of_flwr_datasets_become_clients():
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    parts = partitioner.DirichletPartitioner(
        num_partitions=4, partition_by="label", alpha=0.5, min_partition_size=5
    )
    parts.dataset = digits()
    clients = [data.from_huggingface(parts.load_partition(n)) for n in range(4)]
    assert sum(len(y) for _, y in clients) == 200
    x, _ = clients[0]
    assert (x.dtype, x.shape[1:]) == (torch.float32, (1, 8, 8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fedsift.simulate(model, clients, clients[0], METHOD, rounds=2)
    assert result.history[-1]["loss"] < result.history[0]["loss"]


class Pairs(torch.utils.data.Dataset):
    """A Hugging Face data set as a Dataset of pairs."""

    def __init__(self, dataset):
        self.dataset = dataset.with_format("torch")

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, row):
        item = self.dataset[row]
        return item["image"].float()[None] / 255, item["label"]


def test_a_hugging_face_dataset_can_be_fetched_live():
    whole = digits().select(range(40))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    ours = fedsift.simulate(model, [Pairs(whole)], algorithm=METHOD, rounds=1)
    theirs = fedsift.simulate(model, [data.from_huggingface(whole)], algorithm=METHOD, rounds=1)
    torch.testing.assert_close(ours.state.w, theirs.state.w)
