"""The run-time memo on a device, whose memory the host cannot read: one forward and its backward share."""

import pytest
import torch

from glue_compiler.ops.batch_memo import PrologueResults, memoized


class OnDevice:
    """Memory that the host cannot read, so that no copy can be compared: two layers, and how often one computed."""

    def __init__(self):
        self.computed = 0
        self.layers = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.positions = torch.arange(5, device="meta")
        self.call = memoized(lambda weight, positions, doubled: doubled, self.prologue, (1,), PrologueResults())

    def prologue(self, positions):
        self.computed += 1
        return (positions * 2,)

    def forward(self):
        for layer in self.layers:
            self.call(layer, self.positions)

    def backward(self, *layers):
        """One backward that recomputes the layers."""

        class Recompute(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                for layer in layers:
                    self.call(layer, self.positions)
                return gradient

        Recompute.apply(torch.ones(1, requires_grad=True)).backward()


def test_on_a_device_one_forward_and_its_backward_share():
    device = OnDevice()
    device.forward()
    device.backward(*reversed(device.layers))
    assert device.computed == 1


def test_on_a_device_the_next_forward_computes_again():
    device = OnDevice()
    for step in range(3):
        device.forward()
        device.backward(*device.layers)
        assert device.computed == step + 1


def test_on_a_device_the_next_backward_computes_again():
    device = OnDevice()
    device.forward()
    device.backward(device.layers[1])
    device.backward(device.layers[0])
    assert device.computed == 2


def test_on_a_device_what_one_backward_computed_is_not_for_another():
    device = OnDevice()
    for layer in device.layers:
        device.backward(layer)
    assert device.computed == 2


def test_on_a_device_a_layer_that_comes_twice_in_a_backward_computes_again():
    device = OnDevice()
    device.forward()
    device.backward(device.layers[0], device.layers[0])
    assert device.computed == 2


@pytest.mark.parametrize("are_kept", [True, False])
def test_on_a_device_a_pass_ends_with_the_first_layer_whose_weights_are_gone(are_kept):
    """Weights made anew for each pass never come a second time, and so would not tell where the next one begins."""
    device, kept = OnDevice(), []
    for _ in range(3):
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        kept += weights if are_kept else []
        for weight in weights:
            device.call(weight, device.positions)
        del weight, weights
    assert device.computed == (1 if are_kept else 3)


def test_on_a_device_a_forward_without_gradients_is_a_pass_of_its_own():
    device = OnDevice()
    with torch.no_grad():
        device.call(device.layers[0], device.positions)
    device.call(device.layers[1], device.positions)
    assert device.computed == 2


def test_on_a_device_code_without_parameters_is_one_caller():
    """The same function, compiled again for another kind of input, could not be told from another layer."""
    device, memo = OnDevice(), PrologueResults()
    for _ in range(2):
        memoized(lambda positions, doubled: doubled, device.prologue, (0,), memo)(device.positions)
    assert device.computed == 2


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda p: p[2:].zero_(), lambda p: p.set_(p + 1)])
def test_on_a_device_a_write_that_torch_counts_is_seen_within_a_pass(write):
    device = OnDevice()
    device.call(device.layers[0], device.positions)
    write(device.positions)
    device.call(device.layers[1], device.positions)
    assert device.computed == 2


def test_on_a_device_a_lazily_negated_tensor_is_not_the_one_behind_it():
    device = OnDevice()
    device.call(device.layers[0], device.positions)
    device.call(device.layers[1], torch._neg_view(device.positions))
    assert device.computed == 2


def inference_tensor():
    with torch.inference_mode():
        return torch.arange(4, device="meta")


def test_on_a_device_what_has_no_version_counter_is_computed_each_time():
    device = OnDevice()
    device.positions = inference_tensor()
    device.forward()
    assert device.computed == 2


@pytest.mark.gpu
def test_another_stream_waits_for_the_one_that_computed():
    side = torch.cuda.Stream()
    rounds = 50
    call = memoized(lambda w, p, out: out, slow_copy, (1,), PrologueResults())
    first, second = two_layers()
    for i in range(rounds):
        positions = torch.full((1 << 20,), i, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            computed = call(first, positions)
        got = call(second, positions)
        assert got is computed
        got = got + 0  # on the default stream, while the side stream still computes
        assert int((got != i).sum()) == 0


def two_layers():
    return [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]


def slow_copy(positions):
    torch.cuda._sleep(20_000_000)
    return (positions.clone(),)


@pytest.mark.gpu
def test_results_freed_while_another_stream_reads_them():
    side = torch.cuda.Stream()
    call = memoized(lambda w, p, out: out, lambda p: (p.clone(),), (1,), PrologueResults())
    first, second = two_layers()
    for i in range(50):
        positions = torch.full((1 << 20,), i, device="cuda")
        computed = id(call(first, positions))
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            got = call(second, positions)
            assert id(got) == computed
            got = got + 0
        del positions  # with it the results, which the side stream has not read yet
        torch.full((1 << 20,), -1, device="cuda")
        torch.full((1 << 20,), -1, device="cuda")
        torch.cuda.synchronize()
        assert int((got != i).sum()) == 0


@pytest.mark.gpu
def test_a_freed_batch_gives_back_its_bytes():
    call = memoized(lambda p, out: None, lambda p: (p.repeat(1000),), (0,), PrologueResults())
    positions = torch.arange(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    call(positions)
    assert torch.cuda.memory_allocated() - before >= 1000 * 1024 * 8
    del positions
    assert torch.cuda.memory_allocated() < before


@pytest.mark.gpu
def test_a_captured_graph_computes_again():
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    positions = torch.arange(4, device="cuda")
    first, second = two_layers()
    call(first, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(second, positions)
    positions.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [14] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("make", [torch.from_dlpack, torch.clone])
def test_device_memory_that_came_through_dlpack_is_computed_each_time(make):
    """Its writes advance the counter of the tensor that it came from."""
    origin = torch.arange(4, device="cuda")
    positions = make(origin)
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    first, second = two_layers()
    computed = call(first, positions)
    origin.add_(1)
    assert (call(second, positions) is computed) == (make is torch.clone)
    assert torch.equal(call(second, positions), positions * 2)


@pytest.mark.gpu
def test_device_memory_that_is_filled_past_the_counter_is_seen_in_the_next_pass():
    positions = torch.arange(4, device="cuda")
    call = memoized(lambda w, p, out: out, lambda p: (p * 2,), (1,), PrologueResults())
    layers = two_layers()
    for _ in range(3):
        results = [call(layer, positions) for layer in layers]
        assert results[0] is results[1]
        assert torch.equal(results[0], positions * 2)
        positions.data.add_(1)


@pytest.mark.gpu
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    call = memoized(lambda p, out: out, lambda p: (p * 2,), (0,), PrologueResults())
    batches = [torch.arange(4, device=f"cuda:{i}") + i for i in range(2)]
    for batch in batches * 2:
        assert torch.equal(call(batch), batch * 2)
        assert call(batch).device == batch.device
