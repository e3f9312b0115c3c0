"""What reaches a tensor past the dispatcher gets the values, and in eager's place the same tensor."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from glue_compiler.deferred.tensor import DeferredTensor
from tests.deferred.logits import CAPPED, WORDS, Operands


def _frozen(part=lambda x: x):
    operands = Operands(CAPPED, requires_grad=False)
    return part(operands.deferred()), part(operands.eager())


def _saved(x, **how):
    buffer = io.BytesIO()
    torch.save({"logits": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, **how)["logits"]


READS = {
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "numpy, forced": lambda x: torch.from_numpy(x.numpy(force=True)),
    "asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "array of a dtype": lambda x: torch.from_numpy(np.array(x, dtype=np.float32)),
    "array of arrays": lambda x: torch.from_numpy(np.stack([x, x])),
    "numpy function": lambda x: torch.tensor(np.max(x.numpy(), axis=-1)),
    "tolist": lambda x: torch.tensor(x.tolist(), dtype=torch.float64),
    "tensor": lambda x: torch.tensor(x.detach().clone().tolist()),
    "as_tensor": lambda x: torch.as_tensor(x) + 0,
    "dlpack": lambda x: torch.from_dlpack(x),
    "dlpack by numpy": lambda x: torch.from_numpy(np.from_dlpack(x).copy()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: _saved(x, weights_only=True),
    "torch.save, any class": lambda x: _saved(x, weights_only=False),
    "deepcopy": lambda x: copy.deepcopy(x),
    "deepcopy of a dict": lambda x: copy.deepcopy({"x": x})["x"],
    "copy": lambda x: copy.copy(x),
    "storage": lambda x: torch.tensor(x.untyped_storage().tolist()),
    "typed storage": lambda x: torch.tensor(x.storage().tolist()[:5]),
    "float": lambda x: torch.tensor(float(x[0, 0].sum() if x.dim() == 3 else x[0].sum())),
    "collate": lambda x: torch.utils.data.default_collate([{"x": x}, {"x": x}])["x"],
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:__array__ implementation")
@pytest.mark.parametrize("name", READS)
def test_the_values(name):
    logits, expected = _frozen()
    read, wanted = READS[name](logits), READS[name](expected)
    assert type(read) is torch.Tensor
    assert torch.equal(read, wanted)
    assert (read.dtype, read.stride()) == (wanted.dtype, wanted.stride())


@pytest.mark.parametrize("name", ["numpy", "tolist", "dlpack", "pickle", "deepcopy", "copy", "torch.save"])
def test_the_values_of_a_part(name):
    logits, expected = _frozen(lambda x: x[:, 1:])
    torch.testing.assert_close(READS[name](logits), READS[name](expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["numpy", "asarray", "dlpack", "deepcopy"])
def test_what_eager_refuses_where_there_is_a_history(name):
    operands = Operands()
    for x in (operands.eager(), operands.deferred()):
        with pytest.raises((RuntimeError, BufferError)):
            READS[name](x)


def test_numpy_takes_a_history_where_none_is_recorded():
    operands = Operands()
    with torch.no_grad():
        assert np.array_equal(operands.deferred().numpy(), operands.eager().numpy())


def test_a_history_is_saved_as_eager_saves_it():
    operands = Operands()
    assert pickle.loads(pickle.dumps(operands.eager())).requires_grad
    assert pickle.loads(pickle.dumps(operands.deferred())).requires_grad


def test_a_leaf_that_needs_gradients_is_copied_as_one():
    leaf = Operands().deferred().detach().requires_grad_()
    again = copy.deepcopy(leaf)
    assert again.requires_grad
    assert again.is_leaf
    assert torch.equal(again, leaf)


def test_memory_is_shared_with_what_numpy_got():
    logits, _ = _frozen()
    array = logits.numpy()
    row = logits[1]
    array[1, 0] = 7.0
    assert (row[0] == 7.0).all()
    row[1].zero_()
    assert (array[1, 1] == 0).all()


def test_addresses_are_those_of_the_values():
    logits, _ = _frozen()
    row = logits[1, 2]
    assert row.data_ptr() - logits.data_ptr() == (5 + 2) * WORDS * 8
    assert logits.data_ptr() == logits.untyped_storage().data_ptr() != 0
    assert logits.data_ptr() == logits.detach().data_ptr() == (logits.view(-1)).data_ptr()
    assert logits.data_ptr() != logits.clone().data_ptr()


def test_memory_is_shared_with_other_processes():
    logits, expected = _frozen()
    row = logits[1]
    assert not logits.is_shared()
    assert logits.share_memory_() is logits
    assert logits.is_shared()
    assert row.is_shared()
    assert torch.equal(logits + 0, expected + 0)


def test_showing_it_shows_the_numbers():
    logits, expected = _frozen(lambda x: x[0])
    assert repr(logits) == repr(expected + 0)
    assert str(logits) == f"{logits}" == str(expected + 0)
    assert f"{logits.sum():.3f}" == f"{expected.sum():.3f}"
    assert f"{Operands(lead=()).deferred()[0]:.3f}" == f"{Operands(lead=()).eager()[0].item():.3f}"


def test_showing_it_with_a_history():
    text = repr(Operands().deferred())
    assert text.startswith("tensor(")
    assert "grad_fn" in text


def test_an_address_that_is_taken_behind_its_back_is_an_error():
    logits, _ = _frozen()
    with pytest.raises(RuntimeError):
        torch.Tensor.data_ptr(logits)


def _worker(queue, results):
    tensor = queue.get()
    results.put((type(tensor).__name__, tensor.sum().item()))


def test_another_process_gets_the_values():
    from glue_compiler.deferred.plain import reduce_for_processes

    logits, expected = _frozen()
    rebuild, args = reduce_for_processes(logits)
    assert torch.equal(rebuild(*args), expected)
    context = multiprocessing.get_context("fork")
    queue, results = torch.multiprocessing.get_context("fork").Queue(), context.Queue()
    process = context.Process(target=_worker, args=(queue, results), daemon=True)
    process.start()
    queue.put(Operands(CAPPED, requires_grad=False).deferred())
    name, total = results.get(timeout=60)
    process.join(timeout=60)
    assert name == "Tensor"
    assert total == pytest.approx(expected.sum().item())


def test_attributes_stay():
    logits, _ = _frozen()
    logits.note = "mine"
    assert logits.note == "mine"
    assert isinstance(logits, DeferredTensor)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_of_them_is_a_plain_one(requires_grad):
    operands = Operands(CAPPED)
    parameter = torch.nn.Parameter(operands.deferred().detach(), requires_grad)
    assert type(parameter) is torch.nn.Parameter
    assert parameter.is_leaf
    assert parameter.requires_grad == requires_grad
    assert torch.equal(parameter.detach(), operands.eager().detach())


def test_a_parameter_shares_the_memory_of_what_it_was_made_from():
    logits = Operands().deferred().detach()
    parameter = torch.nn.Parameter(logits)
    with torch.no_grad():
        parameter.zero_()
    assert not logits.any()


def test_other_classes_of_tensors():
    class Own(torch.Tensor):
        pass

    logits, expected = _frozen()
    own = logits.as_subclass(Own)
    assert type(own) is Own
    assert torch.equal(own.as_subclass(torch.Tensor), expected)


def test_fake_tensors_of_them():
    logits, expected = _frozen()
    mode = FakeTensorMode()
    fake = mode.from_tensor(logits)
    assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with mode:
        assert (fake * 2).shape == expected.shape
    assert torch.equal(logits, expected)  # has its numbers all the same


def test_operators_under_a_fake_mode():
    logits, expected = _frozen()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert (logits + 1).shape == expected.shape
    assert torch.equal(logits, expected)
    logits, _ = _frozen()
    for x in (logits, expected):
        with pytest.raises(Exception, match="Please convert all Tensors to FakeTensors first"), FakeTensorMode():
            x + 1


@pytest.mark.parametrize(
    "call", [torch.utils.dlpack.to_dlpack, lambda x: torch.Tensor._make_subclass(torch.nn.Parameter, x)]
)
def test_what_torch_gives_no_word_in_is_an_error_and_no_number(call):
    logits, _ = _frozen()
    with pytest.raises(RuntimeError):
        call(logits)
