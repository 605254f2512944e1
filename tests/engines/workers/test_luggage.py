"""What workers are given: structure by pickle, tensors by their place in shared memory."""

from __future__ import annotations

import pickletools
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from fedtailor.data.transforms import ImagePreparation, TextWindows
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines.workers.luggage import NotPortable, check_portable, pack, unpack
from fedtailor.engines.workers.pool import WorkerPool, luggage_for
from fedtailor.engines.workers.shared_memory import LINE, SharedMemory
from fedtailor.methods.registry import get_method
from fedtailor.objective import Objective
from helpers import bits, image_data, tiny_cnn, tiny_mlp, vector_data


def back(**parts):
    return unpack(pack(parts))


TENSORS = {
    "float32": torch.arange(6.0).view(2, 3),
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "bfloat16": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "int64": torch.tensor(9),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": torch.tensor([1 + 2j]),
}


def test_tensors_keep_their_bits():
    for name, tensor in back(**TENSORS).items():
        assert bits(tensor) == bits(TENSORS[name]), name


def test_no_tensor_is_pickled():
    big = torch.zeros(100_000)
    memory = pack({"module": nn.Linear(300, 300), "data": big, "nested": [{"x": (big,)}]})
    with memory.view(8) as view:
        length = int.from_bytes(view[:8], "little")
        text = bytes(view[8 : 8 + length])
    assert length < 5000
    names = " ".join(str(argument) for _, argument, _ in pickletools.genops(text))
    assert "_rebuild_tensor" not in names
    assert "storage" not in names


def test_what_is_shared_is_shared_again_and_parameters_stay_parameters():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    there = back(module=module)["module"]
    assert there[0].weight is there[1].weight
    assert isinstance(there[0].weight, nn.Parameter)
    assert (there[0].weight.requires_grad, there[0].bias.requires_grad) == (True, False)
    assert set(there.state_dict()) == set(module.state_dict())
    assert all(bits(value) == bits(there.state_dict()[name]) for name, value in module.state_dict().items())


def test_a_worker_that_writes_into_its_data_changes_nobody_elses():
    memory = pack({"data": torch.zeros(10)})
    first, second = unpack(memory)["data"], unpack(memory)["data"]
    first.fill_(7)
    assert torch.equal(second, torch.zeros(10))
    assert torch.equal(unpack(memory)["data"], torch.zeros(10))


def test_preparations_travel():
    windows = TextWindows(torch.arange(50, dtype=torch.uint8), length=5)
    there = back(windows=windows, images=ImagePreparation((0.5,), (0.2,)))
    assert bits(there["windows"].text) == bits(windows.text)
    assert there["images"] == ImagePreparation((0.5,), (0.2,))


def local_class():
    class Local(nn.Linear):
        pass

    return Local(2, 2)


@pytest.mark.parametrize(
    ("parts", "culprit"),
    [
        ({"method": 1, "objective": Objective(lambda output, batch: output.mean())}, "objective"),
        ({"module": local_class()}, "module"),
        ({"method": 1, "examples": open}, None),
        ({"examples": (number for number in range(3))}, "examples"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(parts, culprit):
    if culprit is None:
        check_portable(parts)
        return
    with pytest.raises(NotPortable, match=f"^{culprit} cannot be sent to worker processes: "):
        check_portable(parts)
    with pytest.raises(NotPortable, match=f"^{culprit} cannot be sent to worker processes: "):
        pack(parts)


def test_a_lambda_as_loss_is_refused_before_any_process_starts():
    data = vector_data()
    model = elastic(tiny_mlp(), data.example(), objective=Objective(lambda output, batch: output.mean()))
    with pytest.raises(NotPortable, match="objective cannot be sent to worker processes"):
        WorkerPool(get_method("fedavg")(), model, data, 2)


def test_other_devices_are_refused():
    data = image_data()
    model = elastic(tiny_cnn(), data.example())  # one of its own: the shared one must stay as it is
    model.module.to("meta")
    with pytest.raises(NotPortable, match="device = meta: worker processes run on the CPU"):
        luggage_for(get_method("fedavg")(), model, data)


def test_shared_memory_grows_and_is_given_back():
    memory = SharedMemory(10)
    other = SharedMemory(descriptor=memory.descriptor)
    with memory.view(1) as view:
        view[:3] = b"abc"
    assert memory.write(LINE, [b"x" * 5000, memoryview(b"yz")]) == LINE + 5002
    assert bytes(other.view(LINE + 5002)[LINE + 4999 : LINE + 5002]) == b"xyz"
    assert bytes(other.view(1)[:3]) == b"abc"
    memory.close()
    memory.close()


# Scripts. Each is run as a user runs it.

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from fedtailor.data.batches import Examples
    from fedtailor.data.federated import FederatedData
    import fedtailor

    {definition}

    def start():
        print("RUNS", flush=True)
        inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
        examples = Examples.of(inputs, torch.arange(32) % 4)
        data = FederatedData.from_examples(examples, examples, clients=4, num_classes=4)
        run = fedtailor.train({module}, data, "equal", "fedavg", rounds=2, clients_per_round=2,
                              engine={{"workers": {workers}}})
        print("ENDED", run.state.round, flush=True)

    {call}
"""
CLASS = """class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
"""
PLAIN = "nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))"
GUARDED = 'if __name__ == "__main__":\n        start()'


def run_script(folder, *, guarded: bool, module: str, workers: str = "1") -> subprocess.CompletedProcess[str]:
    text = SCRIPT.format(
        definition=CLASS, module=module, workers=workers, call=GUARDED if guarded else "start()"
    )
    path = folder / "my_script.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again_by_its_workers(tmp_path):
    """With ``multiprocessing`` this script would start itself over and over."""
    result = run_script(tmp_path, guarded=False, module=PLAIN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["RUNS", "ENDED 2"]


@pytest.mark.slow
def test_a_class_of_a_script_without_a_guard_is_refused_with_advice(tmp_path):
    result = run_script(tmp_path, guarded=False, module="Net()")
    assert result.returncode != 0
    assert (
        "NotPortable: Net: defined in my_script.py, which worker processes would have to run" in result.stderr
    )
    assert 'if __name__ == "__main__":' in result.stderr
    assert "ENDED" not in result.stdout


@pytest.mark.slow
def test_a_class_of_a_script_with_a_guard_is_found(tmp_path):
    result = run_script(tmp_path, guarded=True, module="Net()")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["RUNS", "ENDED 2"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ['"auto"', "1"])
def test_a_class_typed_at_a_prompt(workers):
    text = SCRIPT.format(definition=CLASS, module="Net()", workers=workers, call="start()")
    at_once = "from fedtailor.engines import automatic\nautomatic.HEAD_START_SECONDS = 0\n"
    text = at_once + textwrap.dedent(text)
    result = subprocess.run(
        [sys.executable, "-"], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    advice = "Net: defined in a notebook or at a prompt, where worker processes cannot find it"
    assert advice in result.stderr
    if workers == "1":
        assert result.returncode != 0
    else:  # by itself fedtailor stays in one process, and says so
        assert result.returncode == 0, result.stderr
        assert "all clients run in one process, on one core" in result.stderr
        assert "ENDED 2" in result.stdout
