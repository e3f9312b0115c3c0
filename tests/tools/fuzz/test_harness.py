"""How a program is run, and what counts as a difference."""

import dataclasses

import pytest
import torch

from tests.tools.fuzz.made import program
from tools.fuzz import harness
from tools.fuzz.check import module_of
from tools.fuzz.programs import Statement


def compared(expected, actual, **settings):
    program = {
        "PRECISION": "float64",
        "ZERO_FOR_NONE": False,
        "NAN_MAY_VANISH": (),
        "SPOILED": False,
        "CALLS": [1, 2],
        **settings,
    }
    return harness.differences(program, expected, actual)


ONE = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_nan_of_one_is_a_nan_of_the_other(swapped):
    half = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    pair = (ONE, half) if swapped else (half, ONE)
    (difference,) = compared(*({"output 0": each} for each in pair))
    assert "NaN" in difference
    assert compared({"output 0": half}, {"output 0": half.clone()}) == []


def test_an_exception_for_nan_is_for_some_values_and_one_way():
    half = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    allowed = {"NAN_MAY_VANISH": ("gradient",)}
    assert compared({"gradient": half}, {"gradient": ONE}, **allowed) == []
    for expected, actual in (({"gradient": ONE}, {"gradient": half}), ({"output 0": half}, {"output 0": ONE})):
        assert "NaN" in compared(expected, actual, **allowed)[0]
    (difference,) = compared({"gradient": half}, {"gradient": ONE * 2}, **allowed)
    assert "off by" in difference


def test_where_nan_may_vanish_there_is_the_number_of_inputs_without_it():
    half = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    allowed = {"NAN_MAY_VANISH": ("gradient",)}

    def differ(unspoiled, got):
        return compared({"gradient": half, harness.UNSPOILED: {"gradient": unspoiled}}, {"gradient": got}, **allowed)

    other = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert differ(ONE, ONE) == differ(ONE, half) == differ(half, other) == []
    assert "NaN" in differ(ONE, other)[0]


def test_what_spoils_the_inputs_is_left_out_for_comparison():
    spoil = Statement("if SPOILED:", (Statement("x[0] = float('nan')"),))
    text = program("y = x.sin()", make=(Statement("x = torch.ones(2, dtype=FLOAT)"), spoil))
    module = module_of(dataclasses.replace(text, nan_may_vanish=("output",)))
    seen = harness.observe(module)
    assert seen["call 1: output 0"].isnan().tolist() == [True, False]
    assert not seen[harness.UNSPOILED]["call 1: output 0"].isnan().any()
    assert harness.UNSPOILED not in harness.observe(module_of(text))


@pytest.mark.parametrize(
    ("expected", "actual", "told"),
    [
        (ONE, ONE + 1e-6, "off by"),
        (ONE, ONE.float(), "float32"),
        (ONE, ONE[:1], "(1,)"),
        (ONE, ONE * float("nan"), "NaN"),
        (ONE, None, "compiled None"),
        (None, torch.zeros(2), "eager None"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "[1, 3]"),
        (True, False, "compiled False"),
        (1.0, 1.0 + 1e-6, "off by"),
    ],
)
def test_what_differs_is_told(expected, actual, told):
    (difference,) = compared({"output 0": expected}, {"output 0": actual})
    assert told in difference
    assert compared({"output 0": expected}, {"output 0": expected}) == []


def test_a_number_that_was_read_is_compared_as_a_tensor_is():
    assert compared({"output 0": 2.0}, {"output 0": 2.0 + 1e-15}) == []
    assert compared({"output 0": float("nan")}, {"output 0": float("nan")}) == []


def test_a_gradient_of_zeros_for_a_parameter_that_no_data_selected_is_allowed_where_it_is_documented():
    none, zeros, ones = {"gradient": None}, {"gradient": torch.zeros(2)}, {"gradient": torch.ones(2)}
    assert compared(none, zeros) != []
    assert compared(none, zeros, ZERO_FOR_NONE=True) == []
    assert compared(none, ones, ZERO_FOR_NONE=True) != []
    without, with_one = {"output 0 requires grad": False}, {"output 0 requires grad": True}
    assert compared(without, with_one) != []
    assert compared(without, with_one, ZERO_FOR_NONE=True) == []
    assert compared(with_one, without, ZERO_FOR_NONE=True) != []


def test_an_error_in_one_of_both_is_told():
    error = {"call 1: error": "ValueError: no"}
    assert compared(error, {}) != []
    assert compared({}, error) != []
    assert compared(error, {"call 1: error": "RuntimeError: in other words"}) == []


def test_what_cannot_be_read_any_more_says_nothing_of_gradients_either():
    without, label = {"output 0 requires grad": False}, "output 0"
    assert compared({label: ONE, **without}, {label: harness.Written("no")}) == []
    assert compared({label: ONE, **without}, {label: ONE}) != []


def test_a_tensor_that_a_compile_keeps_alive_is_told():
    kept = []
    module = module_of(program("y = x * 2"))

    def keeps(f):
        def call(*inputs):
            kept.append(f(*inputs))
            return kept[-1]

        return call

    expected = harness.observe(module_of(program("y = x * 2")))
    (difference,) = harness.differences(module, expected, harness.observe(module, keeps))
    assert difference.startswith("alive afterwards")


def test_python_state_is_compared():
    counts = ("STATE = [0]",)
    module = module_of(program("STATE[0] += 1", "y = x * 2", prelude=counts))
    expected = harness.observe(module_of(program("STATE[0] += 1", "y = x * 2", prelude=counts)))
    actual = harness.observe(module, lambda f: lambda x: (x * 2,))
    assert "call 2: STATE: eager [2], compiled [0]" in harness.differences(module, expected, actual)


@pytest.mark.parametrize("written", [None, 1])
def test_a_caller_writes_the_outputs_or_one_input(written):
    given = dataclasses.replace(program(), between="out.detach().zero_()", written=written)
    outputs, inputs = [[torch.ones(2, requires_grad=True) for _ in range(3)] for _ in range(2)]
    module_of(given)["between"](outputs, inputs)
    assert [bool(out.any()) for out in (*outputs, *inputs)] == (
        [False] * 3 + [True] * 3 if written is None else [True] * 4 + [False, True]
    )


@pytest.mark.parametrize("number", [float("nan"), 1.0])
def test_only_what_was_written_excuses_that_it_cannot_be_read(number):
    class GlueDeferredError(Exception):
        pass

    x = torch.full((2,), number)
    memory = harness.Memory([x])
    assert not isinstance(memory.excused(GlueDeferredError()), harness.Written)
    x.numpy()[0] = 2.0
    assert isinstance(memory.excused(GlueDeferredError()), harness.Written)
    assert not isinstance(memory.excused(RuntimeError()), harness.Written)


def test_behind_a_call_that_could_not_read_what_was_written_nothing_is_compared():
    excused = {"call 1: output 0": ONE, "call 2: error": harness.Written("GlueDeferredError: ")}
    right = {"call 1: output 0": ONE, "call 2: output 0": ONE, "call 2: input 0 afterwards": ONE}
    assert compared(right, excused) == []
    assert compared(right, {**excused, "call 2: error": "GlueDeferredError: "}) != []
    assert compared(right, {**excused, "call 1: output 0": ONE + 1}) != []
