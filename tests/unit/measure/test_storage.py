import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.measure.storage import GRANULARITY, StorageCounter


def test_storages_count_from_their_making_to_the_end_of_their_last_tensor() -> None:
    with StorageCounter(granularity=1) as counter:
        numbers = torch.zeros(1000)
        view = numbers.view(10, 100)[1:]
        assert counter.alive_bytes == 4000
        del numbers
        assert counter.alive_bytes == 4000
        del view
        assert counter.alive_bytes == 0
    assert max(counter.history) == 4000


def test_sizes_are_rounded_up_as_an_allocator_does() -> None:
    with StorageCounter() as counter:
        kept = torch.zeros(3)
    assert counter.alive_bytes == GRANULARITY
    del kept


def test_what_existed_before_counts_when_it_is_given() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    counter = StorageCounter(granularity=1)
    counter.count([layer.weight, layer.weight.detach()])
    assert counter.alive_bytes == 256


def activations(width: int) -> int:
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width, bias=False), torch.nn.ReLU(), torch.nn.Linear(width, width, bias=False)
    )
    counter = StorageCounter(granularity=1)
    counter.count(list(model.parameters()))
    with counter:
        inputs = torch.zeros(16, width)
        before = counter.alive_bytes
        output = model(inputs)
        after = counter.alive_bytes
    del output
    return after - before


def test_fake_and_real_tensors_count_the_same_and_as_by_hand() -> None:
    by_hand = 4 * 16 * 64 * 2  # what the ReLU puts out, which it and the second product keep, and the output
    with FakeTensorMode():
        fake = activations(64)
    assert (activations(64), fake) == (by_hand, by_hand)
