"""Masks of attention: token numbers, documents, windows, padding and positions, boolean or added."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Value
from tools.fuzz.forms.masks import CAUSAL

_CAUSAL = [text for text in CAUSAL.values() if "set_to" not in text and "[None, None]" not in text]
"""Forms for as many keys as queries, on a CPU."""


@dataclass
class Sizes:
    """Rows, query heads, key heads, queries, keys, head size."""

    batch: int
    heads: int
    key_heads: int
    length: int
    keys: int
    head: int


@dataclass
class Masks:
    """What masks are made of; integer inputs are declared as they are used."""

    draw: Draw
    sizes: Sizes
    inputs: dict[str, str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    def input(self, name: str, expression: str, dtype: str, dims: int, *, is_leaf: bool = False) -> str:
        if name not in self.inputs:
            self.inputs[name] = expression
            self.draw.values.append(Value(name, dtype, dims, is_leaf=is_leaf))
        return name

    # Expressions of the mask over [T, S] or [B, 1, T, S], as booleans.

    def boolean(self, depth: int = 2) -> str:
        """The name of a boolean mask."""
        draw = self.draw
        if depth == 2 and draw.chance(0.7):
            return self.usual()
        if depth == 0 or draw.chance(0.3):
            rare = (self.ordered, self.all, self.numbers)
            leaf = draw.pick(*(self.causal, self.same_document, self.window, self.padding) * 2, *rare)
            return leaf()
        return self.joined(self.boolean(depth - 1), self.boolean(depth - 1))

    def usual(self) -> str:
        """What models have: causal, then documents, a window or padding."""
        draw = self.draw
        if draw.chance(0.15):
            return draw.pick(self.same_document, self.padding, self.window)()
        mask = self.causal()
        for leaf, share in ((self.same_document, 0.45), (self.window, 0.2), (self.padding, 0.25), (self.ordered, 0.03)):
            if draw.chance(share):
                mask = self.joined(mask, leaf())
        return mask

    def joined(self, first: str, second: str) -> str:
        draw = self.draw
        how = draw.integer(0, 29)
        if how < 23:
            text = spellings.binary(draw, "bitwise_and", first, second)
        elif how < 24:
            text = spellings.binary(draw, "bitwise_or", first, second)
        elif how < 25:
            text = draw.pick(f"torch.logical_and({first}, {second})", f"{first}.logical_and(other={second})")
        elif how < 26:
            text = f"({first} * {second})"
        elif how < 27:
            text = spellings.inverted(draw, f"({spellings.inverted(draw, first)} | {spellings.inverted(draw, second)})")
        elif how < 28:
            text = spellings.where(draw, first, second, "torch.zeros((), dtype=torch.bool" + draw.at + ")")
        elif how < 29:
            text = f"{first}.masked_fill({spellings.inverted(draw, second)}, False)"
        else:
            text = f"({first} ^ {second})"
        return draw.let("mask", text, "bool", 4, plain=f"{first} & {second}")

    def tokens(self, length: str = "T") -> str:
        draw = self.draw
        return draw.let(
            "token",
            draw.mostly(
                f"torch.arange({length}{draw.at})",
                f"torch.arange(0, {length}, 1{draw.at})",
                f"torch.arange(end={length}{draw.at})",
                f"torch.arange({length}, dtype=torch.int32{draw.at})",
                f"torch.ones({length}, dtype=torch.int64{draw.at}).cumsum(0) - 1",
                f"torch.arange(1, {length} + 1{draw.at}) - 1",
                f"torch.arange(float({length}){draw.at}).long()",
            ),
            "int",
            1,
            plain=f"torch.arange({length}{draw.at})",
        )

    def pair(self) -> tuple[str, str]:
        """Expressions for query numbers ``[T, 1]`` and key numbers ``[S]``."""
        draw = self.draw
        query, key = self.tokens(), self.tokens("S")
        column = draw.mostly(
            f"{query}[:, None]",
            f"{query}.unsqueeze(-1)",
            f"{query}.view(-1, 1)",
            f"{query}.reshape(T, 1)",
            f"torch.unsqueeze({query}, dim=1)",
        )
        if self.sizes.keys != self.sizes.length and draw.chance(0.7):
            column = f"({column} + (S - T))"
        row = draw.mostly(key, f"{key}[None, :]", f"{key}[None]", f"{key}.view(1, -1)", f"{key}.expand(T, S)")
        return column, row

    def causal(self) -> str:
        draw = self.draw
        if draw.device == "cpu" and self.sizes.keys == self.sizes.length and draw.chance(0.2):
            return draw.let("mask", draw.pick(*_CAUSAL), "bool", 2, plain=CAUSAL["ge"])
        ones = draw.pick(
            "torch.ones(T, S, dtype=torch.bool{})",
            "torch.ones((T, S), dtype=torch.bool{})",
            "torch.full((T, S), True{})",
        ).format(draw.at)
        offset = "S - T" if self.sizes.keys != self.sizes.length else "0"
        how = draw.integer(0, 9)
        if how < 5:
            query, key = self.pair()
            text = spellings.binary(draw, "ge", query, key)
        elif how < 6:
            query, key = self.pair()
            text = spellings.binary(draw, "lt", key, f"({query} + 1)")
        elif how < 8:
            text = draw.pick(
                f"{ones}.tril({offset})",
                f"{ones}.tril(diagonal={offset})",
                f"torch.tril({ones}, {offset})",
                f"torch.tril(input={ones}, diagonal={offset})",
            )
        elif how < 9:
            text = draw.pick(
                f"~{ones}.triu({offset} + 1)",
                f"torch.triu({ones}, diagonal={offset} + 1) == 0",
                f"torch.triu({ones}.int(), diagonal=1 + {offset}).eq(0)",
            )
        else:
            query, key = self.pair()
            text = f"(({query} - {key}) >= 0)"
        return draw.let("mask", text, "bool", 2, plain=f"torch.arange(T{draw.at})[:, None] >= torch.arange(S{draw.at})")

    def all(self) -> str:
        draw = self.draw
        return draw.let(
            "mask",
            draw.pick(
                "torch.ones(T, S, dtype=torch.bool{})", "torch.full((), True{})", "(torch.arange(S{}) >= 0)"
            ).format(draw.at),
            "bool",
            2,
        )

    def numbers(self) -> str:
        """Keys whose number is one: of NaN alone a comparison with itself is false."""
        draw = self.draw
        drawn, where = (
            f"torch.randn(B, S, dtype=FLOAT, generator=g{draw.at})",
            f"torch.rand(B, S, generator=g{draw.at})",
        )
        # No value of the program's: other statements would make NaN of it.
        self.inputs.setdefault("numbers", f"{drawn}.masked_fill({where} < 0.3, float('nan'))")
        text = draw.pick(
            "(numbers == numbers)",
            "(numbers <= numbers)",
            "(numbers * 0 == 0)",
            "(numbers - numbers == 0)",
            "torch.isnan(numbers).logical_not()",
        )
        return draw.let("mask", f"{text}[:, None, None, :]", "bool", 4)

    def window(self) -> str:
        draw = self.draw
        query, key = self.pair()
        width = draw.integer(1, 6)
        ones = f"torch.ones(T, S, dtype=torch.bool{draw.at})"
        text = draw.mostly(
            f"({query} - {key} < {width})",
            f"({query} - {key}).lt({width})",
            f"({key} > {query} - {width})",
            f"torch.sub({query}, {key}).abs() <= {width}",
            f"torch.sub({query}, {key}, alpha=1) < {width}",
            f"torch.abs(input={query} - {key}) < {width}",
            f"torch.sub({query}, {key}, alpha=2) < {width}",
            f"{ones}.triu(diagonal=-{width})",
            f"{ones}.tril({width}).triu(-{width})",
            f"({query} - {key}).clamp(min=0) < {width}",
            f"(({query} - {key}) // {width} == 0)",
        )
        return draw.let("mask", text, "bool", 2)

    def padding(self) -> str:
        draw = self.draw
        bools = "(torch.rand(B, S, generator=g{}) < 0.7)"
        how = draw.integer(0, 7)
        if how < 3:
            pad = self.input("pad", bools.format(draw.at), "bool", 2)
            base = pad
        elif how < 4:
            pad = self.input("pads", f"(torch.rand(B, S, generator=g{draw.at}) < 0.7).long()", "int", 2)
            base = draw.pick(
                f"{pad}.bool()",
                f"({pad} != 0)",
                f"({pad} == 1)",
                f"{pad}.to(torch.bool)",
                f"({pad} > 0)",
                f"(1 - {pad}).logical_not()",
            )
        elif how < 5:
            wide = self.input("wide_pad", f"(torch.rand(B, S + 1, generator=g{draw.at}) < 0.7)", "bool", 2)
            base = draw.pick(f"{wide}[:, 1:]", f"{wide}[:, :S]", f"{wide}[..., -S:]", f"{wide}.narrow(1, 1, S)")
        elif how < 6:
            tall = self.input("tall_pad", f"(torch.rand(S, B, generator=g{draw.at}) < 0.7)", "bool", 2)
            base = draw.pick(f"{tall}.t()", f"{tall}.transpose(0, 1)", f"{tall}.T", f"{tall}.permute(1, 0)")
        else:
            number = self.input("lengths", f"torch.randint(1, S + 1, (B,), generator=g{draw.at})", "int", 1)
            keys = self.tokens("S")
            base = draw.pick(
                f"({keys} < {number}[:, None])",
                f"({keys} >= {number}[:, None])",
                f"({number}.unsqueeze(1) > {keys})",
                f"({keys}[None, :] < {number}.view(B, 1))",
            )
        if draw.chance(0.1):
            base = f"{base}.flip(1)"
        base = draw.let("seen", base, "bool", 2)
        text = draw.pick(
            f"{base}[:, None, None]",
            f"{base}[:, None, None, :]",
            f"{base}.view(B, 1, 1, S)",
            f"{base}.unsqueeze(1).unsqueeze(1)",
            f"{base}[:, None, None, :].expand(B, 1, T, S)",
        )
        if how > 3 or draw.chance(0.5):
            text = draw.pick(
                f"{base}[:, None, None]",
                f"{base}[:, None, None, :].expand(-1, 1, T, -1)",
                f"{base}.unsqueeze(1).unsqueeze(2)",
            )
        return draw.let("mask", text, "bool", 4, plain=f"{base}[:, None, None]")

    def positions(self) -> str:
        return self.input("pos", f"torch.stack([restarting(S, g) for _ in range(B)]){self._moved}", "int", 2)

    @property
    def _moved(self) -> str:
        return "" if self.draw.device == "cpu" else f".to({self.draw.device!r})"

    def document_ids(self) -> str:
        """The name of integer ids ``[B or 1, S]`` over the keys."""
        draw = self.draw
        if self.ids and draw.chance(0.6):
            return draw.pick(*self.ids)
        how = draw.integer(0, 11)
        if how < 3:
            starts = self.input("starts", f"(torch.rand(B, S, generator=g{draw.at}) < 0.3)", "bool", 2)
            if draw.chance(0.2):
                starts = draw.pick(
                    f"{starts}.long()", f"{starts}.int()", f"{starts}.to(torch.uint8)", f"{starts}.double()"
                )
            text = spellings.along(draw, "cumsum", starts, draw.mostly(-1, 1, 1, 0))
        elif how < 6:
            position = self.positions()
            previous = draw.mostly(f"{position}[:, :1] - 1", f"{position}[:, :1]", f"{position}[:, -1:]")
            steps = draw.mostly(
                f"torch.diff({position}, prepend={previous}, dim=-1)",
                f"torch.diff({position}, prepend={previous})",
                f"torch.diff({position}, prepend={previous}, axis=1)",
                f"torch.diff({position}, n=1, dim=1, prepend={previous})",
                f"torch.diff({position}, axis=0, prepend={position}[:1])",
                f"{position}.diff(dim=-1, prepend={previous})",
            )
            other = draw.mostly(f"({steps} != 1)", f"({steps} < 1)", f"torch.ne({steps}, 1)")
            text = spellings.along(draw, "cumsum", other, draw.pick(-1, 1))
        elif how < 7:
            text = spellings.along(
                draw,
                "cumsum",
                f"({self.positions()} == 0)",
                draw.pick(-1, 1),
                further=draw.pick("", "", "dtype=torch.int32", "dtype=torch.int8"),
            )
        elif how < 8:
            drawn = f"F.pad(torch.randint(0, S + 1, (3,), generator=g{draw.at}).sort().values, (1, 0))"
            offsets = self.input("offsets", drawn, "int", 1)
            token = self.tokens("S")
            text = draw.pick(
                f"torch.searchsorted({offsets}, {token}, right=True)[None]",
                f"torch.bucketize({token}, {offsets}, right=True)[None]",
                f"torch.bucketize(input={token}, boundaries={offsets})[None]",
            )
        elif how < 9:
            token, number = self.tokens("S"), draw.integer(2, 5)
            text = draw.mostly(
                f"({token} // {number})[None]",
                f"torch.div({token}, {number}, rounding_mode='floor')[None]",
                f"torch.div({token}, {number}, rounding_mode='trunc')[None]",
                f"({token} % {number})[None]",
            )
        elif how < 10:
            text = self.input("ids", f"torch.randint(0, 4, (B, S), generator=g{draw.at}).sort(-1).values", "int", 2)
        elif how < 11:
            text = self.input("any_ids", f"torch.randint(0, 4, (B, S), generator=g{draw.at})", "int", 2)
        else:
            counts = self.input("counts", "split_of(S, 3, g)" + self._moved, "int", 1)
            text = f"torch.repeat_interleave(torch.arange(3{draw.at}), {counts}, output_size=S)[None]"
        if draw.chance(0.15):
            text = draw.pick(
                f"{text}.int()",
                f"{text}.to(torch.int8)",
                f"{text}.half().long()",
                f"{text}.bool()",
                f"({text} - 1)",
                f"({text} * 2)",
                f"({text} % 3)",
                f"{text}.flip(-1)",
                f"{text}.roll(1, -1)",
                f"{text}.clamp(max=2)",
                f"{text}.float()",
                f"{text}.clone()",
            )
        name = draw.let("ids", text, "int", 2)
        self.ids.append(name)
        return name

    def same_document(self) -> str:
        draw = self.draw
        ids = self.document_ids()
        last = "" if self.sizes.keys == self.sizes.length else "[:, -T:]"
        text = draw.mostly(
            f"({ids}{last}[:, None, :, None] == {ids}[:, None, None, :])",
            f"torch.eq({ids}{last}[:, None, :, None], {ids}[:, None, None, :])",
            f"({ids}{last}[:, :, None] == {ids}[:, None, :])[:, None]",
            f"({ids}[:, None, :].eq({ids}{last}.unsqueeze(-1))).unsqueeze(1)",
            f"({ids}{last}[:, None, :, None] - {ids}[:, None, None, :] == 0)",
            f"({ids}{last}[:, None, :, None] >= {ids}[:, None, None, :])",
        )
        return draw.let("mask", text, "bool", 4)

    def ordered(self) -> str:
        draw, position = self.draw, self.positions()
        last = "" if self.sizes.keys == self.sizes.length else "[:, -T:]"
        text = draw.pick(
            f"({position}[:, None, None, :] <= {position}{last}[:, None, :, None])",
            f"({position}{last}[:, None, :, None] >= {position}[:, None, None, :])",
            f"({position}[:, None, None, :] > {position}{last}[:, None, :, None] - {draw.integer(1, 4)})",
        )
        return draw.let("mask", text, "bool", 4)

    def learned(self) -> str:
        """The name of numbers with a gradient, for distances or for each score, to add to scores."""
        draw, how = self.draw, self.draw.integer(0, 7)
        grad = ".requires_grad_()" if draw.chance(0.9) else ""
        if how < 4:
            table = f"torch.randn(5, HEADS, dtype=FLOAT, generator=g{draw.at}){grad}"
            query, key = self.pair()
            text = self.input("table", table, "float", 2, is_leaf=True)
            text = draw.mostly(
                f"{text}[({key} - {query}).clamp(-2, 2) + 2].permute(2, 0, 1)[None]",
                f"F.embedding(({query} - {key}).clamp(-2, 2) + 2, {text}).permute([2, 0, 1]).unsqueeze(0)",
                f"{text}.t()[:, ({key} - {query}).abs().clamp(max=4)]",
                f"{text}[({key} - {query}).clamp(-2, 2) + 2].permute(2, 0, 1).expand(B, HEADS, T, S)",
            )
        else:
            shape = ("1, HEADS, T, S", "B, 1, T, S", "HEADS, 1, S", "T, 1")[how - 4]
            text = f"torch.randn({shape}, dtype=FLOAT, generator=g{draw.at}){grad}"
            text = self.input(f"learned{how}", text, "float", shape.count(",") + 1, is_leaf=True)
        if draw.chance(0.4):
            text = f"{text} + {self.hiding()}"
        if draw.chance(0.2):
            text = draw.pick(
                f"({text}).detach()",
                f"({text}) * 2",
                f"({text}).clone()",
                f"({text}).float().to(FLOAT)",
                f"({text}).data",
            )
        return draw.let("bias", text, "float", 4, plain=text)

    def added(self) -> str:
        """The name of numbers to add to scores: a mask, or such that have a gradient."""
        return self.learned() if self.draw.chance(0.3) else self.hiding()

    def hiding(self) -> str:
        """The name of a mask to add to scores."""
        draw, visible = self.draw, self.boolean()
        low = draw.mostly(
            "float('-inf')", "-1e30", "torch.finfo(FLOAT).min", "-1e9", "-10.0", "-1e8", "-9e8", "-math.inf"
        )
        zero = f"torch.zeros((), dtype=FLOAT{draw.at})"
        text = draw.mostly(
            f"torch.where({visible}, {zero}, {low})",
            f"torch.where({visible}, 0.0, {low}).to(FLOAT)",
            f"(1.0 - {visible}.to(FLOAT)) * -1e30",
            f"(1.0 - {visible}.to(torch.bfloat16)).to(FLOAT) * -1e30",
            f"torch.zeros(B, 1, T, S, dtype=FLOAT{draw.at}).masked_fill({spellings.inverted(draw, visible)}, {low})",
            f"torch.zeros(B, 1, T, S, dtype=FLOAT{draw.at}).masked_fill_({spellings.inverted(draw, visible)}, {low})",
            f"{zero}.where({visible}, {low})",
            f"torch.full((B, 1, T, S), {low}, dtype=FLOAT{draw.at}).masked_fill({visible}, 0)",
            f"{visible}.to(FLOAT).log()",
            f"torch.mul(({spellings.inverted(draw, visible)}).to(FLOAT), -1e30)",
        )
        return draw.let("bias", text, "float", 4, plain=f"torch.where({visible}, {zero}, {low})")
