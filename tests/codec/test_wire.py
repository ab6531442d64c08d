"""Wires in a federation: encoding does not change training, and bad uploads are rejected."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.codec import FrameError, decode, encode
from fedsift.codec.frame import checksum
from fedsift.codec.wire import SimulatedWire
from fedsift.errors import TooFewClients
from fedsift.simulation import Options, prepare
from problems import ridge


def settings(name, **wanted):
    known = algorithms.settings_of(name)
    return {key: value for key, value in wanted.items() if key in known}


def train(name, wire, dtype=torch.float32):
    problem = ridge(1, clients=5, d=40, dtype=dtype)
    method = algorithms.find(name)(**settings(name, density=0.2, local_steps=3, lr=0.01))
    return fedsift.simulate(
        problem.model, problem.clients, loss=mse_loss, algorithm=method, rounds=4, batch_size=4,
        participation=0.6, wire=wire,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", algorithms.METHODS)
def test_encoded_messages_train_the_same_bit_for_bit(name, dtype):
    counted, real = train(name, "count", dtype), train(name, "real", dtype)
    for ours, theirs in zip(counted.state, real.state, strict=True):
        assert torch.equal(ours, theirs)
    clock = {"seconds"}
    for one, other in zip(counted.history, real.history, strict=True):
        assert {k: v for k, v in one.items() if k not in clock} == {
            k: v for k, v in other.items() if k not in clock
        }


def federation(wire, name="fedadam-ssm", **options):
    problem = ridge(1, clients=5, d=40, dtype=torch.float32)
    options = {"participation": 1.0, "dropout": 0.0, "min_clients": 0, **options}
    method = algorithms.find(name)(**settings(name, density=0.2, local_steps=3))
    made = prepare(
        problem.model, problem.clients, None, method, Options(batch_size=None, wire="real",
        loss=mse_loss, seed=0, device="cpu", **options),
    )  # fmt: skip
    return replace(made, wire=SimulatedWire(wire))


def tampering(tamper, victims=(2,)):
    """Return a wire function that replaces the given clients' frames."""

    def wire(update, spec, limits):
        frame = encode(update, spec)
        if limits.client in victims:
            frame = tamper(frame, update, spec)
        return decode(frame, spec.layout, limits), len(frame)

    return wire


def with_values(update, value, role="w"):
    part = update.parts[0]
    quantized = part.values[role].quantized
    changed = quantized.codes.clone()
    changed[0, 0] = value
    coded = replace(part.values[role], quantized=replace(quantized, codes=changed))
    return replace(update, parts=(replace(part, values={**part.values, role: coded}),))


