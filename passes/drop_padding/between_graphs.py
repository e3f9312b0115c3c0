"""What graphs that are given a graph's results are told of the tokens in them."""

from __future__ import annotations

from typing import Any

from torch import fx

from glue_compiler.fx.flow import Refused
from glue_compiler.fx.values import inputs_of
from glue_compiler.ops.known_masks import PADDING
from glue_compiler.passes.drop_padding.domain import domain_given, tokens_given
from glue_compiler.passes.drop_padding.plan import Plan, plan_rows
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader

_MIXED = "layers attend under different padding masks"


def returned_tokens(plan: Plan, graph: fx.Graph, *, in_layers: bool) -> dict[int, int]:
    """Positions of results ``[B, T, ...]`` of ``graph`` with zeros for hidden tokens → of the input that says which.

    Raises:
        Refused: results of a layer have zeros elsewhere.
    """
    output, source, whole = graph.output_node(), plan.domain.source, plan.domain.whole.dims
    if output not in plan.borders:
        return {}
    returned: Any = output.args[0]
    put_back = {arg: plan.facts[value].dims for arg, value in plan.borders[output].items()}
    of_tokens = {arg for arg, dims in put_back.items() if dims[:2] == whole and len(dims) > 2}
    if in_layers and not plan.domain.is_given and len(of_tokens) < len(put_back):
        raise Refused("what follows cannot be told where tokens are in a result that is not [B, T, ...]", output)
    if source is None:
        if in_layers and any(node.op == "placeholder" for node in plan.begun):
            raise Refused("what follows cannot be told which tokens are padding, as it can of a mask [B, 1, T, T]")
        return {}
    at = inputs_of(graph).index(source)
    return {position: at for position, node in enumerate(returned) if node in of_tokens}


def reads_of_others(plan: Plan, reader: MaskReader) -> list[Refused]:
    """Where zeros for tokens that another mask hides may be read as eager does not.

    Raises:
        Refused: tokens under several masks are mixed.
    """
    source, found = plan.domain.source, list[Refused]()
    own = None if source is None else source.meta[PADDING]
    for padding, given in tokens_given(reader).items():
        if padding == own:
            continue
        if not set(given).isdisjoint(plan.begun):
            raise Refused(_MIXED)
        try:
            other = plan_rows(reader, domain_given(given, reader, plan.domain.attentions, plan.domain.unknown))
        except Refused as refusal:
            found.append(refusal)
        else:
            if not plan.facts.keys().isdisjoint(other.facts):
                raise Refused(_MIXED)
    return found
