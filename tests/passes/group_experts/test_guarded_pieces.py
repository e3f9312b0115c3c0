"""Loops over pieces that skip experts without rows and collect the others' results in a list (DeepSeek)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.captured import compile_with_glue, count, result_and_gradients
from tests.passes.group_experts.loops import EXPERTS, INNER, TOP_K, WIDTH
from tests.passes.group_experts.piece_loops import READS, SPLITS, router_inputs, scattered_counts
from tests.slow import one_in, slow_but

READ = {"tensor": lambda counts: counts, "list": lambda c: c.tolist(), "numpy": lambda c: c.cpu().numpy()}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False, dtype=torch.float64) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, rows):
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))


class DeepSeek(nn.Module):
    """``moe_infer``, with its ids as inputs."""

    def __init__(self, read="numpy"):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.read = READ[read]
        self.ep_rank, self.experts_per_rank = 0, EXPERTS

    def infer(self, x, topk_ids, topk_weight):
        counts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        counts.scatter_(1, topk_ids, 1)
        tokens_per_expert = counts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = self.read(tokens_per_expert)
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i + self.ep_rank * self.experts_per_rank]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            expert_out = expert(tokens_for_this_expert)
            outputs.append(expert_out)
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )

    def forward(self, x, topk_ids, topk_weight):
        return self.infer(x, topk_ids, topk_weight)


def routings():
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(11, EXPERTS, generator=generator).topk(TOP_K, dim=-1).indices
    return {
        "spread": spread,
        "first and last empty": torch.tensor([[1, 2]] * 5),
        "all to one expert": torch.full((7, 1), 2),
        "one token": torch.tensor([[3, 0]]),
    }


def model_results(call, model, x, selected, weights):
    """Output and all gradients; an expert without rows has none in eager and zeros when grouped."""
    model.zero_grad()
    results = result_and_gradients(lambda a, w: call(a, selected, w), [x, weights])
    return results + [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def routed_inputs(selected):
    x = torch.randn(selected.shape[0], WIDTH, dtype=torch.float64, requires_grad=True)
    return x, selected, torch.rand(selected.shape, dtype=torch.float64, requires_grad=True)


def assert_grouped(run):
    for graph, report in zip(run.graphs, run.session.graphs, strict=True):
        assert report.passes[0].counts.get("loops_grouped") == 1, report.passes[0].skips
        assert count(graph, *READS, *SPLITS) == 0


@pytest.mark.parametrize("routing", slow_but(("spread", "one expert empty"), routings()))
@pytest.mark.parametrize("read", READ)
def test_published_code(read, routing):
    model, inputs = DeepSeek(read), routed_inputs(routings()[routing])
    run = compile_with_glue(model, passes={"group_experts": True})
    for want, got in zip(model_results(model, model, *inputs), model_results(run.call, model, *inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert_grouped(run)


def test_dynamic_token_counts_and_no_gradients():
    model = DeepSeek("list")
    run = compile_with_glue(model, dynamic=True, passes={"group_experts": True})
    for selected in (routings()["spread"], routings()["first and last empty"]):
        x, ids, weights = routed_inputs(selected)
        with torch.no_grad():
            torch.testing.assert_close(run.call(x, ids, weights), model(x, ids, weights))
    assert_grouped(run)


def test_ids_that_name_an_expert_twice_fail_as_in_eager():
    """Fewer rows are counted than there are slots; eager cannot put them back, and the grouped form checks it."""
    model = DeepSeek("list")
    run = compile_with_glue(model, passes={"group_experts": True})
    x, ids, weights = routed_inputs(torch.tensor([[0, 1], [2, 2], [1, 3]]))
    for call in (model, run.call):
        with pytest.raises((RuntimeError, IndexError)):
            call(x, ids, weights)


def sorted_by_expert(x, logits):
    selected = torch.topk(logits, TOP_K, dim=-1)[1]
    order = selected.flatten().argsort(stable=True)
    return x[order // TOP_K], scattered_counts(selected, logits.shape[1])


def test_with_the_arms_swapped_and_the_end_outside():
    def loop(x, logits, gate_up, down):
        rows, counts = sorted_by_expert(x, logits)
        outputs = []
        start = 0
        for expert, n in enumerate(counts.tolist()):
            end = start + n
            if n > 0:
                outputs.append(F.linear(rows[start:end], gate_up[expert]))
            start = end
        return torch.cat(outputs)

    inputs = router_inputs(favourite=1)
    run = compile_with_glue(loop, passes={"group_experts": True})
    for want, got in zip(result_and_gradients(loop, inputs), result_and_gradients(run.call, inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert_grouped(run)


def the_length_of_the_list(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    for expert, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
    return torch.cat(outputs) * len(outputs)


def another_experts_count(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    sizes = counts.tolist()
    for expert in range(EXPERTS):
        end = start + sizes[expert]
        if sizes[(expert + 1) % EXPERTS] == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
    return torch.cat(outputs)


def another_count_than_that_of_the_piece(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    sizes = counts.tolist()
    for expert in range(EXPERTS):
        end = start + sizes[expert]
        if sizes[(expert + 1) % EXPERTS] > 0:
            outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
    return torch.cat(outputs)


def a_number_of_experts_with_rows(x, logits, gate_up, down):
    """Which counts the weights too."""
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    used = 0
    for n in counts.tolist():
        if n == 0:
            continue
        outputs.append(F.linear(rows[start : start + n], gate_up[used]))
        start = start + n
        used = used + 1
    return torch.cat(outputs)


def a_start_that_moves_on(x, logits, gate_up, down):
    """Without the experts that have no rows, the pieces lie elsewhere."""
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    for expert, n in enumerate(counts.tolist()):
        if n == 0:
            continue
        outputs.append(F.linear(rows[start : start + n], gate_up[expert]))
        start = start + n + 1
    return torch.cat(outputs)


def a_row_for_each_hit(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    for expert, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]).sum(0, keepdim=True))
        start = end
    return torch.cat(outputs)


def a_second_name_for_the_list(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    kept = outputs
    start = 0
    for expert, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
    return torch.cat(outputs) + len(kept)


def read_after_the_loop(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = last = 0
    for expert, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
        last = expert
    return torch.cat(outputs) * last


def stacked(x, logits, gate_up, down):
    rows, counts = sorted_by_expert(x, logits)
    outputs = []
    start = 0
    for expert, n in enumerate(counts.tolist()):
        end = start + n
        if n == 0:
            continue
        outputs.append(F.linear(rows[start:end], gate_up[expert]))
        start = end
    return torch.cat(outputs[:-1] + outputs[-1:])


@pytest.mark.parametrize(
    "loop",
    one_in(
        3,
        [
            the_length_of_the_list,
            another_experts_count,
            another_count_than_that_of_the_piece,
            a_number_of_experts_with_rows,
            a_start_that_moves_on,
            a_row_for_each_hit,
            a_second_name_for_the_list,
            read_after_the_loop,
            stacked,
        ],
    ),
    ids=lambda loop: loop.__name__,
)
def test_left_to_dynamo(loop):
    """Values are eager's: the frame is converted again without the assumption that every expert has rows."""
    inputs = router_inputs(favourite=1)
    with torch.no_grad():
        inputs[1][:, 3] -= 100  # an expert without rows
        if loop is a_number_of_experts_with_rows:
            inputs[1][:, 0] -= 100  # then the others' weights are those of the expert before
    run = compile_with_glue(loop, fullgraph=False, passes={"group_experts": True})
    for want, got in zip(result_and_gradients(loop, inputs), result_and_gradients(run.call, inputs), strict=True):
        torch.testing.assert_close(got, want)
    if run.session.capture_events:
        assert run.session.capture_events[0].retried
    assert not any(p.changed for p in run.session.graphs[-1].passes)