ATTACKS = {
    "a flipped bit": lambda frame, update, spec: bytes([frame[0] ^ 1]) + frame[1:],
    "another round": lambda frame, update, spec: encode(update, replace(spec, round=99)),
    "another base": lambda frame, update, spec: encode(update, replace(spec, base=b"x" * 8)),
    "another client's": lambda frame, update, spec: encode(update, replace(spec, client=0)),
    "NaN": lambda frame, update, spec: encode(with_values(update, float("nan")), spec),
    "infinity": lambda frame, update, spec: encode(with_values(update, float("inf")), spec),
    "an inflated weight": lambda f, update, spec: encode(replace(update, weights=(1e9,)), spec),
    "nothing": lambda frame, update, spec: b"",
    "noise": lambda frame, update, spec: checksum(b"x") * 20,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_upload_is_rejected_and_the_round_continues(attack):
    attacked = federation(tampering(ATTACKS[attack]))
    after, happened = attacked.run_round(attacked.initial_snapshot())
    assert (happened.clients, happened.rejected) == (4, 1)

    absent = federation(tampering(lambda *_: b""))
    without, _ = absent.run_round(absent.initial_snapshot())
    assert torch.equal(after.state.w, without.state.w)


def test_a_round_with_too_few_valid_updates_raises_with_the_reason():
    few = federation(tampering(lambda *_: b"", victims=(0, 1, 2)), min_clients=3)
    with pytest.raises(
        TooFewClients, match=r"merged 2 updates, but needs at least 3.*3 rejected \(client 0"
    ):
        few.run_round(few.initial_snapshot())


def test_a_hostile_second_moment_is_clamped_and_counted():
    def poison(frame, update, spec):
        return encode(with_values(update, -1e3, role="v"), spec)

    attacked = federation(tampering(poison))
    after, happened = attacked.run_round(attacked.initial_snapshot())
    assert happened.clamped == 1
    assert bool((after.state.v >= 0).all())


def test_a_replayed_frame_is_refused_in_the_next_round():
    seen = []

    def wire(update, spec, limits):
        if limits.client == 2:
            seen.append(encode(update, spec))
            return decode(seen[0], spec.layout, limits), len(seen[0])
        return update, 0

    fed = federation(wire)
    first, happened = fed.run_round(fed.initial_snapshot())
    assert happened.rejected == 0
    _, happened = fed.run_round(first)
    assert happened.rejected == 1


def test_memory_is_kept_only_by_clients_whose_update_arrived():
    fed = federation(tampering(lambda *_: b"", victims=(1, 3)), name="efficient-adam")
    after, _ = fed.run_round(fed.initial_snapshot())
    assert set(after.client_memory) == {0, 2, 4}


def test_the_sums_memory_does_not_depend_on_the_number_of_clients():
    from fedsift.codec.update import Update, WeightedSum, dense
    from fedsift.vector import State

    total = WeightedSum(State.start(torch.zeros(8)))
    held = {id(x) for x in total.total}
    for _ in range(100):
        total.add(Update(dense({"w": torch.ones(1, 8)}), (1.0,)))
    assert {id(x) for x in total.total} == held
    assert set(vars(total)) == {"total", "weight"}


def test_the_traffic_is_the_length_of_the_frames():
    lengths = []

    def wire(update, spec, limits):
        frame = encode(update, spec)
        lengths.append((limits.client, len(frame)))
        return decode(frame, spec.layout, limits), len(frame)

    fed = federation(wire)
    start = fed.initial_snapshot()
    after, _ = fed.run_round(start)
    up = [size for client, size in lengths if client is not None]
    first, down = (size for client, size in lengths if client is None)
    assert start.traffic.downlink_bytes == first
    assert after.traffic.uplink_bytes == sum(up) / 5
    assert after.traffic.downlink_bytes == start.traffic.downlink_bytes + down


def test_an_unknown_wire_is_refused():
    with pytest.raises(ValueError, match="count, real"):
        train("fedadam", "telepathy")


def test_a_frame_error_is_a_value_error():
    assert issubclass(FrameError, ValueError)


def test_a_client_with_huge_but_finite_values_is_rejected_alone():
    def huge(frame, update, spec):
        return encode(with_values(update, 3e38), spec)

    attacked = federation(tampering(huge))
    after, happened = attacked.run_round(attacked.initial_snapshot())
    assert (happened.clients, happened.rejected) == (4, 1)
    assert bool(torch.isfinite(after.state.w).all())


@pytest.mark.parametrize("weight", [5e-324, 1.0])
def test_an_unexpected_weight_is_rejected(weight):
    def lighter(frame, update, spec):
        return encode(replace(update, weights=(weight,)), spec)

    attacked = federation(tampering(lighter))
    _, happened = attacked.run_round(attacked.initial_snapshot())
    assert happened.rejected == 1


def test_a_frame_of_another_run_is_rejected():
    attacked = federation(tampering(lambda f, u, spec: encode(u, replace(spec, run=bytes(8)))))
    _, happened = attacked.run_round(attacked.initial_snapshot())
    assert happened.rejected == 1


def test_half_precision_models_can_be_encoded():
    problem = ridge(1, clients=3, d=40, dtype=torch.bfloat16)
    runs = [
        fedsift.simulate(problem.model, problem.clients, loss=mse_loss, rounds=2, wire=wire)
        for wire in ("count", "real")
    ]
    assert torch.equal(runs[0].state.w, runs[1].state.w)
