"""The trained model as a file of tensors."""

from __future__ import annotations

from fedsift.federation.round import Federation
from fedsift.federation.snapshot import Snapshot
from fedsift.llm import CausalLM
from fedsift.llm.adapters import write_adapter
from fedsift.runs.disk import save_tensors
from fedsift.runs.folder import RunFolder


def save_model(folder: RunFolder, federation: Federation, snapshot: Snapshot) -> None:
    """Write the model of a run's last snapshot, for ``load_state_dict``.

    On a Flower server, which has no model, the file holds only the parameters that were trained. So
    it does for a language model with adapters, which are also written to a folder of their own.
    """
    task, w = federation.task, federation.model_weights(snapshot)
    about = {"round": snapshot.round, "layout": task.layout.fingerprint()}
    if not any(True for _ in task.model.parameters()):
        save_tensors(folder.model_file, task.layout.named(w), about)
        return
    model = federation.trained_model(snapshot)
    if isinstance(model, CausalLM) and model.has_adapters:
        save_tensors(folder.model_file, task.layout.named(w), about)
        write_adapter(model, folder.adapter_folder)
        return
    # Clones, because tied parameters share memory and a safetensors file does not.
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    save_tensors(folder.model_file, tensors, about)
