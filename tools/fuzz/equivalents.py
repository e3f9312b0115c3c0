"""Forms of one computation that mean the same: what tests go through, and what the fuzzer draws from.

Each is Python text. A form that stays as it is has the reason that is recorded for it, a pattern.
"""

from __future__ import annotations

GROUPED = ""
NO_MASK = "the rows of an expert are selected by what is not read as a comparison of the selected experts"
OTHER_SUM = "the rows of an expert are not put back with index_add or an assignment on their token indices"

_ONE_HOT = "F.one_hot({selected}, E)"

MASKS = {
    "{selected} == {e}": GROUPED,
    "{e} == {selected}": GROUPED,
    "{selected}.eq({e})": GROUPED,
    "torch.eq(other={e}, input={selected})": GROUPED,
    "{selected} == torch.tensor({e})": GROUPED,
    "{selected}.ne({e}).logical_not()": GROUPED,
    "~({selected} != {e})": GROUPED,
    "torch.not_equal({selected}, {e}).bitwise_not()": GROUPED,
    "{selected} - {e} == 0": GROUPED,
    "{selected}.sub({e}).eq(0)": GROUPED,
    "({selected} == {e}).int()": GROUPED,
    "torch.where({selected} == {e}, 1, 0)": GROUPED,
    "torch.zeros_like({selected}).masked_fill({selected} == {e}, 1)": GROUPED,
    "({selected}[None] == torch.arange(E, device=x.device)[:, None, None])[{e}]": GROUPED,
    "({selected}.unsqueeze(-1) == torch.arange(E, device=x.device))[..., {e}]": GROUPED,
    _ONE_HOT + "[:, :, {e}]": GROUPED,
    _ONE_HOT + ".bool()[..., {e}]": GROUPED,
    _ONE_HOT + ".to(x.dtype).select(2, {e})": GROUPED,
    "(" + _ONE_HOT + " == 1)[..., {e}]": GROUPED,
    "(" + _ONE_HOT + " > 0)[..., {e}]": GROUPED,
    _ONE_HOT + "[..., {e}].ne(0)": GROUPED,
    _ONE_HOT + ".permute(2, 0, 1)[{e}]": GROUPED,
    _ONE_HOT + ".movedim(-1, 0)[{e}]": GROUPED,
    _ONE_HOT + ".transpose(0, 2)[{e}].mT": GROUPED,
    _ONE_HOT + ".unbind(-1)[{e}]": GROUPED,
    _ONE_HOT + ".split(1, dim=-1)[{e}].squeeze(-1)": GROUPED,
    _ONE_HOT + "[..., {e} : {e} + 1].squeeze(-1)": GROUPED,
    _ONE_HOT + ".narrow(2, {e}, 1).squeeze(2)": GROUPED,
    "torch.isin({selected}, {e})": NO_MASK,
    "({selected} <= {e}) & ({selected} >= {e})": NO_MASK,
    "{selected}.float() == {e}": NO_MASK,
    "({selected} ^ {e}) == 0": "there is one expert",
}
"""True at the tokens and slots of which ``{selected}``, int64 ``[N, K]``, is ``{e}``."""

INDICES = {
    "{token}, {slot} = torch.where({mask})": GROUPED,
    "{token}, {slot} = torch.where(condition={mask})": GROUPED,
    "{token}, {slot} = ({mask}).nonzero(as_tuple=True)": GROUPED,
    "{token}, {slot} = torch.nonzero({mask}, as_tuple=True)": GROUPED,
    "{token}, {slot} = ({mask}).nonzero().t()": GROUPED,
    "{token}, {slot} = torch.argwhere({mask}).unbind(-1)": GROUPED,
    "{slot}, {token} = torch.where(({mask}).t())": GROUPED,
    "pairs = ({mask}).nonzero(); {token}, {slot} = pairs[:, 0], pairs[:, -1]": GROUPED,
    "{token}, {slot} = (each.squeeze(1) for each in ({mask}).nonzero().split(1, dim=1))": GROUPED,
}
"""The tokens and slots at which ``{mask}`` ``[N, K]`` is true."""

SUMS = {
    "{out}.index_add_(0, {token}, {rows})": GROUPED,
    "{out}.index_add_(dim=0, index={token}, source={rows})": GROUPED,
    "{out}.index_add_(-2, {token}, {rows})": GROUPED,
    "{out}.index_add_(0, {token}, {rows}, alpha=1)": GROUPED,
    "{out}.index_add_(0, {token}, ({rows}).to({out}.dtype))": GROUPED,
    "{out} = {out}.index_add(0, {token}, {rows})": GROUPED,
    "{out} = torch.index_add({out}, 0, {token}, {rows})": GROUPED,
    "{out} = torch.index_add(input={out}, dim=0, index={token}, source={rows})": GROUPED,
    "{out}[{token}] += {rows}": GROUPED,
    "{out}[{token}, :] += {rows}": GROUPED,
    "{out}[{token}, ...] += {rows}": GROUPED,
    "{out}[{token}] = {out}[{token}] + {rows}": GROUPED,
    "{out}[{token}] = {rows} + {out}[{token}]": GROUPED,
    "{out}[{token}] = torch.add({out}[{token}], {rows})": GROUPED,
    "{out}[{token}] = {out}[{token}].add({rows})": GROUPED,
    "{out}[{token}] = {out}[{token}].add_({rows})": GROUPED,
    "{out}.index_put_(({token},), {rows}, accumulate=True)": GROUPED,
    "{out} = {out}.index_put(({token},), {rows}, accumulate=True)": GROUPED,
    "{out} = torch.index_put({out}, ({token},), {rows}, accumulate=True)": GROUPED,
    "torch.index_put_({out}, ({token},), {rows}, accumulate=True)": GROUPED,
    "{out}.scatter_add_(0, {token}[:, None].expand(-1, WIDTH), {rows})": GROUPED,
    "{out} = {out}.scatter_add(0, {token}[:, None].expand_as({rows}), {rows})": GROUPED,
    "{out} = torch.scatter_add({out}, 0, {token}.unsqueeze(-1).expand(-1, WIDTH), {rows})": GROUPED,
    "{out}.scatter_add_(0, {token}.view(-1, 1).repeat(1, WIDTH), {rows})": GROUPED,
    "{out}.scatter_add_(-2, {token}.reshape(-1, 1).expand(-1, WIDTH), src={rows})": GROUPED,
    "{out} = {out}.scatter_reduce(0, {token}[:, None].expand(-1, WIDTH), {rows}, 'sum')": GROUPED,
    "{out}[{token}] -= -({rows})": "one expert's assignment may overwrite",
    "{out}.index_add_(0, {token}, {rows}, alpha=2)": OTHER_SUM,
    "{out}.T.index_add_(1, {token}, ({rows}).T)": OTHER_SUM,
    "{out} = {out} + torch.zeros_like({out}).index_add(0, {token}, {rows})": "there is one expert",
    "{out}.index_copy_(0, {token}, {out}[{token}] + {rows})": OTHER_SUM,
}
"""Adds ``{rows}`` ``[n, WIDTH]`` to ``{out}`` ``[N, WIDTH]``, at rows ``{token}``."""
